"""Assigns segments to workers in arcs of the chain, so that each worker keeps the same parameters. Pure."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

FIRST_ARC = 4
"""The length of an arc in the first pass, when the number of segments in a pass is still unknown."""

SPEED_STEPS = 8
"""Outside of accumulation blocks, speeds are rounded to this many steps below the fastest.

All ranks of a training measure about the same speeds. Rounding them lets ranks divide their segments alike, so that a
worker needs only one copy of their equal weights.
"""

CHANGED = 0.1
"""A share that differs from the present one by less than this part of it leaves the ring as it is."""


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


def worker_of_whole(position: int, count: int, speeds: Mapping[str, float]) -> str:
    """Returns the worker of a whole micro-batch. The fastest one gets the first ones: it alone can add them up.

    Args:
        position: The position of the micro-batch among those of the block that workers get, from 0.
        count: The number of these; at least `position` + 1.
        speeds: The relative speed of each worker, by name.
    """
    names = sorted(speeds, key=lambda name: (-speeds[name], name))
    ends = accumulate(parts_by_speed(count, [speeds[name] for name in names]))
    return next(name for name, end in zip(names, ends, strict=True) if position < end)


@dataclass(frozen=True, slots=True)
class Ring:
    """The division of a chain of segments among workers: a ring of arcs, each proportional to a worker's speed.

    The end of the chain is joined to its beginning. So when one of several equal workers joins or leaves, at most a
    third of the segments move to another worker. On a line it would be half if that worker is the last one. The price
    is that the arc of one worker may be in two pieces, at both ends of the chain.

    Attributes:
        arcs: The name of each worker and its share of the chain, in the order of the ring. The shares add up to 1.
        start: Where the first arc begins, as a part of the chain, from 0 to 1.
    """

    arcs: tuple[tuple[str, float], ...] = ()
    start: float = 0.0

    @property
    def names(self) -> list[str]:
        """The names of the workers, in the order of the ring."""
        return [name for name, _ in self.arcs]

    def owner(self, position: int, segments: int) -> str:
        """Returns the worker of a segment.

        Args:
            position: The position of the segment in the chain, from 0.
            segments: The number of segments of the chain; at least `position` + 1.
        """
        left = ((position + 0.5) / segments - self.start) % 1.0
        for name, share in self.arcs:
            left -= share
            if left < 0:
                return name
        return self.arcs[-1][0]

    def changed(self, speeds: Mapping[str, float]) -> "Ring":
        """Returns the ring for other workers or speeds that moves the smallest part of the chain.

        Equal rings and speeds give equal results, so ranks that see the same changes agree.

        Args:
            speeds: The speed of each worker that there is now, relative to the others.
        """
        total = sum(speeds[name] for name in sorted(speeds))  # the order of additions must not depend on the caller
        remaining = [name for name in self.names if name in speeds]
        orders = [remaining]
        for name in sorted(speeds.keys() - {*remaining}):
            slots = {0, len(orders[0]) // 2} if remaining else {len(orders[0])}
            orders = [[*order[:slot], name, *order[slot:]] for order in orders[:1] for slot in sorted(slots)]
        rings = [
            Ring(tuple((name, speeds[name] / total) for name in order), start)
            for order in orders
            for start in self._starts(order, {name: speeds[name] / total for name in order})
        ]
        # Among equals the ring that begins at the chain's beginning gives each worker one piece.
        return min(rings, key=lambda ring: (round(self.moved(ring), 6), min(ring.start, 1 - ring.start)))

    def moved(self, other: "Ring") -> float:
        """Returns the part of the chain that has another worker in another ring."""
        theirs = dict(other._bounds())
        return 1.0 - sum(_overlap(bounds, theirs[name]) for name, bounds in self._bounds() if name in theirs)

    def _starts(self, order: Sequence[str], shares: Mapping[str, float]) -> list[float]:
        """Returns where a ring of this order may begin so that some worker's arc begins or ends where it did."""
        before, starts, begin = dict(self._bounds()), [0.0], 0.0
        for name in order:
            end = begin + shares[name]
            if name in before:
                starts += [(before[name][0] - begin) % 1.0, (before[name][1] - end) % 1.0]
            begin = end
        return starts

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yields where the arc of each worker begins and ends. Arcs beyond 1 continue at 0."""
        begin = self.start
        for name, share in self.arcs:
            yield name, (begin, begin + share)
            begin += share


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Returns how much of a ring of length 1 two arcs have in common."""
    return sum(max(0.0, min(one[1], other[1] + turn) - max(one[0], other[0] + turn)) for turn in (-2, -1, 0, 1, 2))


