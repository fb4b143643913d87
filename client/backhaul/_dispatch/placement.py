"""Assigns segments to workers in contiguous runs, so that each worker keeps the same parameters. Pure."""

FIRST_RUN = 4
"""The length of a run in the first pass, when the number of segments in a pass is still unknown."""


class Placement:
    """Counts the segments of each pass. A pass is a forward and its backward; the first backward ends its forward."""

    def __init__(self) -> None:
        self._index = 0
        self._count = 0
        self._in_backward = False

    @property
    def position(self) -> int:
        """The position of the next segment in its pass, from 0."""
        return 0 if self._in_backward else self._index

    def choose_worker(self, workers: int) -> int:
        """Returns the index of the worker for the next segment.

        Args:
            workers: The number of workers, at least one.
        """
        if self._in_backward:
            self._in_backward = False
            self._count, self._index = self._index, 0
        index, self._index = self._index, self._index + 1
        if self._count == 0:
            return index // FIRST_RUN % workers
        return min(index * workers // self._count, workers - 1)

    def backward(self) -> None:
        """Notes that a backward has reached a segment."""
        self._in_backward = True
