"""How many connections one address may hold.

gRPC bounds connections in all, but not those of a peer. So whoever opens as many as there may be would keep others out.
The kernel tells whose each open socket is, and a socket that is shut down ends gRPC's connection as a broken network
does.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("backhaul.worker")

_LOOK_S = 1.0

_Peer = tuple[str, int]
"""Address and port."""


class Peers:
    """The connections to a port of this process.

    Args:
        port: On which it listens.
        most: Connections that an address may hold.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port = port
        self._most = most
        self._known: set[_Peer] = set()

    async def watch(self) -> None:
        """Enforces the limit until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if len(_open_files()) <= self._most:  # before that nobody can have too many
                    continue
                closed = await asyncio.to_thread(self.enforce)
            except OSError as error:  # no descriptor is left to look with
                logger.warning("the connections of each address could not be counted: %s", error)
                continue
            for host, count in closed.items():
                logger.warning("%s held more than %d connections: closed %d", host, self._most, count)

    def enforce(self) -> Counter[str]:
        """Closes what is too much of an address, the newest connections first. Returns how many by address."""
        held, closed = Counter[str](), Counter[str]()
        known = set[_Peer]()
        found = {peer: number for number in _open_files() if (peer := self._peer_of(number)) is not None}
        for peer in sorted(found, key=lambda peer: peer not in self._known):
            host, _ = peer
            held[host] += 1
            if held[host] <= self._most:
                known.add(peer)
            elif self._shut_down(found[peer], peer):
                closed[host] += 1
        self._known = known
        return closed

    def _peer_of(self, number: int) -> _Peer | None:
        """The peer of a connection to the port, by the number of its descriptor; None for all other files."""
        with suppress(OSError), _duplicated(number) as connection:  # closed since, or no socket
            return self._connected_to(connection)
        return None

    def _shut_down(self, number: int, peer: _Peer) -> bool:
        with suppress(OSError), _duplicated(number) as connection:
            if self._connected_to(connection) == peer:  # the number may be that of another file by now
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _connected_to(self, connection: socket.socket) -> _Peer | None:
        """Raises OSError for a socket that listens, or whose connection has ended."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
            return None
        host, port = connection.getpeername()[:2]
        return host, port


@contextmanager
def _duplicated(number: int) -> Iterator[socket.socket]:
    """A descriptor of our own for a socket, which its owner can't close meanwhile. Raises OSError if it is none."""
    descriptor = os.dup(number)
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with connection:
        yield connection


def _open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
