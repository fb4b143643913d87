"""Boundaries between segments that a worker computes itself: `Settings(boundaries="derive")`."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._accumulate.plan import Shares
from backhaul._backward.remote_side import StoredGradient
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, ReplayError, SegmentUnknownError
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.wire.layout_codec import encode_layout
from conftest import QUIET, quiet
from support.bits import Checkpoint, differing, plainly
from support.hostile import Hostile, chain
from support.processes import WorkerProcess

SEGMENTS, WIDTH, ROWS, MICRO_BATCHES = 6, 128, 256, 3
BOUNDARY_BYTES = 4 * WIDTH * ROWS


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers all segments: the trainer would soon compute such small ones alone."""
    monkeypatch.setattr(Shares, "trainers_share", lambda self: 0)


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, returns="gradients", settings=quiet(boundaries="derive")) as session:
        yield session


def train(
    checkpoint: Checkpoint,
    accumulate: Callable[[], Any] | None = None,
    between: Callable[[Tensor], Tensor] = lambda y: y,
    steps: int = 2,
) -> list[Tensor | None]:
    """Runs steps of some micro-batches. Returns all gradients of all steps."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    segments = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(SEGMENTS)]
    parameters = [*first.parameters(), *(parameter for segment in segments for parameter in segment.parameters())]
    gradients: list[Tensor | None] = []
    for _ in range(steps):
        with accumulate() if accumulate is not None else nullcontext() as block:
            for _ in range(MICRO_BATCHES):
                y = first(torch.randn(ROWS, WIDTH))
                for segment in segments:
                    y = between(checkpoint(segment, y))
                loss = y.square().mean()
                loss.backward() if block is None else block.backward(loss)
        gradients += [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
    return gradients


def test_a_micro_batch_moves_three_boundaries(session: Session) -> None:
    train(session.checkpoint, session.accumulate, steps=1)  # sends programs
    before = session.report()
    ours = train(session.checkpoint, session.accumulate, steps=1)
    after = session.report()
    assert differing(ours, train(plainly, steps=1)) == []
    parameter_bytes = 4 * SEGMENTS * (WIDTH * WIDTH + 3 * WIDTH)
    moved = after.up_bytes - before.up_bytes + after.down_bytes - before.down_bytes - parameter_bytes
    # What remains describes requests and answers: some 2 kB for each segment.
    assert 3 * BOUNDARY_BYTES < moved / MICRO_BATCHES < 3 * BOUNDARY_BYTES + 4_000 * SEGMENTS


def test_it_works_without_blocks(session: Session) -> None:
    before = session.report().up_bytes
    assert differing(train(session.checkpoint), train(plainly)) == []
    assert session.report().up_bytes - before < 2 * MICRO_BATCHES * 4 * BOUNDARY_BYTES
    assert session.report().fallbacks == 0


@pytest.mark.parametrize(
    ("bytes_per_s", "in_block", "derives"),
    [(0.0, True, False), (1.0, True, True), (1e15, True, False), (1.0, False, False)],
)
def test_auto_derives_in_blocks_where_sending_takes_longer_than_forward(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, in_block: bool, derives: bool
) -> None:
    # The rate stays as it is set.
    monkeypatch.setattr("backhaul._worker_client.upload.segment_sender.MEASURED_BYTES", 1 << 40)
    with backhaul.connect(worker.address, returns="gradients", settings=QUIET) as session:
        session._workers[0].uploader.sender.bytes_per_s = bytes_per_s
        accumulate = session.accumulate if in_block else None
        train(session.checkpoint, accumulate, steps=1)  # sends programs
        before = session.report().up_bytes
        assert differing(train(session.checkpoint, accumulate, steps=1), train(plainly, steps=1)) == []
        boundaries = (session.report().up_bytes - before) / MICRO_BATCHES / BOUNDARY_BYTES
        assert (boundaries < SEGMENTS - 1) == derives


def test_replays_that_do_not_fit_run_again_for_their_outputs() -> None:
    with (
        WorkerProcess("--memory", "6MiB") as worker,
        backhaul.connect(worker.address, settings=quiet(boundaries="derive")) as session,
    ):
        assert differing(train(session.checkpoint, session.accumulate), train(plainly)) == []
        assert session.report().remote > 0


def test_two_workers_derive_their_own_arcs(worker: WorkerProcess, own_worker: WorkerProcess) -> None:
    addresses = f"{worker.address},{own_worker.address}"
    with backhaul.connect(addresses, settings=quiet(boundaries="derive")) as session:
        assert differing(train(session.checkpoint, session.accumulate), train(plainly)) == []
        assert session.report().fallbacks == 0


def test_a_boundary_that_was_written_to_unseen_is_sent_from_then_on(session: Session) -> None:
    def doubled(y: Tensor) -> Tensor:
        with torch.no_grad():
            return y.mul_(2)

    expected = train(plainly, between=doubled)
    assert differing(train(session.checkpoint, between=doubled), expected) == []
    (segment,) = session.report().segments
    assert any("differs from the trainer's" in reason for reason in segment.reasons)
    assert session.report().fallbacks == SEGMENTS - 1  # all in the first backward


@pytest.mark.parametrize("fails_at", range(1, SEGMENTS))
def test_a_gradient_that_only_a_worker_had_is_computed_again(
    fails_at: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward, stored = SavedSegment.backward, 0

    def failing(self: SavedSegment, gradients: Any, *given: Any, **options: Any) -> Any:
        nonlocal stored
        stored += isinstance(gradients[0], StoredGradient)
        if stored == fails_at and isinstance(gradients[0], StoredGradient):
            raise backhaul.WorkerLostError("lost", status="LOST")
        return backward(self, gradients, *given, **options)

    monkeypatch.setattr(SavedSegment, "backward", failing)
    assert differing(train(session.checkpoint, session.accumulate), train(plainly)) == []
    assert session.report().fallbacks == 1


SINE = chain("aten.sin.default", 1, 16)


def save(client: Hostile, segment: int, address: bytes, *, origin: int = 0, output: int = 0) -> Any:
    """Saves a sine; with `origin`, of that segment's output."""
    before = segment_pb2.Predecessor(segment=origin, output=output, derived=encode_layout(layout_of(torch.ones(4))))
    request = segment_pb2.SaveRequest(
        key=client.key(segment),
        program=client.program(SINE),
        sources=[address],
        predecessors=[before] if origin else [],
    )
    (answer,) = client.ask(save=request)
    return answer.save