class Placement:
    """Counts the segments of each pass. A pass is a forward and its backward; the first backward ends its forward."""

    def __init__(self) -> None:
        self._index = 0
        self._count = 0
        self._in_backward = False
        self._trainers_share: int | None = 0
        self._last_segments = self._next_last_segments = 0
        self._is_in_block = False
        self.ring = Ring()

    def begin_block(self, trainers_share: int | None) -> None:
        """Ends the present pass, and sets what the trainer computes itself in the following ones.

        Args:
            trainers_share: The number of first segments of each pass that no worker gets; None for half of them.
        """
        self.backward()
        self._trainers_share, self._is_in_block = trainers_share, True
        self._next_last_segments = 0

    def end_block(self) -> None:
        """Ends the present pass. In the following ones the trainer computes nothing itself."""
        self.begin_block(0)
        self._is_in_block = False

    def take_all(self) -> None:
        """Lets no worker have a segment until the block ends."""
        self._trainers_share = sys.maxsize

    def take_last(self, segments: int) -> None:
        """Sets how many of the last segments of the next pass, and of no other, no worker gets."""
        self._next_last_segments = segments

    @property
    def position(self) -> int:
        """The position of the next segment in its pass, from 0."""
        return 0 if self._in_backward else self._index

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer computes the next segment of the pass itself."""
        if self._in_backward:
            return self._is_trainers(0, self._index, self._next_last_segments)
        return self._is_trainers(self._index, self._count, self._last_segments)

    def _is_trainers(self, index: int, count: int, last: int) -> bool:
        return index < self._share(count) or count - last <= index < count

    def _share(self, count: int) -> int:
        """Returns the trainer's share of a pass with so many segments."""
        return count // 2 if self._trainers_share is None else min(self._trainers_share, count)

    def choose_worker(self, speeds: Mapping[str, float]) -> str | None:
        """Returns the name of the worker for the next segment; None if the trainer computes it itself.

        Args:
            speeds: The relative speed of each worker that is up, by name; at least one. Speeds count at the beginning
                of a pass, other workers at once.
        """
        if self._in_backward:
            self._in_backward = False
            self._count, self._index = self._index, 0
            self._last_segments, self._next_last_segments = self._next_last_segments, 0
        index, self._index = self._index, self._index + 1
        if self._is_trainers(index, self._count, self._last_segments):
            return None
        self._adjust(speeds, may_balance=index == 0 or self._count == 0)
        if self._count == 0:
            return sorted(speeds)[index // FIRST_ARC % len(speeds)]
        share = self._share(self._count)
        position, segments = min(index, self._count - 1) - share, max(1, self._count - share)
        if not self._is_in_block:
            return self.ring.owner(position, segments)
        # In a block workers compute different micro-batches at a time: a worker with two pieces would wait for others.
        names = self.ring.names
        ends = accumulate(parts_by_speed(segments, [speeds[name] for name in names]))
        return next(name for name, end in zip(names, ends, strict=True) if position < end)

    def backward(self) -> None:
        """Notes that a backward has reached a segment."""
        self._in_backward = True

    def _adjust(self, speeds: Mapping[str, float], *, may_balance: bool) -> None:
        """Changes the ring if workers have come or gone, or if speeds differ much from what it was made for."""
        fastest, total = max(speeds.values()), sum(speeds.values())
        if not self._is_in_block:
            speeds = {name: max(1, round(SPEED_STEPS * speed / fastest)) for name, speed in speeds.items()}
            total = sum(speeds.values())
        shares = dict(self.ring.arcs)
        is_same = shares.keys() == speeds.keys()
        if is_same and may_balance:
            is_same = all(abs(speeds[name] / total - share) <= CHANGED * share for name, share in shares.items())
        if not is_same:
            self.ring = self.ring.changed(speeds)
