"""How many of a block's first micro-batches workers compute whole."""

import pytest

from backhaul._accumulate.whole_shares import LEARNING, RETRY_BLOCKS, WholeShares, whole_share


@pytest.mark.parametrize(
    ("micro_batches", "remote_s", "here_s", "share"),
    [
        (8, 1.0, 1.0, 4),
        (8, 0.5, 1.0, 5),
        (8, 3.0, 1.0, 2),
        (16, 1 / 0.3, 1.0, 3),
        (3, 1.0, 1.0, 1),
        (1, 1.0, 1.0, 0),
        (1, 0.9, 1.0, 1),
        (8, 100.0, 1.0, 0),
        (8, 0.01, 1.0, 8),
    ],
)
def test_all_finish_together(micro_batches: int, remote_s: float, here_s: float, share: int) -> None:
    assert whole_share(micro_batches, remote_s, here_s) == share


def test_the_first_blocks_learn_then_workers_count_as_equal_until_they_are_measured() -> None:
    shares = WholeShares()
    assert shares.first() == LEARNING
    shares.learning()
    shares.measured(0, 8, 0.0, [])
    assert shares.first() == LEARNING
    shares.measured(LEARNING, 5, 1.0, [1.0] * 5)
    assert shares.first() == 4
    shares.measured(4, 4, 1 / 3, [1.0] * 4)
    assert shares.first() == whole_share(8, (1 + 1 / 3) / 2, 1.0)


def test_a_worker_that_was_too_slow_is_measured_again() -> None:
    shares = WholeShares()
    shares.measured(1, 7, 100.0, [1.0] * 7)
    tried = []
    for _ in range(RETRY_BLOCKS):
        tried.append(shares.first())
        if not tried[-1]:
            shares.measured(0, 8, 0.0, [])
    assert tried == [0] * (RETRY_BLOCKS - 1) + [1]
    for _ in range(8):
        shares.measured(1, 7, 0.5, [1.0] * 7)
    assert shares.first() > 3
