"""What trackers of experiments get, and what a session and the package say of themselves."""

from importlib.metadata import version
from typing import Any

import torch

import backhaul
from backhaul import Session, Settings
from backhaul._observe.report import BlockReport, Helper, Report, StepsReport
from conftest import QUIET
from support.processes import WorkerProcess

COUNTS = {"backhaul/fallbacks", "backhaul/rechecks", "backhaul/up_bytes", "backhaul/down_bytes"}
OF_STEPS = {"backhaul/added_s_per_step", "backhaul/spared_s_per_step", "backhaul/saved_bytes"}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def train(session: Session, steps: int) -> None:
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters())
    for _ in range(steps):
        y = session.checkpoint(lambda x: layer(x).tanh(), torch.randn(32, 64))
        y.square().mean().backward()
        optimizer.step()


def test_a_tracker_gets_numbers_under_stable_names(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, recheck=1.0, settings=QUIET) as session:
        assert session.report().metrics() == dict.fromkeys(COUNTS, 0)
        train(session, 3)
        report = session.report()
        figures = report.metrics()
        assert figures.keys() == {*COUNTS, *OF_STEPS, "backhaul/remote_share"}
        assert (figures["backhaul/remote_share"], figures["backhaul/rechecks"]) == (1.0, 3)
        assert figures["backhaul/up_bytes"] == report.up_bytes > 0
        assert report.steps is not None
        assert figures["backhaul/added_s_per_step"] == report.steps.added_s / 3 > 0
        assert figures["backhaul/saved_bytes"] == report.steps.saved_bytes > 0
        assert str(report.steps) in str(report)
        assert str(report).endswith("values of workers have the bits of those of forward, wherever they were compared")


def test_without_telemetry_there_are_no_figures_of_steps(worker: WorkerProcess) -> None:
    settings = Settings(**{**QUIET.given(), "telemetry": False})
    with backhaul.connect(worker.address, settings=settings) as session:
        train(session, 1)
        assert session.report().steps is None
        assert session.report().metrics().keys() == {*COUNTS, "backhaul/remote_share"}


def test_means_are_those_of_all_steps() -> None:
    steps = StepsReport(count=4, wait_s=2.0, overhead_s=1.0, spared_s=8.0, saved_bytes=5_000_000)
    assert str(steps) == (
        "in the mean of 4 steps: 750.0 ms added (500.0 ms of them waiting), where the trainer alone would have taken "
        "2000.0 ms\n"
        "4.768 MiB less memory than without checkpointing; steps 1250.0 ms shorter than with torch's checkpoint"
    )
    figures = Report((), steps=steps).metrics()
    assert (figures["backhaul/added_s_per_step"], figures["backhaul/spared_s_per_step"]) == (0.75, 2.0)


def test_a_session_says_what_it_is(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        train(session, 2)
        description = f"{worker.address} (up); 2 segments recomputed on workers, 0 fallbacks"
        assert repr(session) == f"<backhaul.Session {session.run}: {description}>"
    assert repr(session) == f"<backhaul.Session {session.run}: closed>"


def test_the_package_has_its_version() -> None:
    assert backhaul.__version__ == version("backhaul")


def test_a_block_without_a_share_of_the_trainer_has_no_speed_up() -> None:
    block = BlockReport(2, 1.0, 0.5, Helper(0, 0.0), {"gpu-2:50051": Helper(6, 0.1)}, 3 << 20)
    assert str(block).splitlines() == [
        "last accumulation block: 2 micro-batches in 1.00 s, at most 3 MiB of gradients pending and 0 B in unfinished "
        "micro-batches",
        "  trainer: 0 of 6 segments, 0.0 ms each",
        "  gpu-2:50051: 6 of 6 segments, 100.0 ms each",
    ]


def test_reasons_are_followed_by_the_sections_that_say_what_to_do(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        train(session, 1)
        assert "what to do" not in str(session.report())
        y = session.checkpoint(Square.apply, torch.ones(2, requires_grad=True))
        y.sum().backward()
        assert "\nwhat to do: docs/on-the-trainer.md#kept-on-the-trainer\n" in str(session.report())
