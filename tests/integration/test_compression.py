"""Training whose parameters are sent as differences: bit by bit what it is without, whatever becomes of the base."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._dispatch.prediction import CallSite
from backhaul_proto.v1 import segment_pb2
from conftest import QUIET_S, wait_until
from support.bits import Checkpoint, differing, plainly
from support.blocks import loop
from support.processes import WorkerProcess, in_order
from support.wire import Asked, Services

WIDTH, ROWS, SEGMENTS, STEPS = 64, 8, 3, 5
WEIGHT_BYTES = SEGMENTS * 2 * WIDTH * 4 * WIDTH
"""Bytes of all weights in two bytes each."""


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, rank: int = 32) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def wide() -> nn.Module:
    """A segment whose differences do not fit in one message."""
    return nn.Sequential(nn.Linear(WIDTH, 20_000), nn.GELU(), nn.Linear(20_000, WIDTH))


class Training:
    """A training that runs step by step.

    Args:
        build: Makes a segment.
        dtype: The dtype of parameters and activations.
        after: Called with the parameters and the number of each step after it.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] = dense,
        dtype: torch.dtype = torch.bfloat16,
        after: Callable[[list[nn.Parameter], int], None] = lambda parameters, step: None,
    ) -> None:
        torch.manual_seed(0)
        self.segments = [build().to(dtype) for _ in range(SEGMENTS)]
        self.parameters = [parameter for segment in self.segments for parameter in segment.parameters()]
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        self.dtype, self.after, self.steps = dtype, after, 0
        self.gradients: list[Tensor | None] = []

    def run(self, checkpoint: Checkpoint, steps: int, accumulate: Callable[[], Any] = loop) -> list[Tensor | None]:
        """Runs steps of two micro-batches. Returns all gradients so far."""
        for _ in range(steps):
            self.steps += 1
            torch.manual_seed(self.steps)
            with accumulate() as block:
                for _ in range(2):
                    y = torch.randn(ROWS, WIDTH, dtype=self.dtype)
                    for segment in self.segments:
                        y = checkpoint(segment, y)
                    loss = y.square().mean()
                    block.backward(loss)
            self.gradients += [None if p.grad is None else p.grad.clone() for p in self.parameters]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after(self.parameters, self.steps)
        return self.gradients


def connected(address: str, *, strict: bool = True, **settings: Any) -> Session:
    values = {"silence_s": QUIET_S, "compression": "on", "shared_memory": False, "unix_socket": False, **settings}
    return backhaul.connect(address, strict=strict, settings=backhaul.Settings(**values))


@pytest.fixture(scope="module")
def second() -> Iterator[WorkerProcess]:
    """A worker for this module, which tests may kill: its supervisor starts another one."""
    with WorkerProcess("--memory", "256MiB", supervised=True) as process:
        yield process


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with connected(worker.address) as session:
        yield session


def is_equal(ours: Training, theirs: Training) -> bool:
    """Whether a training has the gradients and parameters of one without checkpointing, which runs now."""
    expected = theirs.run(plainly, ours.steps)
    same_parameters = all(map(torch.equal, ours.parameters, theirs.parameters))
    return same_parameters and differing(ours.gradients, expected) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("build", [dense, Adapted])
def test_gradients_are_equal_and_fewer_bytes_travel(
    build: Callable[[], nn.Module], dtype: torch.dtype, session: Session
) -> None:
    ours = Training(build, dtype)
    ours.run(session.checkpoint, 2)
    sent_whole = session.report()
    assert sent_whole.spared_bytes == 0
    trained_bytes = sum(p.nbytes for p in ours.parameters if p.requires_grad and p.nbytes >= 4096)
    assert sent_whole.copied_bytes == trained_bytes  # neither what is frozen nor what is small
    ours.run(session.checkpoint, STEPS - 2)
    report = session.report()
    most, least = (1.0, 0.8) if dtype is torch.bfloat16 else (1.0, 0.3)
    assert least < report.spared_bytes / (trained_bytes * (STEPS - 2)) < most
    assert report.copied_bytes == trained_bytes
    assert report.fallbacks == 0
    assert is_equal(ours, Training(build, dtype))
    assert "of uploads; copies take" in str(report)


def test_gradients_are_equal_in_accumulation_blocks(session: Session) -> None:
    ours = Training()
    ours.run(session.checkpoint, STEPS, session.accumulate)
    assert session.report().spared_bytes > 0
    assert is_equal(ours, Training())


