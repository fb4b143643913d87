"""Stands between a trainer and a worker and lets only so many bytes a second pass."""

import socket
import time
from contextlib import suppress

from backhaul.bench.counting_proxy import CountingProxy

_READ_BYTES = 1 << 16


class NarrowProxy(CountingProxy):
    """Passes bytes on to a server, each way no faster than told. A context manager.

    Args:
        target: Of the server, as "host:port".
        bytes_per_s: Each way.
    """

    def __init__(self, target: str, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        super().__init__(target)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        free_at_s = 0.0
        with suppress(OSError):
            while data := source.recv(_READ_BYTES):
                free_at_s = max(free_at_s, time.monotonic()) + len(data) / self._bytes_per_s
                time.sleep(max(0.0, free_at_s - time.monotonic()))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