def error_of_backward(client: Hostile, segment: int) -> BackhaulError | None:
    (gradient,) = client.put(torch.ones(4))
    with pytest.raises(BackhaulError) as caught:
        client.ask(backward=client.backward(segment, gradient))
    return caught.value


@pytest.mark.parametrize(("origin", "output"), [(7, 0), (2, 0), (1, 1)], ids=["unknown", "itself", "no such output"])
def test_what_cannot_be_derived_is_missing(origin: int, output: int, worker: WorkerProcess) -> None:
    with Hostile(worker.address) as client:
        (x,) = client.put(torch.ones(4))
        assert not save(client, 1, x).missing_tensors
        boundary = address_of(torch.ones(4).sin())
        assert list(save(client, 2, boundary, origin=origin, output=output).missing_tensors) == [boundary]


def test_another_value_than_the_trainers_is_an_error(worker: WorkerProcess) -> None:
    with Hostile(worker.address) as client:
        (x,) = client.put(torch.ones(4))
        save(client, 1, x)
        assert not save(client, 2, address_of(torch.zeros(4)), origin=1).missing_tensors
        assert isinstance(error_of_backward(client, 2), ReplayError)


def test_a_segment_behind_a_released_one_is_an_error(worker: WorkerProcess) -> None:
    with Hostile(worker.address) as client:
        (x,) = client.put(torch.ones(4))
        save(client, 1, x)
        assert not save(client, 2, address_of(torch.zeros(4)), origin=1).missing_tensors
        client.ask(release=segment_pb2.ReleaseRequest(keys=[client.key(1)]))
        assert isinstance(error_of_backward(client, 2), SegmentUnknownError)
