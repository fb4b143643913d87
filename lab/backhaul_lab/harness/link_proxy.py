"""A proxy that is the link between a trainer and a worker: it counts bytes, and can make the link long or thin.

`python -m backhaul_lab.harness.link_proxy TARGET HOST LATENCY_S BYTES_PER_S WINDOW_BYTES` prints its address and serves
until its stdin is closed. Imports no torch.
"""

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

READ_BYTES = 1 << 16
_DISTANT_READ_BYTES = 1 << 18
"""Bytes that a long link passes on at a time: fewer take several times as much of a core, and slow steps down."""


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


class LinkProxy:
    """A TCP proxy that behaves like a link, and counts the bytes it passes on. A context manager.

    With a latency, each direction of each connection has at most `window_bytes` on their way, like TCP with a bounded
    window: bytes arrive after the latency, and make room for others after twice that. So one connection carries
    `window_bytes` per round trip, whatever the rate of the link is.

    Args:
        target: Address of the server, as "host:port".
        host: IP address that the proxy listens on, at a free port.
        latency_s: Seconds that a byte takes in one direction.
        bytes_per_s: Bandwidth of each direction, which all connections share; 0 for unlimited.
        window_bytes: Bytes of one direction of one connection that may be on their way, if there is a latency.

    Attributes:
        address: Address that the proxy listens on, as "host:port".
        passed_bytes: Number of bytes passed on so far, in both directions.
    """

    def __init__(
        self,
        target: str,
        host: str = "127.0.0.1",
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = 0.0,
        window_bytes: int = 4 << 20,
    ) -> None:
        target_host, _, port = target.rpartition(":")
        self._target = target_host, int(port)
        self._latency_s, self._window_bytes = latency_s, window_bytes
        self._up, self._down = Bandwidth(bytes_per_s), Bandwidth(bytes_per_s)
        self._lock = threading.Lock()  # Guards passed_bytes, which the threads of all directions add to.
        self.passed_bytes = 0
        self._listener = socket.create_server((host, 0))
        self._sockets = [self._listener]
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        pass_on = self._pass_on_later if self._latency_s else self._pass_on
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for src, dst, is_up in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=pass_on, args=(src, dst, is_up), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, src: socket.socket, dst: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            pace = self._pace(is_up)
            while data := src.recv(READ_BYTES):
                with self._lock:
                    self.passed_bytes += len(data)
                pace(len(data))
                dst.sendall(data)
        shut(src, dst)

    def _pass_on_later(self, src: socket.socket, dst: socket.socket, is_up: bool) -> None:
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        acknowledged: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

        def deliver() -> None:
            with suppress(OSError):
                while True:
                    at_s, data = under_way.get()
                    time.sleep(max(0.0, at_s - time.monotonic()))
                    if not data:
                        break
                    dst.sendall(data)
                    acknowledged.put((time.monotonic() + self._latency_s, len(data)))
            shut(src, dst)
            acknowledged.put((0.0, self._window_bytes))  # the reading thread may wait for room

        delivering = threading.Thread(target=deliver, daemon=True)
        self._threads.append(delivering)
        delivering.start()
        unacknowledged_bytes = 0
        pace = self._pace(is_up)
        with suppress(OSError):
            while data := src.recv(min(_DISTANT_READ_BYTES, self._window_bytes - unacknowledged_bytes)):
                with self._lock:
                    self.passed_bytes += len(data)
                pace(len(data))
                under_way.put((time.monotonic() + self._latency_s, data))
                unacknowledged_bytes += len(data)
                while unacknowledged_bytes >= self._window_bytes:
                    at_s, size_bytes = acknowledged.get()
                    time.sleep(max(0.0, at_s - time.monotonic()))
                    unacknowledged_bytes -= size_bytes
        under_way.put((0.0, b""))

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        """Returns a function that is called before each chunk of one connection with its size, and may wait.

        Args:
            is_up: Whether the chunks go to the server; False for those that come from it.
        """
        return (self._up if is_up else self._down).wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        shut(*self._sockets)
        for side in self._sockets:
            side.close()
        for thread in self._threads:
            thread.join(5)


def shut(*sides: socket.socket) -> None:
    """Ends both directions of sockets, so that threads that use them return."""
    for side in sides:
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


def main(target: str, host: str, latency_s: str, bytes_per_s: str, window_bytes: str) -> None:
    """Serves until stdin is closed. Prints the address."""
    with LinkProxy(
        target, host, latency_s=float(latency_s), bytes_per_s=float(bytes_per_s), window_bytes=int(window_bytes)
    ) as proxy:
        print(proxy.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
