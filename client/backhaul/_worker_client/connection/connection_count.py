"""Chooses the number of connections to a worker by what it brings.

The count is doubled as long as that sends large tensors faster by `GAIN`, and stays at the last count that did. Uploads
are compared by classes of size, because a small upload reaches a lower rate than a large one on the same link.
"""

from collections import defaultdict, deque
from statistics import median

from backhaul_runtime.wire.protocol import MAX_CONNECTIONS

GAIN = 1.2
"""Factor by which twice the connections must raise the rate."""
SAMPLES = 3
"""Uploads of one class of size that are compared."""
COMPARED_BYTES = 4 << 20
"""Smaller uploads last only a few round trips, so they say little about the rate."""

_Rates = dict[int, deque[float]]
"""The last rates in bytes per second, by class of size: the number of bits of the size in bytes."""


class ConnectionCount:
    """The number of connections to one worker. Thread-safe: a lost sample only delays the choice.

    Args:
        given: The number that the user has set; 0 to choose it by measurements.

    Attributes:
        count: The number of connections to use now, the main one included.
        is_settled: Whether the count is final.
    """

    def __init__(self, given: int = 0) -> None:
        self.count = given or 1
        self.is_settled = given > 0
        self._before: _Rates = _no_rates()  # with half the connections
        self._now: _Rates = _no_rates()

    def settle(self) -> None:
        """Ends the measurements, with one connection unless the user has set another number."""
        if not self.is_settled:
            self.count, self.is_settled = 1, True

    def sent(self, connections: int, size_bytes: int, took_s: float) -> None:
        """Notes an upload.

        Args:
            connections: The number of connections that it used.
            size_bytes: The bytes of its tensors.
            took_s: Seconds that it took.
        """
        if self.is_settled or connections != self.count or size_bytes < COMPARED_BYTES or took_s <= 0:
            return
        size_class = size_bytes.bit_length()
        rates = self._now[size_class]
        rates.append(size_bytes / took_s)
        if len(rates) < SAMPLES:
            return
        if self.count == 1:
            self._try_twice()
        elif len(self._before[size_class]) >= SAMPLES:
            if median(rates) < GAIN * median(self._before[size_class]):
                self.count //= 2
                self.is_settled = True
            else:
                self._try_twice()

    def _try_twice(self) -> None:
        if 2 * self.count > MAX_CONNECTIONS:
            self.is_settled = True
            return
        self._before, self._now = self._now, _no_rates()
        self.count *= 2


def _no_rates() -> _Rates:
    return defaultdict(lambda: deque(maxlen=SAMPLES))
