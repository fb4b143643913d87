"""Who computes which segments of a block: a pure function of measured times."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._accumulate.plan import RETRY_BLOCKS, Shares, Speeds, expected_s, last_segments, planned, trainers_share
from backhaul._observe.report import BlockReport, Helper

SECONDS = st.floats(1e-4, 10.0)
SPEEDS = st.builds(Speeds, SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8))


@given(
    segments=st.integers(1, 32),
    micro_batches=st.integers(1, 32),
    speeds=SPEEDS,
    most_pending=st.none() | st.integers(0, 40),
)
def test_no_other_share_gives_a_shorter_block(
    segments: int, micro_batches: int, speeds: Speeds, most_pending: int | None
) -> None:
    share = trainers_share(segments, micro_batches, speeds, most_pending)
    allowed = range(min(segments, segments if most_pending is None else most_pending) + 1)
    assert share in allowed
    chosen_s = expected_s(share, segments, micro_batches, speeds, may_take_last=most_pending is None)
    assert all(
        chosen_s <= expected_s(other, segments, micro_batches, speeds, may_take_last=most_pending is None)
        for other in allowed
    )
    # So a helper never makes a block longer than it is without one.
    if most_pending is None:
        assert chosen_s <= micro_batches * (speeds.forward_s + segments * speeds.trainer_s) * (1 + 1e-9)


@given(segments=st.integers(1, 32), micro_batches=st.integers(1, 32), speeds=SPEEDS, more=SECONDS)
def test_another_worker_does_no_harm(segments: int, micro_batches: int, speeds: Speeds, more: float) -> None:
    several = Speeds(speeds.forward_s, speeds.trainer_s, [*speeds.workers_s, more])

    def shortest_s(speeds: Speeds) -> float:
        blocks = [planned(one, segments, micro_batches, speeds, may_take_last=False) for one in range(segments + 1)]
        return min(block.took_s for block in blocks)

    assert shortest_s(several) <= shortest_s(speeds) * (1 + 1e-9)


@given(
    parts=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    speeds=st.builds(Speeds, SECONDS, SECONDS, st.lists(SECONDS, min_size=4, max_size=4)),
    remote_s=st.floats(-10.0, 10.0),
    own_s=SECONDS,
)
def test_the_trainer_takes_no_last_segment_that_workers_would_finish_in_time(
    parts: list[int], speeds: Speeds, remote_s: float, own_s: float
) -> None:
    speeds = replace(speeds, workers_s=speeds.workers_s[: len(parts)])
    last = last_segments(parts, speeds, remote_s, own_s)
    assert 0 <= last <= sum(parts)
    workers_s = max(part * worker_s for part, worker_s in zip(parts, speeds.workers_s, strict=True))
    if max(remote_s, 0.0) + workers_s <= own_s:
        assert last == 0


def test_last_segments_make_up_for_a_slow_worker() -> None:
    for factor in (1.0, 1.2, 1.5):
        speeds = Speeds(0.3, 0.08, [0.08 * factor])
        block, without = (planned(2, 8, 8, speeds, may_take_last=take) for take in (True, False))
        assert 0 < block.last <= 6
        assert block.took_s < without.took_s


@pytest.mark.parametrize(("worker_s", "share"), [(0.005, 0), (0.021, 2), (0.03, 3), (0.09, 6), (10.0, 8)])
def test_a_slower_worker_gets_less(worker_s: float, share: int) -> None:
    assert trainers_share(8, 1_000, Speeds(8 * 0.01, 0.03, [worker_s])) == share


def block(
    trainers: int, worker_s: float | None, pending_gradient_bytes: int = 0, segment_bytes: int = 0
) -> BlockReport:
    """A block of 16 micro-batches of 8 segments, of which the trainer has computed so many each."""
    workers = {} if worker_s is None else {"worker": Helper(16 * (8 - trainers), worker_s)}
    return BlockReport(
        16, 4.0, 16 * 0.08, Helper(16 * trainers, 0.03), workers, pending_gradient_bytes, 8, segment_bytes
    )


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
    shares.measured(block(trainers=7, worker_s=0.03))
    assert shares.trainers_share() == 3


def test_a_disturbed_block_counts_by_half_and_the_first_one_not_at_all() -> None:
    shares = Shares()
    for worker_s in (7.0, 0.03, 0.09):
        shares.measured(block(trainers=3, worker_s=worker_s))
    assert shares.speeds == {"worker": pytest.approx(1 / 0.06)}


def test_the_split_stays_until_another_is_clearly_shorter() -> None:
    shares = Shares()
    shares.measured(block(trainers=4, worker_s=0.03))
    assert shares.trainers_share() == 3
    slower = next(0.03 + step * 0.001 for step in range(1, 100) if _best(0.03 + step * 0.001) != 3)
    shares.measured(block(trainers=3, worker_s=slower))
    assert shares.trainers_share() == 3
    shares.measured(block(trainers=3, worker_s=0.2))
    assert shares.trainers_share() == _best(1 / shares.speeds["worker"]) != 3


def _best(worker_s: float) -> int:
    """The split of such a block that is the shortest without regard to the one before."""
    return trainers_share(8, 16, Speeds(0.08, 0.03, [worker_s]))


def test_the_bytes_that_may_be_held_back_bound_the_share() -> None:
    shares = Shares(pending_gradient_bytes=1_000)
    assert shares.trainers_share() == 0
    shares.measured(block(trainers=0, worker_s=0.03, pending_gradient_bytes=300, segment_bytes=350))
    assert shares.trainers_share() == 2
    shares.measured(
        block(trainers=2, worker_s=0.03, pending_gradient_bytes=900, segment_bytes=250)
    )  # the first two are larger
    assert shares.trainers_share() == 2
    shares.measured(block(trainers=2, worker_s=0.03, pending_gradient_bytes=1_300, segment_bytes=250))
    assert shares.trainers_share() == 1


def test_the_speed_up_is_over_the_trainer_alone() -> None:
    assert block(trainers=4, worker_s=0.03).speed_up == pytest.approx((16 * 0.08 + 128 * 0.03) / 4.0)
    assert math.isnan(block(trainers=0, worker_s=0.03).speed_up)
    assert "trainer: 64 of 128 segments, 30.0 ms each" in str(block(trainers=4, worker_s=0.03))
