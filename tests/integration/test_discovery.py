"""Workers that join and leave while a session is open, as a file or a name says."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET, wait_until
from support.bits import Checkpoint, differing, plainly
from support.processes import WorkerProcess

SEGMENTS, WIDTH = 6, 32


class Training:
    """A chain of segments whose forward and backward are separate steps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        torch.manual_seed(0)
        self.checkpoint = checkpoint
        self.segments = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()) for _ in range(SEGMENTS)]
        self.parameters = [parameter for segment in self.segments for parameter in segment.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01)

    def forward(self) -> Tensor:
        x = torch.randn(8, WIDTH, requires_grad=True)
        for segment in self.segments:
            x = self.checkpoint(segment, x)
        return x.square().mean()

    def step(self, loss: Tensor) -> list[Tensor | None]:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters]

    def steps(self, count: int) -> list[Tensor | None]:
        return [gradient for _ in range(count) for gradient in self.step(self.forward())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "workers"


@pytest.fixture
def session(worker: WorkerProcess, file: Path) -> Iterator[Session]:
    file.write_text(f"{worker.address} # the first\n")
    with backhaul.connect(f"file:{file}", settings=QUIET) as session:
        yield session


def computed(worker: WorkerProcess) -> int:
    """How many segments the worker has computed."""
    return worker.telemetry().recomputed_segments


@pytest.mark.slow
def test_workers_join_and_leave_while_training_goes_on(
    session: Session, worker: WorkerProcess, own_worker: WorkerProcess, file: Path
) -> None:
    without = Training(plainly)
    plan = [without.steps(3) for _ in range(3)]
    ours = Training(session.checkpoint)
    assert differing(ours.steps(3), plan[0]) == []
    assert [handle.connection.name for handle in session._workers] == [worker.address]

    file.write_text(f"{worker.address}\n{own_worker.address}\n")
    wait_until(lambda: sum(handle.up is not None for handle in session._workers) == 2, "the second worker has joined")
    assert differing(ours.steps(3), plan[1]) == []
    assert computed(own_worker) > 0

    file.write_text(f"{own_worker.address}\n")
    wait_until(
        lambda: [handle.connection.name for handle in session._workers] == [own_worker.address], "the first left"
    )
    before = computed(worker)
    assert differing(ours.steps(3), plan[2]) == []
    assert computed(worker) == before
    assert session.report().fallbacks == 0


@pytest.mark.slow
def test_a_step_in_flight_ends_on_the_worker_that_leaves(session: Session, worker: WorkerProcess, file: Path) -> None:
    expected = Training(plainly).steps(1)
    ours = Training(session.checkpoint)
    loss = ours.forward()
    file.write_text("")
    (handle,) = session._workers
    wait_until(lambda: handle.is_leaving, "the change is noticed")
    assert differing(ours.step(loss), expected) == []
    assert (session.report().remote, session.report().fallbacks) == (SEGMENTS, 0)
    del loss
    wait_until(lambda: not session._workers, "nothing of the worker is needed")
    ours.steps(1)
    assert "no worker can be reached: none is named" in str(session.report())
    file.write_text(f"{worker.address}\n")
    wait_until(lambda: any(other.up is not None for other in session._workers), "the worker is back")
    before = session.report().remote
    ours.steps(1)
    assert session.report().remote == before + SEGMENTS


@pytest.mark.slow
def test_a_source_that_cannot_be_read_says_nothing(
    session: Session, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "backhaul")
    file.unlink()
    wait_until(lambda: "Its workers stay as they are" in caplog.text, "the trouble is logged")
    file.write_text("no address\n")
    wait_until(lambda: '"no address" can\'t be read' in caplog.text, "the mistake is logged")
    assert all(handle.up is not None for handle in session._workers)
    Training(session.checkpoint).steps(1)
    assert session.report().remote == SEGMENTS


@pytest.mark.slow
def test_connect_wants_one_worker_of_those_that_are_named(worker: WorkerProcess, file: Path) -> None:
    with pytest.raises(backhaul.ConnectError, match="the file of addresses .* can't be read: No such file"):
        backhaul.connect(f"file:{file}")
    file.write_text("# none yet\n")
    with pytest.raises(backhaul.ConnectError, match=r"file:.* named no worker within 0.5 s"):
        backhaul.connect(f"file:{file}", settings=backhaul.Settings(connect_timeout_s=0.5))
    file.write_text("127.0.0.1:1\n")
    with pytest.raises(backhaul.ConnectError, match='no worker answers at "127.0.0.1:1" .*Connection refused'):
        backhaul.connect(f"file:{file}", settings=backhaul.Settings(connect_timeout_s=1.0))
    file.write_text(f"127.0.0.1:1\n{worker.address}\n")
    with backhaul.connect(f"file:{file}", settings=QUIET) as session:
        Training(session.checkpoint).steps(1)
        assert (session.report().remote, session.report().fallbacks) == (SEGMENTS, 0)


@pytest.mark.slow
def test_a_worker_that_is_named_twice_is_used_once(worker: WorkerProcess, file: Path) -> None:
    file.write_text(f"{worker.address}\n")
    with backhaul.connect(f"{worker.address},file:{file}", settings=QUIET) as session:
        assert len(session._workers) == 1
        assert session.workers == worker.address
