"""Who computes which segments of a block: a pure function of measured times."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._accumulate.plan import RETRY_BLOCKS, Shares, Speeds, block_s, trainers_share
from backhaul._observe.report import BlockReport, Helper

SECONDS = st.floats(1e-4, 10.0)
SPEEDS = st.builds(Speeds, SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8))


@given(segments=st.integers(1, 64), micro_batches=st.integers(1, 64), speeds=SPEEDS)
def test_no_other_share_gives_a_shorter_block(segments: int, micro_batches: int, speeds: Speeds) -> None:
    share = trainers_share(segments, micro_batches, speeds)
    assert 0 <= share <= segments
    chosen_s = block_s(share, segments, micro_batches, speeds)
    assert all(chosen_s <= block_s(other, segments, micro_batches, speeds) for other in range(segments + 1))
    # So a helper never makes a block longer than it is without one.
    assert chosen_s <= micro_batches * (speeds.forward_s + segments * speeds.trainer_s) * (1 + 1e-9)


@given(segments=st.integers(1, 64), micro_batches=st.integers(1, 64), speeds=SPEEDS, more=SECONDS)
def test_another_worker_does_no_harm(segments: int, micro_batches: int, speeds: Speeds, more: float) -> None:
    several = Speeds(speeds.forward_s, speeds.trainer_s, [*speeds.workers_s, more])

    def shortest_s(speeds: Speeds) -> float:
        return block_s(trainers_share(segments, micro_batches, speeds), segments, micro_batches, speeds)

    assert shortest_s(several) <= shortest_s(speeds) * (1 + 1e-9)


@pytest.mark.parametrize(("worker_s", "share"), [(0.005, 0), (0.02, 2), (0.03, 3), (0.09, 6), (10.0, 8)])
def test_a_slower_worker_gets_less(worker_s: float, share: int) -> None:
    assert trainers_share(8, 1_000, Speeds(8 * 0.01, 0.03, [worker_s])) == share


def block(trainers: int, worker_s: float | None) -> BlockReport:
    """A block of 16 micro-batches of 8 segments, of which the trainer has computed so many each."""
    workers = {} if worker_s is None else {"worker": Helper(16 * (8 - trainers), worker_s)}
    return BlockReport(16, 4.0, 16 * 0.08, Helper(16 * trainers, 0.03), workers, held_bytes=0)


def test_blocks_teach_what_is_chosen() -> None:
    shares = Shares()
    assert shares.trainers_share() is None  # half
    shares.measured(block(trainers=4, worker_s=0.03))
    assert shares.trainers_share() == 3
    shares.measured(block(trainers=3, worker_s=10.0))
    for _ in range(RETRY_BLOCKS):
        assert shares.trainers_share() == 8
        shares.measured(block(trainers=8, worker_s=None))
    assert shares.trainers_share() == 7  # to see whether the worker has become faster


def test_the_speed_up_is_over_the_trainer_alone() -> None:
    assert block(trainers=4, worker_s=0.03).speed_up == pytest.approx((16 * 0.08 + 128 * 0.03) / 4.0)
    assert math.isnan(block(trainers=0, worker_s=0.03).speed_up)
    assert "trainer: 64 of 128 segments, 30.0 ms each" in str(block(trainers=4, worker_s=0.03))