def test_two_workers_each_have_their_own_versions(worker: WorkerProcess, second: WorkerProcess) -> None:
    with connected(in_order(worker, second)) as both:
        ours = Training()
        ours.run(both.checkpoint, STEPS)
        assert both.report().spared_bytes > WEIGHT_BYTES
        assert is_equal(ours, Training())


def without_a_version(parameters: list[nn.Parameter], step: int) -> None:
    """Changes weights in ways that torch's version counter does not see, and replaces their memory."""
    with torch.no_grad():
        if step % 2:
            for parameter in parameters[::2]:
                parameter.data.mul_(1.25)
        else:
            for parameter in parameters[1::2]:
                parameter.data = parameter.data * 0.75


def test_weights_that_are_changed_through_data(session: Session) -> None:
    ours = Training(after=without_a_version)
    ours.run(session.checkpoint, STEPS + 1)
    assert session.report().spared_bytes > 0
    assert is_equal(ours, Training(after=without_a_version))


@pytest.mark.parametrize("build", [dense, wide])
def test_a_worker_that_no_longer_has_the_base_gets_the_whole_tensor(
    build: Callable[[], nn.Module], worker: WorkerProcess, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build is wide:  # otherwise the upload of a prediction fails, and the confirmation sends whole tensors anyway
        monkeypatch.setattr(CallSite, "predict", lambda *_: None)
    ours = Training(build)
    ours.run(session.checkpoint, STEPS - 1)
    uploader = session._workers[0].uploader
    worker_session = session._workers[0].connection.up
    assert worker_session is not None
    before = session.report()
    # The worker forgets all versions, and the trainer does not know: a request names them as superseded.
    bases = [version.address for version in uploader._compression._versions.values() if version.address]
    assert all(map(partial(uploader.stored.knows, worker_session), bases))
    with grpc.insecure_channel(worker.address) as channel:
        key = segment_pb2.OperationKey(segment=1 << 40)
        # Releases of the session must not overtake it.
        request = segment_pb2.SaveRequest(key=key, superseded=bases, after_release=1 << 40)
        (answer,) = Asked(Services(channel).segments, worker_session.session, save=request)
        assert answer.save.program_missing
    ours.run(session.checkpoint, 1)
    report = session.report()
    assert report.fallbacks == 0
    assert report.spared_bytes == before.spared_bytes
    ours.run(session.checkpoint, 1)
    assert session.report().spared_bytes > before.spared_bytes
    assert is_equal(ours, Training(build))


def test_a_worker_that_starts_anew_gets_whole_tensors(second: WorkerProcess) -> None:
    with connected(second.address, strict=False) as session:
        ours = Training()
        ours.run(session.checkpoint, 3)
        before, connection = session.report(), session._workers[0].connection
        up = connection.up
        assert before.spared_bytes > 0
        os.kill(second.serving(), signal.SIGKILL)
        wait_until(lambda: connection.up is not None and connection.up is not up, "the worker is back")
        ours.run(session.checkpoint, 1)
        assert session.report().spared_bytes == before.spared_bytes
        ours.run(session.checkpoint, 2)
        assert session.report().spared_bytes > before.spared_bytes
        assert is_equal(ours, Training())


def test_copies_are_bounded_and_whatever_has_none_is_sent_whole(worker: WorkerProcess) -> None:
    one = 2 * WIDTH * 4 * WIDTH
    with connected(worker.address, compression_bytes=one + 1) as session:
        ours = Training()
        ours.run(session.checkpoint, STEPS)
        report = session.report()
        assert report.copied_bytes == one
        assert one < report.spared_bytes < (STEPS - 2) * one
        assert is_equal(ours, Training())


@pytest.mark.parametrize("settings", [{"compression": "off"}, {"unix_socket": True, "compression": "auto"}])
def test_no_copies_are_kept_where_whole_tensors_are_sent(settings: dict[str, Any], worker: WorkerProcess) -> None:
    with connected(worker.address, **settings) as session:
        Training().run(session.checkpoint, 3)
        assert (session.report().spared_bytes, session.report().copied_bytes) == (0, 0)


def test_a_damaged_difference_is_never_used(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Training()
    ours.run(session.checkpoint, 2)
    for version in session._workers[0].uploader._compression._versions.values():
        if version.copy is not None:
            version.copy[1] ^= 1  # as a flipped bit of memory would
    ours.run(session.checkpoint, 1)
    assert session.report().spared_bytes == 0
    assert session.report().fallbacks == 0
    ours.run(session.checkpoint, 1)
    assert session.report().spared_bytes > 0
    assert is_equal(ours, Training())
