"""Workers that compute other bits: gradients right within rounding, with the trainer's own draws and decisions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

import backhaul
from backhaul import CheckpointError, Decision, Session
from backhaul._backward.frame import RecordedSegment
from backhaul._backward.value_check import Recomputed, check_recomputed
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.random_projection import project
from conftest import QUIET, RETURNS, wait_until
from numerics.cases import CASES, WIDTH, Case
from support.bits import Checkpoint, differing, grad_of, plainly, train
from support.loopback import Loopback
from support.processes import WorkerProcess

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
LOWER = {"ATEN_CPU_CAPABILITY": "avx2" if HAS_AVX512 else "default"}
# Other kernels of torch itself, of oneDNN, and of both down to what every x86-64 has.
LEVELS = {
    "ATen": LOWER,
    "oneDNN": {"ONEDNN_MAX_CPU_ISA": "AVX2" if HAS_AVX512 else "SSE41"},
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
REMOTE = [
    "stack",
    "bf16 autocast",
    "keyword mask",
    "closure and partial",
    "randomness of its own",
    "expert routing",
    "shared states and weights",
    "convolutions and norms",
    "recurrent",
    "buffer read and updated",
    "written slices",
    "auxiliary loss",
]
# Of all gradients together, relative to their norm. Measured: 7e-5 where bfloat16 is summed inside, else below 1e-6.
# Gradients that are zero but for rounding (a bias before a norm) have no relative error of their own.
NEAR = 3e-4


@pytest.fixture(scope="module", params=LEVELS)
def other(request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", environment=LEVELS[request.param]) as worker:
        yield worker


@pytest.fixture(scope="module")
def perturbed() -> Iterator[WorkerProcess]:
    program = [str(Path(__file__).parents[1] / "support/perturbed_worker.py")]
    with WorkerProcess(environment=LOWER, program=program) as worker:
        yield worker


def distance(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """Norm of the difference of all floating tensors together, relative to their norm."""
    assert [t is None for t in ours] == [t is None for t in theirs]
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    pairs = [(a, b) for a, b in both if a.is_floating_point()]
    difference = torch.stack([(a.double() - b.double()).norm() for a, b in pairs]).norm()
    return float(difference / torch.stack([b.double().norm() for _, b in pairs]).norm())


def one_step(case: Case, checkpoint: Checkpoint) -> list[Tensor | None]:
    return train(checkpoint, case.build, case.run, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "returns"),
    [("ATen", "gradients"), ("oneDNN", "activations"), ("SSE4.1", "gradients"), ("SSE4.1", "activations")],
    indirect=["other"],
    scope="module",
)
@pytest.mark.parametrize("name", REMOTE)
def test_gradients_are_right_on_other_hardware(name: str, returns: str, other: WorkerProcess) -> None:
    case = CASES[name]
    expected = one_step(case, plainly)
    with backhaul.connect(other.address, settings=QUIET) as session:
        ours = one_step(case, partial(session.checkpoint, returns=returns))
        report = session.report()
    assert differing(ours[:1], expected[:1]) == []  # forward is the trainer's own
    assert distance(ours, expected) < NEAR
    assert report.fallbacks == 0
    assert report.remote > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_recheck_accuses_no_honest_worker(name: str, other: WorkerProcess) -> None:
    with backhaul.connect(other.address, recheck=1.0, settings=QUIET) as session:
        one_step(CASES[name], session.checkpoint)
        report = session.report()
    assert report.fallbacks == 0
    for segment in report.segments:
        assert segment.rechecked == segment.decisions.get(Decision.GRADIENTS, 0)


@pytest.mark.parametrize("other", ["SSE4.1"], indirect=True, scope="module")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_recheck_allows_for_gradients_that_are_zero_but_for_rounding(is_mixed: bool, other: WorkerProcess) -> None:
    """The bias before a norm. Under autocast float32 holds what was rounded to bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64))
    with backhaul.connect(other.address, recheck=1.0, settings=QUIET) as session:
        for _ in range(8):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                y = session.checkpoint(model, torch.randn(256, 64))
            y.float().square().mean().backward()
        (segment,) = session.report().segments
    assert segment.reasons == {}
    assert segment.rechecked == 8


@pytest.mark.slow
def test_drift_is_measured_and_shown(other: WorkerProcess) -> None:
    with backhaul.connect(other.address, settings=QUIET) as session:
        one_step(CASES["shared states and weights"], session.checkpoint)
        one_step(CASES["convolutions and norms"], session.checkpoint)
        drift = session.report().drift
        assert 0 < drift < 1e-5
        assert f"drift {drift:.1e}" in str(session.report())
        assert f"values of workers are within {drift:.0e} of those of forward" in str(session.report())
        wait_until(lambda: drift in [s.drift for s in other.telemetry().sessions], "the worker is told")


