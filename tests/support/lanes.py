"""Sessions with several connections, and proxies that break single ones."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import backhaul
from backhaul import Session
from backhaul._worker_client.connection.connection import Connection
from backhaul_lab.harness.link_proxy import READ_BYTES, LinkProxy, shut
from conftest import QUIET_S, wait_until
from support.flips import on_every_channel

OVER_TCP: dict[str, Any] = {"shared_memory": False, "unix_socket": False}


def connection_of(session: Session) -> Connection:
    """The connection of a session that has one worker."""
    (handle,) = session._workers[:]
    return handle.connection


def joined(session: Session) -> int:
    """The number of lanes that transfers may use now."""
    connection = connection_of(session)
    return 0 if connection.up is None else len(connection.lanes.joined(connection.up.session))


@contextmanager
def connected(
    address: str, connections: int, *, token_file: str | None = None, tls: str | None = None, **settings: Any
) -> Iterator[Session]:
    """A session whose lanes have all joined."""
    values = {"silence_s": QUIET_S, "connections": connections, **OVER_TCP, **settings}
    with backhaul.connect(address, token_file=token_file, tls=tls, settings=backhaul.Settings(**values)) as session:
        wait_until(lambda: joined(session) == connections - 1, "the lanes join")
        yield session


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the messages of sessions that connect meanwhile, by method."""
    passed: Counter[str] = Counter()

    def count(direction: str, method: str, data: bytes) -> bytes:
        passed[method] += 1
        return data

    with on_every_channel(count):
        yield passed


class LaneProxy(LinkProxy):
    """A proxy whose connections are slow, and that breaks one lane when it is armed. A context manager.

    Attributes:
        broken: How many lanes it has broken.
    """

    def __init__(self, target: str) -> None:
        self.broken = 0
        self._is_due: Any = None
        self._stalls = False
        self._over = threading.Event()
        super().__init__(target)

    def arm(self, direction: str, after_bytes: int, *, stalls: bool = False) -> None:
        """The first lane is broken that passes on so many bytes in a direction. A stalled one stays open."""
        passed: Counter[object] = Counter()
        self._stalls = stalls

        def is_due(source: object, is_up: bool, size_bytes: int) -> bool:
            if is_up is not (direction == "up"):
                return False
            passed[source] += size_bytes
            return passed[source] > after_bytes

        self._is_due = is_due

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        is_lane = self._sockets.index(source) > 2
        with suppress(OSError):
            while data := source.recv(READ_BYTES):
                time.sleep(0.001)
                is_due = self._is_due
                if is_lane and is_due is not None and is_due(source, is_up, len(data)):
                    self._is_due = None
                    self.broken += 1
                    if self._stalls:
                        self._over.wait(60)
                    break
                sink.sendall(data)
        shut(source, sink)

    def end(self) -> None:
        """Breaks all connections, and takes no further ones."""
        self._over.set()
        shut(*self._sockets)

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        super().__exit__(*exception)
