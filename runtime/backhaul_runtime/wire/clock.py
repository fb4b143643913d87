"""How far another process's clock is from ours, estimated from the answers of a connection. Does not import torch.

NOTE [Clocks]
1. An answer that carries a time of the other clock was made between our question and its arrival. So the clocks differ
   by that time minus the middle of the two, and the error is at most half the round trip, however unequal the two ways
   are (D. Mills, RFC 5905, section 10).
2. Clocks drift apart by up to `DRIFT`, so the bound of an older answer grows with its age. Of the last answers, the one
   with the smallest bound counts.
3. A clock that was set makes two answers contradict each other. The newer one is right, and all older ones are dropped.
"""

import math
from collections import deque
from typing import NamedTuple

DRIFT = 1e-4
"""Seconds by which two clocks may drift apart in a second: twice what a cheap quartz is specified for."""
MAX_COMPARISONS = 32


class ClockEstimate(NamedTuple):
    """What is known about another clock.

    Attributes:
        offset_s: The other clock minus ours, in seconds.
        error_s: The largest possible error of `offset_s`; infinite before the first answer.
        round_trip_s: The shortest of the last round trips in seconds; infinite before the first answer.
    """

    offset_s: float
    error_s: float
    round_trip_s: float


UNKNOWN = ClockEstimate(0.0, math.inf, math.inf)


class _Comparison(NamedTuple):
    answered_at_s: float
    round_trip_s: float
    offset_s: float

    def error_s(self, now_s: float) -> float:
        return self.round_trip_s / 2 + DRIFT * max(0.0, now_s - self.answered_at_s)


class ClockOffset:
    """Estimates the offset of another clock by NOTE [Clocks]. One thread compares, any thread may read."""

    def __init__(self) -> None:
        self._comparisons: deque[_Comparison] = deque(maxlen=MAX_COMPARISONS)

    def compare(self, asked_at_s: float, theirs_s: float, answered_at_s: float) -> None:
        """Adds a time of the other clock that was read between two times of ours. All are in seconds."""
        if answered_at_s < asked_at_s:  # our clock was set back in between, so this answer shows nothing
            self._comparisons.clear()
            return
        new = _Comparison(answered_at_s, answered_at_s - asked_at_s, theirs_s - (asked_at_s + answered_at_s) / 2)
        before = self.estimate(answered_at_s)
        if abs(new.offset_s - before.offset_s) > new.error_s(answered_at_s) + before.error_s:  # Rule 3
            self._comparisons.clear()
        self._comparisons.append(new)

    def estimate(self, now_s: float) -> ClockEstimate:
        """Returns what is known at a time of our clock, in seconds."""
        comparisons = tuple(self._comparisons)  # a copy, because another thread may compare meanwhile
        if not comparisons:
            return UNKNOWN
        best = min(comparisons, key=lambda comparison: comparison.error_s(now_s))
        shortest_s = min(comparison.round_trip_s for comparison in comparisons)
        return ClockEstimate(best.offset_s, best.error_s(now_s), shortest_s)
