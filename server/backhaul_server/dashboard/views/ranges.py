"""The part of the past that charts show."""

from dataclasses import dataclass
from math import ceil, inf


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of time, in seconds since 1970.

    Attributes:
        since_s: The beginning of the range, which belongs to it.
        until_s: The end of the range, which belongs to it.
    """

    since_s: float
    until_s: float

    def interval_s(self, points: int) -> int:
        """Returns the whole seconds of the intervals that divide the range into at most `points` parts."""
        return max(1, ceil((self.until_s - self.since_s) / points))


EVER = TimeRange(-inf, inf)
"""The range of all times."""
