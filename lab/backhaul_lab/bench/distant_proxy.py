"""A proxy that makes a worker on this machine distant: it adds latency, and each connection has a bounded window.

`python -m backhaul_lab.bench.distant_proxy TARGET ROUND_TRIP_S WINDOW_BYTES` serves until its stdin is closed.
"""

import queue
import socket
import sys
import threading
from contextlib import suppress
from time import monotonic, sleep

from backhaul_lab.bench.counting_proxy import CountingProxy, shut

_READ_BYTES = 1 << 18
"""Bytes that are passed on at a time: fewer take several times as much of a core, which steps would wait for."""


class DistantProxy(CountingProxy):
    """A TCP proxy that behaves like a long link. A context manager.

    Each direction of each connection has at most `window_bytes` on their way, like TCP with a bounded window: bytes
    arrive after half of the round trip, and make room for others after all of it. So one connection carries
    `window_bytes` per round trip, whatever the rate of the link is.

    Args:
        target: Address of the server, as "host:port".
        round_trip_s: Seconds that a byte and its acknowledgement take.
        window_bytes: Bytes of one direction of one connection that may be on their way.
        host: IP address that the proxy listens on, at a free port.
    """

    def __init__(self, target: str, round_trip_s: float, window_bytes: int, host: str = "127.0.0.1") -> None:
        self._round_trip_s = round_trip_s
        self._window_bytes = window_bytes
        super().__init__(target, host)

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        acknowledged: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

        def deliver() -> None:
            with suppress(OSError):
                while True:
                    at_s, data = under_way.get()
                    sleep(max(0.0, at_s - monotonic()))
                    if not data:
                        break
                    sink.sendall(data)
                    acknowledged.put((monotonic() + self._round_trip_s / 2, len(data)))
            shut(source, sink)
            acknowledged.put((0.0, self._window_bytes))  # the reading thread may wait for room

        delivering = threading.Thread(target=deliver, daemon=True)
        self._threads.append(delivering)
        delivering.start()
        unacknowledged_bytes = 0
        pace = self._pace(is_up)
        with suppress(OSError):
            while data := source.recv(min(_READ_BYTES, self._window_bytes - unacknowledged_bytes)):
                with self._lock:
                    self.passed_bytes += len(data)
                pace(len(data))
                under_way.put((monotonic() + self._round_trip_s / 2, data))
                unacknowledged_bytes += len(data)
                while unacknowledged_bytes >= self._window_bytes:
                    at_s, size_bytes = acknowledged.get()
                    sleep(max(0.0, at_s - monotonic()))
                    unacknowledged_bytes -= size_bytes
        under_way.put((0.0, b""))


def main(target: str, round_trip_s: str, window_bytes: str) -> None:
    """Serves until stdin is closed. Prints the address."""
    with DistantProxy(target, float(round_trip_s), int(window_bytes)) as proxy:
        print(proxy.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
