"""Who computes which segments of a block: a pure function of measured times."""

import math
import random
import statistics
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._accumulate.plan import RETRY_BLOCKS, Shares, Speeds, block_s, trainers_shares
from backhaul._observe.report import BlockReport, Helper

SECONDS = st.floats(1e-4, 10.0)
SPEEDS = st.builds(Speeds, SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8))


@given(segments=st.integers(1, 32), micro_batches=st.integers(1, 32), speeds=SPEEDS)
def test_no_constant_share_gives_a_shorter_block(segments: int, micro_batches: int, speeds: Speeds) -> None:
    shares = trainers_shares(segments, micro_batches, speeds)
    assert len(shares) == micro_batches
    assert sorted(shares) == shares
    assert 0 <= shares[0] <= shares[-1] <= segments
    assert sum(shares) - micro_batches * shares[0] <= segments
    chosen_s = block_s(shares, segments, speeds)
    assert all(chosen_s <= block_s([other] * micro_batches, segments, speeds) for other in range(segments + 1))
    # So a helper never makes a block longer than it is without one.
    assert chosen_s <= micro_batches * (speeds.forward_s + segments * speeds.trainer_s) * (1 + 1e-9)


@given(segments=st.integers(1, 32), micro_batches=st.integers(1, 32), speeds=SPEEDS, most=st.integers(0, 40))
def test_a_bounded_share_does_not_grow(segments: int, micro_batches: int, speeds: Speeds, most: int) -> None:
    shares = trainers_shares(segments, micro_batches, speeds, most)
    assert shares == [shares[0]] * micro_batches
    assert shares[0] <= most


@given(segments=st.integers(1, 32), micro_batches=st.integers(1, 32), speeds=SPEEDS, more=SECONDS)
def test_another_worker_does_no_harm(segments: int, micro_batches: int, speeds: Speeds, more: float) -> None:
    several = Speeds(speeds.forward_s, speeds.trainer_s, [*speeds.workers_s, more])

    def shortest_s(speeds: Speeds) -> float:
        shares = range(segments + 1)
        return min(block_s([share] * micro_batches, segments, speeds) for share in shares)

    assert shortest_s(several) <= shortest_s(speeds) * (1 + 1e-9)


def test_growing_shares_come_near_the_best_of_all() -> None:
    draw, ratios = random.Random(0), []
    for _ in range(500):
        segments, micro_batches = draw.randint(1, 3), draw.randint(1, 6)
        speeds = Speeds(10 ** draw.uniform(-1, 1), 10 ** draw.uniform(-1, 1), [10 ** draw.uniform(-1, 1)])
        best_s = min(
            block_s(shares, segments, speeds)
            for shares in combinations_with_replacement(range(segments + 1), micro_batches)
            if sum(shares) - micro_batches * shares[0] <= segments  # more gradients than that would be held back
        )
        ratios.append(block_s(trainers_shares(segments, micro_batches, speeds), segments, speeds) / best_s)
    assert statistics.mean(ratios) < 1.01
    assert max(ratios) < 1.5


@pytest.mark.parametrize(("worker_s", "share"), [(0.005, 0), (0.02, 2), (0.03, 3), (0.09, 6), (10.0, 8)])
def test_a_slower_worker_gets_less(worker_s: float, share: int) -> None:
    assert trainers_shares(8, 1_000, Speeds(8 * 0.01, 0.03, [worker_s]), most=8) == [share] * 1_000


def block(trainers: int, worker_s: float | None, held_bytes: int = 0, segment_bytes: int = 0) -> BlockReport:
    """A block of 16 micro-batches of 8 segments, of which the trainer has computed so many each."""
    workers = {} if worker_s is None else {"worker": Helper(16 * (8 - trainers), worker_s)}
    return BlockReport(16, 4.0, 16 * 0.08, Helper(16 * trainers, 0.03), workers, held_bytes, 8, segment_bytes)


def test_blocks_teach_what_is_chosen() -> None:
    shares = Shares()
    assert shares.trainers_shares() is None  # half
    shares.measured(block(trainers=4, worker_s=0.03))
    assert shares.trainers_shares() == [3] * 16
    shares.measured(block(trainers=3, worker_s=10.0))
    for _ in range(RETRY_BLOCKS):
        assert shares.trainers_shares() == [8] * 16
        shares.measured(block(trainers=8, worker_s=None))
    assert shares.trainers_shares() == (7,)  # to see whether the worker has become faster
    shares.measured(block(trainers=7, worker_s=0.03))
    assert shares.trainers_shares() == [3] * 16


def test_a_disturbed_block_counts_by_half_and_the_first_one_not_at_all() -> None:
    shares = Shares()
    for worker_s in (7.0, 0.03, 0.09):
        shares.measured(block(trainers=3, worker_s=worker_s))
    assert shares.speeds == {"worker": pytest.approx(1 / 0.06)}


def test_the_split_stays_until_another_is_clearly_shorter() -> None:
    shares = Shares()
    shares.measured(block(trainers=4, worker_s=0.03))
    assert shares.trainers_shares() == [3] * 16
    slower = next(0.03 + step * 0.0001 for step in range(1, 100) if _best(0.03 + step * 0.0001) != [3] * 16)
    shares.measured(block(trainers=3, worker_s=slower))
    assert shares.trainers_shares() == [3] * 16
    shares.measured(block(trainers=3, worker_s=0.2))
    assert shares.trainers_shares() == _best(1 / shares.speeds["worker"]) != [3] * 16


def _best(worker_s: float) -> list[int]:
    """The split of such a block that is the shortest without regard to the one before."""
    return trainers_shares(8, 16, Speeds(0.08, 0.03, [worker_s]))


def test_the_bytes_that_may_be_held_back_bound_the_share() -> None:
    shares = Shares(held_bytes=1_000)
    assert shares.trainers_shares() == (0,)
    shares.measured(block(trainers=0, worker_s=0.03, held_bytes=300, segment_bytes=350))
    assert shares.trainers_shares() == [2] * 16
    shares.measured(block(trainers=2, worker_s=0.03, held_bytes=900, segment_bytes=250))  # the first two are larger
    assert shares.trainers_shares() == [2] * 16
    shares.measured(block(trainers=2, worker_s=0.03, held_bytes=1_300, segment_bytes=250))
    assert shares.trainers_shares() == [1] * 16


def test_the_speed_up_is_over_the_trainer_alone() -> None:
    assert block(trainers=4, worker_s=0.03).speed_up == pytest.approx((16 * 0.08 + 128 * 0.03) / 4.0)
    assert math.isnan(block(trainers=0, worker_s=0.03).speed_up)
    assert "trainer: 64 of 128 segments, 30.0 ms each" in str(block(trainers=4, worker_s=0.03))
