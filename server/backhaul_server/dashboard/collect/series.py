"""Numbers over time in little room."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

LARGEST = 2**53 - 1
"""Of whole numbers: beyond it neither a page's numbers nor these columns tell one from the next."""
_SPARE = 256
"""Rows that go at once when they have become too many, so that few of the others are moved."""


class Series:
    """Rows of numbers, oldest first, each with its time. If there are too many, the oldest are dropped.

    Args:
        kept: Rows that are kept for certain.
        columns: Numbers in a row.

    Attributes:
        at_s: When each row was, in seconds since 1970, never falling.
        columns: The numbers of the rows by column, each column as long as `at_s`.
    """

    def __init__(self, kept: int, columns: int) -> None:
        self.at_s = array("d")
        self.columns = tuple(array("d") for _ in range(columns))
        self._most = kept + _SPARE

    def append(self, at_s: float, row: Sequence[float]) -> None:
        """Adds a row. One from before the last counts as of its time: a clock was set back."""
        self.at_s.append(max(at_s, self.at_s[-1]) if self.at_s else at_s)
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        if len(self.at_s) > self._most:
            for column in (self.at_s, *self.columns):
                del column[:_SPARE]

    def add(self, at_s: float, row: Sequence[float]) -> None:
        """Adds numbers to the last row if it is of the same second, or later; else a row."""
        if self.at_s and int(self.at_s[-1]) >= int(at_s):
            for column, value in zip(self.columns, row, strict=True):
                column[-1] += value
        else:
            self.append(at_s, row)

    def since(self, at_s: float) -> int:
        """Index of the first row from then on."""
        return bisect_left(self.at_s, at_s)

    def sums(self, at_s: float) -> list[float]:
        """Of each column, over the rows from then on."""
        start = self.since(at_s)
        return [sum(column[start:]) for column in self.columns]
