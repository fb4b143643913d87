"""Intervals of time, as pairs of their start and end in seconds."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(apart: Iterable[Interval]) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - begin for begin, end in apart)


def common(one: list[Interval], other: list[Interval]) -> float:
    """Returns the length of the intersection of two unions."""
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def rows_of(intervals: Sequence[Interval]) -> list[int]:
    """Assigns intervals, ordered by start, to as few rows as possible, so that no two of a row overlap."""
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