@pytest.mark.parametrize("returns", RETURNS)
def test_exact_numerics_stay_on_the_trainer(returns: str, other: WorkerProcess) -> None:
    expected = one_step(CASES["stack"], plainly)
    with pytest.warns(backhaul.NotRemoteWarning, match='every segment.*Drop numerics="exact"'):
        session = backhaul.connect(other.address, numerics="exact", settings=QUIET)
    with session:
        assert differing(one_step(CASES["stack"], partial(session.checkpoint, returns=returns)), expected) == []
        report = session.report()
    assert report.remote == 0
    (reason,) = report.segments[0].reasons
    assert "computes other bits than this trainer" in reason
    assert "here and" in reason


@pytest.mark.slow
def test_it_is_said_once(other: WorkerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with backhaul.connect(other.address, settings=QUIET) as session:
        for _ in range(3):
            one_step(CASES["stack"], session.checkpoint)
    assert len([record for record in caplog.records if "other bits" in record.getMessage()]) == 1


@pytest.mark.parametrize("key", ["torch", "device"])
def test_another_torch_or_kind_of_device_is_more_than_rounding(
    key: str, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    worker = session._workers[0]
    worker_session = worker.connection.up
    assert worker_session is not None
    worker.connection._worker_session = replace(
        worker_session, fingerprint={**worker_session.fingerprint, key: "another"}
    )
    assert differing(one_step(CASES["stack"], session.checkpoint), one_step(CASES["stack"], plainly)) == []
    assert session.report().remote == 0
    (reason,) = session.report().segments[0].reasons
    assert f"{key} is" in reason
    assert "within tolerances" not in caplog.text


# On hardware that is the same after all, what is pinned changes nothing.


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.kept])
def test_what_is_pinned_is_what_was(name: str, returns: str) -> None:
    case, remote = CASES[name], Loopback(records_choices=True)
    assert differing(one_step(case, partial(remote.checkpoint, returns=returns)), one_step(case, plainly)) == []
    report = remote.report()
    assert (report.fallbacks, report.drift) == (0, 0.0)
    assert report.remote > 0


# A mixture of experts whose router is nearly undecided.


class Undecided(nn.Module):
    """Experts whose scores differ by some roundings."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        with torch.no_grad():
            self.router.weight[1:] = self.router.weight[0] * (1 + 1e-7 * torch.arange(1, 4).unsqueeze(1))
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)
        self.choose = choose

    def forward(self, h: Tensor) -> Tensor:
        weights, chosen = self.choose(self.router(h))
        return torch.einsum("tw,twv->tv", h, self.experts[chosen]) * weights.unsqueeze(-1)


def by_topk(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.softmax(-1).topk(1, -1)
    return weights[:, 0], chosen[:, 0]


def by_argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    chosen = scores.argmax(-1)
    return scores.gather(-1, chosen.unsqueeze(-1))[:, 0], chosen


def by_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    return scores.max(-1)


def by_sort(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, order = scores.sort(-1, descending=True)
    return weights[:, 0], order[:, 0]


def by_multinomial(scores: Tensor) -> tuple[Tensor, Tensor]:
    chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return scores.softmax(-1)[torch.arange(len(scores)), chosen], chosen


def by_mask(scores: Tensor) -> tuple[Tensor, Tensor]:
    best = scores == scores.max(-1, keepdim=True).values
    return (scores * best).sum(-1), best.int().argmax(-1)


def by_nonzero(scores: Tensor) -> tuple[Tensor, Tensor]:
    above = (scores > scores.mean(-1, keepdim=True)).nonzero()
    hits = torch.zeros(len(scores)).index_add(0, above[:, 0], scores[above[:, 0], above[:, 1]])
    return hits, torch.bincount(above[:, 0], minlength=len(scores)).clamp(max=3)


CHOICES = [by_topk, by_argmax, by_max, by_sort, by_multinomial, by_mask, by_nonzero]


def route(choose: Any, checkpoint: Checkpoint) -> list[Tensor | None]:
    def run(checkpoint: Checkpoint, model: Any) -> tuple[Tensor, list[Tensor]]:
        x = torch.randn(64, WIDTH, requires_grad=True)
        return checkpoint(model, x * 1.0).square().sum(), [x]

    return train(checkpoint, lambda: Undecided(choose), run, steps=1)


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("choose", CHOICES)
def test_experts_stay_chosen_where_rounding_would_turn_them(
    choose: Any, returns: str, perturbed: WorkerProcess
) -> None:
    expected = route(choose, plainly)
    with backhaul.connect(perturbed.address, settings=QUIET) as session:
        ours = route(choose, partial(session.checkpoint, returns=returns))
        report = session.report()
    assert distance(ours, expected) < NEAR
    assert (report.remote, report.fallbacks) == (1, 0)
    assert report.drift > 0


@pytest.mark.slow
@pytest.mark.parametrize("choose", CHOICES)
def test_without_recorded_choices_they_would_turn(
    choose: Any, perturbed: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above could fail. What comes of it is seen, and the trainer's own gradient is taken."""
    expected = route(choose, plainly)
    with backhaul.connect(perturbed.address, settings=QUIET) as session:
        worker, dispatcher = session._workers[0], session._dispatcher
        save = dispatcher.save

        def lie(segment: RecordedSegment, *given: Any) -> Any:
            segment.call.recording.has_recorded_choices = True
            return save(segment, *given)

        monkeypatch.setattr(dispatcher, "records_choices", lambda device: False)
        monkeypatch.setattr(dispatcher, "save", lie)
        assert differing(route(choose, session.checkpoint), expected) == []
        assert worker.connection.drift == 0
        assert session.report().fallbacks == 1


