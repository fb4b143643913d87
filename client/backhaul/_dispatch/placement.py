"""Which worker gets which segment: each a contiguous run, so that parameters stay where they are. Pure."""

FIRST_RUN = 4
"""Length of the runs in the first pass: until the first backward the number of segments in a pass is unknown."""


class Placement:
    """Counts segments by pass. A pass ends with the first backward after it."""

    def __init__(self) -> None:
        self._index = 0
        self._count = 0
        self._in_backward = False

    @property
    def position(self) -> int:
        """Of the next segment in its pass, from 0."""
        return 0 if self._in_backward else self._index

    def choose_worker(self, workers: int) -> int:
        """The worker of the next segment, from 0.

        Args:
            workers: How many there are, at least one.
        """
        if self._in_backward:
            self._in_backward = False
            self._count, self._index = self._index, 0
        index, self._index = self._index, self._index + 1
        if self._count == 0:
            return index // FIRST_RUN % workers
        return min(index * workers // self._count, workers - 1)

    def backward(self) -> None:
        """A backward has reached a segment."""
        self._in_backward = True
