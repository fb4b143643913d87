"""Stands between a trainer and a worker and lets only so many bytes a second pass."""

import time
from collections.abc import Callable

from backhaul_bench.counting_proxy import CountingProxy


class ThrottledProxy(CountingProxy):
    """Passes bytes on to a server, each way no faster than told. A context manager.

    Args:
        target: Of the server, as "host:port".
        bytes_per_s: Each way.
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
