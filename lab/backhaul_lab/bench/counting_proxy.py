"""A proxy between a trainer and a worker that counts the bytes of both directions. It slows timed runs down."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

READ_BYTES = 1 << 16


class CountingProxy:
    """A TCP proxy that counts the bytes it passes on. A context manager.

    Args:
        target: Address of the server, as "host:port".
        host: IP address that the proxy listens on, at a free port.

    Attributes:
        address: Address that the proxy listens on, as "host:port".
        passed_bytes: Number of bytes passed on so far, in both directions.
    """

    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        target_host, _, port = target.rpartition(":")
        self._target = target_host, int(port)
        self._lock = threading.Lock()  # Guards passed_bytes, which the threads of all directions add to.
        self.passed_bytes = 0
        self._listener = socket.create_server((host, 0))
        self._sockets = [self._listener]
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink, is_up in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink, is_up), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            pace = self._pace(is_up)
            while data := source.recv(READ_BYTES):
                with self._lock:
                    self.passed_bytes += len(data)
                pace(len(data))
                sink.sendall(data)
        shut(source, sink)

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        """Returns a function that is called before each chunk of one connection with its size, and may wait.

        Args:
            is_up: Whether the chunks go to the server; False for those that come from it.
        """
        return lambda _: None

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
