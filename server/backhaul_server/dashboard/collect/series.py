"""Time series in little memory."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

LARGEST = 2**53 - 1
"""The largest integer that a column can hold exactly; JavaScript numbers have the same limit."""
_SPARE = 256
"""The number of rows that are dropped at once, so that the remaining rows are rarely moved."""


class Series:
    """Rows of numbers with a time each, oldest first. The oldest rows are dropped when there are too many.

    Args:
        least_rows: The number of the newest rows that are never dropped.
        columns: The number of columns.

    Attributes:
        at_s: The time of each row, in seconds since 1970, in ascending order.
        columns: The numbers of the rows by column, each column as long as `at_s`.
    """

    def __init__(self, least_rows: int, columns: int) -> None:
        self.at_s = array("d")
        self.columns = tuple(array("d") for _ in range(columns))
        self._most = least_rows + _SPARE

    def append(self, at_s: float, row: Sequence[float]) -> None:
        """Appends a row. A row older than the last one gets the time of the last one, as after a clock was set back."""
        self.at_s.append(max(at_s, self.at_s[-1]) if self.at_s else at_s)
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        if len(self.at_s) > self._most:
            for column in (self.at_s, *self.columns):
                del column[:_SPARE]

    def add(self, at_s: float, row: Sequence[float]) -> None:
        """Adds numbers to the last row if that has the same second or a later one; else appends a row."""
        if self.at_s and int(self.at_s[-1]) >= int(at_s):
            for column, value in zip(self.columns, row, strict=True):
                column[-1] += value
        else:
            self.append(at_s, row)

    def since(self, at_s: float) -> int:
        """Returns the index of the first row at or after a time."""
        return bisect_left(self.at_s, at_s)

    def after(self, at_s: float) -> int:
        """Returns the index behind the last row at or before a time."""
        return bisect_right(self.at_s, at_s)

    def sums(self, at_s: float) -> list[float]:
        """Returns the sum of each column over the rows at or after a time."""
        start = self.since(at_s)
        return [sum(column[start:]) for column in self.columns]
