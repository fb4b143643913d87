"""Stands between a trainer and a worker and counts the bytes of TCP each way. For runs that nobody times."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

READ_BYTES = 1 << 16


class CountingProxy:
    """Passes bytes on to a server. A context manager.

    Args:
        target: Of the server, as "host:port".

    Attributes:
        address: Where it listens.
        passed_bytes: Both ways, so far.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._lock = threading.Lock()
        self.passed_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
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
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            pace = self._pace()
            while data := source.recv(READ_BYTES):
                with self._lock:
                    self.passed_bytes += len(data)
                pace(len(data))
                sink.sendall(data)
        _shut(source, sink)

    def _pace(self) -> Callable[[int], None]:
        """Gives what waits before so many bytes of one direction are passed on."""
        return lambda _: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        _shut(*self._sockets)
        for side in self._sockets:
            side.close()
        for thread in self._threads:
            thread.join(5)


def _shut(*sides: socket.socket) -> None:
    for side in sides:
        with suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