def test_masks_travel_as_bits(perturbed: WorkerProcess) -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    with backhaul.connect(perturbed.address, settings=QUIET) as session:
        h = x * 1
        y = session.checkpoint(lambda h: F.dropout(h, 0.3).sin(), h, returns="gradients")
        y.sum().backward()
        report = session.report()
    expected = torch.where(y == 0, 0, y.arcsin().cos() / 0.7)  # sin and its inverse keep the mask
    assert torch.equal(grad_of(x) == 0, expected == 0)
    assert report.segments[0].decisions == {Decision.GRADIENTS: 1}
    # 4 bytes of the input and one bit of the mask for each element.
    assert 4.125 * x.numel() <= report.up_bytes < 4.15 * x.numel()


def test_draws_that_can_not_be_told_stay_here() -> None:
    remote = Loopback(records_choices=True)
    x = torch.randn(64, requires_grad=True)
    remote.checkpoint(lambda h: F.rrelu(h, training=True), x).sum().backward()
    (reason,) = remote.report().segments[0].reasons
    assert "can't be sent to a worker with other hardware" in reason


@pytest.mark.parametrize(
    "fn",
    [
        lambda h: h.amax(-1),
        lambda h: h.max(),
        lambda h: torch.maximum(h, h.flip(0)),
        lambda h: h.clamp(-1, 1),
        F.hardtanh,
        lambda h: F.l1_loss(h, torch.ones_like(h)),
        lambda h: torch.linalg.vector_norm(h, float("inf"), dim=-1),
    ],
)
def test_ties_that_backward_decides_stay_here(fn: Callable[[Tensor], Tensor], perturbed: WorkerProcess) -> None:
    x = torch.randint(-2, 3, (6, 8)).float().requires_grad_()
    weight = torch.eye(8)
    (expected,) = torch.autograd.grad(fn(F.linear(x, weight)).square().sum(), x)
    with backhaul.connect(perturbed.address, settings=QUIET) as session:
        y = session.checkpoint(lambda x: fn(F.linear(x, weight)), x)
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
        (reason,) = session.report().segments[0].reasons
    assert "compares numbers" in reason


def test_more_than_rounding_is_refused() -> None:
    """A worker that is far off is not believed, and its trainer has the right gradient all the same."""

    class Off(Loopback):
        def save(self, *args: Any) -> Any:
            segment, program = super().save(*args)
            segment.work.sources[0].mul_(1.01)
            return segment, program

    remote = Off(records_choices=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    remote.checkpoint(lambda h: (h * 2).sin().exp(), x).sum().backward()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    assert torch.equal(grad_of(x), expected)
    (reason,) = remote.report().segments[0].reasons
    assert "more than rounding" in reason


def test_a_call_before_the_worker_changed_is_not_sent(session: Session) -> None:
    """A recording without recorded choices can't go to a worker of other hardware, whenever that appeared."""
    worker = session._workers[0]
    worker_session = worker.connection.up
    assert worker_session is not None
    x = torch.randn(4, requires_grad=True)

    def fn(h: Tensor) -> Tensor:
        worker.differences[worker_session.number, h.device, False] = {"cpu": ("one", "another")}
        return h.sin()

    session.checkpoint(fn, x).sum().backward()
    assert torch.equal(grad_of(x), x.detach().cos())
    assert session.report().fallbacks == 1


def test_error_names_drift_and_what_is_allowed() -> None:

    x, y = torch.randn(100), torch.randn(100)
    saved = SavedTensor(bytes(16), "aten.sin.default", layout_of(x), -1, 0, False, project(x))
    with pytest.raises(CheckpointError, match=r"drift .*, allowed 1e-04"):
        check_recomputed("fn", [saved], Recomputed([bytes(15) + b"x"], [project(y)]))


def test_a_worker_that_projections_less_than_it_saved_is_refused() -> None:

    x = torch.randn(100)
    saved = [SavedTensor(bytes(16), "aten.sin.default", layout_of(x), -1, 0, False, project(x))] * 2
    with pytest.raises(CheckpointError):
        check_recomputed("fn", saved, Recomputed([b"x" * 16] * 2, [project(x)]))
