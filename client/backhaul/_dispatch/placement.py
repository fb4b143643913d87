"""Assigns segments to workers in contiguous runs, so that each worker keeps the same parameters. Pure."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

FIRST_RUN = 4
"""The length of a run in the first pass, when the number of segments in a pass is still unknown."""


def parts_by_speed(segments: int, speeds: Sequence[float]) -> list[int]:
    """Divides segments among workers so that the slowest is ready as soon as possible. Returns how many each gets."""
    parts = [0] * len(speeds)
    next_ends = [(1 / speed, number) for number, speed in enumerate(speeds)]
    heapify(next_ends)
    for _ in range(segments):
        _, number = next_ends[0]
        parts[number] += 1
        heapreplace(next_ends, ((parts[number] + 1) / speeds[number], number))
    return parts


class Placement:
    """Counts the segments of each pass. A pass is a forward and its backward; the first backward ends its forward."""

    def __init__(self) -> None:
        self._index = 0
        self._count = 0
        self._in_backward = False
        self._passes = 0  # that have begun in the block
        self._trainers_shares: Sequence[int] | None = (0,)
        self.speeds: Sequence[float] = ()
        """The relative speed of each worker; empty if all count as equal."""

    def begin_block(self, trainers_shares: Sequence[int] | None) -> None:
        """Ends the present pass, and sets what the trainer computes itself in the following ones.

        Args:
            trainers_shares: The number of first segments of each pass that no worker gets; the last one counts for all
                further passes. None for half of them.
        """
        self.backward()
        self._trainers_shares, self._passes = trainers_shares, 0

    @property
    def position(self) -> int:
        """The position of the next segment in its pass, from 0."""
        return 0 if self._in_backward else self._index

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer computes the next segment of the pass itself."""
        count = self._index if self._in_backward else self._count
        return self.position < self._share(count, self._passes if self._in_backward else self._passes - 1)

    def _share(self, count: int, number: int) -> int:
        """Returns the trainer's share of a pass with so many segments, by the number of the pass in its block."""
        shares = self._trainers_shares
        return count // 2 if shares is None else min(shares[min(number, len(shares) - 1)], count)

    def choose_worker(self, workers: int) -> int | None:
        """Returns the index of the worker for the next segment; None if the trainer computes it itself.

        Args:
            workers: The number of workers, at least one.
        """
        if self._in_backward:
            self._in_backward = False
            self._count, self._index = self._index, 0
            self._passes += 1
        index, self._index = self._index, self._index + 1
        if self._count == 0:
            return index // FIRST_RUN % workers
        if index < self._share(self._count, self._passes - 1):
            return None
        # Workers keep the segments of the first pass, so that the sum of a parameter's gradients stays in one place.
        share = min(index, self._share(self._count, 0))
        if len(self.speeds) == workers:
            ends = accumulate(parts_by_speed(self._count - share, self.speeds))
            return next((number for number, end in enumerate(ends) if index - share < end), workers - 1)
        return min((index - share) * workers // max(1, self._count - share), workers - 1)

    def backward(self) -> None:
        """Notes that a backward has reached a segment."""
        self._in_backward = True
