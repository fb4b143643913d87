"""A proxy between a trainer and a worker that limits the bandwidth."""

import threading
import time
from collections.abc import Callable

from backhaul_lab.bench.counting_proxy import CountingProxy


class Bandwidth:
    """One direction of a link, which all connections share. Thread-safe.

    Args:
        bytes_per_s: Bandwidth in bytes per second; 0 for unlimited.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def wait(self, size_bytes: int) -> None:
        """Waits until the link has carried some bytes, after those for which others wait already."""
        if not self._bytes_per_s:
            return
        with self._lock:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + size_bytes / self._bytes_per_s
            until_s = self._free_at_s
        time.sleep(max(0.0, until_s - time.monotonic()))


class ThrottledProxy(CountingProxy):
    """A TCP proxy that limits the bandwidth of each direction. A context manager.

    Args:
        target: Address of the server, as "host:port".
        bytes_per_s: Bandwidth of each direction, in bytes per second, which all connections share.
    """

    def __init__(self, target: str, bytes_per_s: float) -> None:
        self._up, self._down = Bandwidth(bytes_per_s), Bandwidth(bytes_per_s)
        super().__init__(target)

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        return (self._up if is_up else self._down).wait
