"""Pieces of time, as pairs of begin and end."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers, in order and apart from each other."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(apart: Iterable[Interval]) -> float:
    """Of intervals that are apart."""
    return sum(end - begin for begin, end in apart)


def common(one: list[Interval], other: list[Interval]) -> float:
    """How much time two unions share."""
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def rows_of(intervals: Sequence[Interval]) -> list[int]:
    """Rows, as few as do, in which no two overlap; they come in order of their begins."""
    free: list[int] = []
    ends: list[tuple[float, int]] = []
    rows = []
    for begin, end in intervals:
        while ends and ends[0][0] <= begin:
            heappush(free, heappop(ends)[1])
        row = heappop(free) if free else len(ends)
        heappush(ends, (end, row))
        rows.append(row)
    return rows
