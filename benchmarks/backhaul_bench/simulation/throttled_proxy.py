"""A proxy between a trainer and a worker that limits the bandwidth."""

import time
from collections.abc import Callable

from backhaul_bench.counting_proxy import CountingProxy


class ThrottledProxy(CountingProxy):
    """A TCP proxy that limits the bandwidth of each direction. A context manager.

    Args:
        target: Address of the server, as "host:port".
        bytes_per_s: Bandwidth of each direction, in bytes per second.
    """

    def __init__(self, target: str, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        super().__init__(target)

    def _pace(self) -> Callable[[int], None]:
        free_at_s = 0.0

        def wait(size_bytes: int) -> None:
            nonlocal free_at_s
            free_at_s = max(free_at_s, time.monotonic()) + size_bytes / self._bytes_per_s
            time.sleep(max(0.0, free_at_s - time.monotonic()))

        return wait
