"""What accumulation blocks hold, send and report, and the bounds of that."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import backhaul
from backhaul import Session
from backhaul._accumulate.plan import Shares
from backhaul._config import LOCALS, Local
from conftest import QUIET, quiet
from support.bits import differing, plainly
from support.blocks import SEGMENTS, WIDTH, Model, take_last, train, trained
from support.processes import WorkerProcess


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers all segments, and equally many: measured times would soon decide otherwise."""
    monkeypatch.setattr(Shares, "trainers_share", lambda self: 0)
    monkeypatch.setattr(Shares, "speeds", {})


def test_a_segment_that_changes_hands_leaves_one_sum_on_the_worker(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pending_bytes(*last: int) -> int:
        take_last(monkeypatch, session, "recompute", *last)
        trained(session, micro_batches=6, steps=1)
        block = session.report().block
        assert block is not None
        return block.pending_gradient_bytes - block.segment_bytes * last[-1]

    trained(session, steps=1)  # in the first micro-batch the number of segments is unknown
    others_bytes = pending_bytes(0)
    assert pending_bytes(0, 0, 0, 0, 0, 1) == others_bytes
    # The gradients of the last two micro-batches must follow the worker's sum, so they cannot be added to each other.
    assert pending_bytes(0, 0, 0, 0, 1, 1) > others_bytes


def test_the_split_keeps_to_what_may_be_held_back(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=quiet(pending_gradient_bytes=1)) as session:
        shares = session._shares["recompute"]
        assert shares.trainers_share() == 0
    with backhaul.connect(worker.address, settings=quiet(pending_gradient_bytes=1 << 20)) as session:
        shares = session._shares["recompute"]
        for _ in range(4):
            trained(session, micro_batches=8, steps=1)
            block = session.report().block
            assert block is not None
            assert 0 < block.pending_gradient_bytes <= 1 << 20
            assert shares.last_segments(8, {}, {}, 0) == 0  # because that holds back more


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCALS)
def test_what_unfinished_micro_batches_hold_is_bounded(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    def deferred_bytes(most_bytes: int) -> int:
        with backhaul.connect(worker.address, settings=quiet(deferred_bytes=most_bytes)) as session:
            monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 2)
            ours = train(session.checkpoint, partial(session.accumulate, local), micro_batches=6, steps=2)
            assert differing(ours, expected) == []
            block = session.report().block
        assert block is not None
        return block.deferred_bytes

    expected = train(plainly, micro_batches=6, steps=2)
    unbounded = deferred_bytes(0)
    assert 0 < deferred_bytes(unbounded // 2) <= unbounded // 2
    assert deferred_bytes(1) == 0  # each backward waits for all of its gradients


def test_kept_activations_count_as_pending(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def deferred_bytes(local: Local) -> int:
        monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 2)
        for _ in range(2):  # the first micro-batch shows how many segments there are
            train(session.checkpoint, partial(session.accumulate, local), steps=1)
        block = session.report().block
        assert block is not None
        return block.deferred_bytes

    assert deferred_bytes("keep") > deferred_bytes("recompute") > 0


@pytest.mark.parametrize("local", LOCALS)
def test_a_micro_batch_of_the_trainer_alone_is_finished_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 1000)
    expected = train(plainly, micro_batches=6, steps=2)
    assert (
        differing(train(session.checkpoint, partial(session.accumulate, local), micro_batches=6, steps=2), expected)
        == []
    )
    block = session.report().block
    assert block is not None
    assert (block.deferred_bytes, block.workers) == (0, {})


def test_gradients_that_are_pending_are_bounded(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        trained(session, kind="hooks on parameters", steps=1)
        block = session.report().block
        assert block is not None
        most_bytes = block.pending_gradient_bytes
    with (
        backhaul.connect(worker.address, settings=quiet(pending_gradient_bytes=most_bytes - 1)) as session,
        pytest.raises(backhaul.AccumulationError, match="pending_gradient_bytes"),
    ):
        trained(session, kind="hooks on parameters", steps=1)


def test_a_block_that_begins_with_gradients_holds_no_more_for_more_micro_batches(session: Session) -> None:
    def pending_bytes(micro_batches: int) -> int:
        trained(session, micro_batches=micro_batches, steps=2)  # only the second step begins with gradients
        block = session.report().block
        assert block is not None
        return block.pending_gradient_bytes

    assert 0 < pending_bytes(3) == pending_bytes(8)


def test_the_report_shows_who_computed_what(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 1)
    trained(session, steps=2)
    block = session.report().block
    assert block is not None
    assert (block.micro_batches, block.segments, block.trainer.segments) == (3, 3 * SEGMENTS, 3)
    assert [worker.segments for worker in block.workers.values()] == [3 * (SEGMENTS - 1)]
    assert "last accumulation block: 3 micro-batches" in str(session.report())


def test_a_plain_backward_in_a_block_ends_its_micro_batch(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 2)
    trained(session, steps=1)
    model = Model("plain")
    with session.accumulate() as block:
        for number in range(4):
            loss = model.loss(session.checkpoint, torch.randn(8, WIDTH))
            loss.backward() if number == 1 else block.backward(loss)
    report = session.report().block
    assert report is not None
    assert (report.micro_batches, report.chain, report.segments) == (3, SEGMENTS, 3 * SEGMENTS)
    assert report.trainer.segments == 3 * 2


def test_less_comes_back(session: Session) -> None:
    def received(run: Callable[..., Any]) -> int:
        before = session.report().down_bytes
        run(micro_batches=4, steps=1)
        return session.report().down_bytes - before

    gradients_bytes = sum(parameter.nbytes for parameter in Model("plain").segments.parameters())
    plain = received(lambda **options: train(session.checkpoint, **options))
    assert plain - received(lambda **options: trained(session, **options)) > 2 * gradients_bytes
