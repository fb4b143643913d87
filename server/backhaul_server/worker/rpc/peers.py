"""A limit on the connections that one address may hold.

gRPC bounds all connections together, but not those of one peer, so a single peer could use them up and keep others out.
The kernel knows the peer of each open socket. Shutting a socket down ends gRPC's connection like a broken network does.
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
"""The address and port of a peer."""


class Peers:
    """Limits the connections of each address to a port of this process.

    Args:
        port: The TCP port on which this process listens.
        most: The number of connections that one address may hold.
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
                if len(_open_files()) <= self._most:  # no address can have too many
                    continue
                closed = await asyncio.to_thread(self.enforce)
            except OSError as error:  # no file descriptor is left to duplicate a socket with
                logger.warning("The connections of each address could not be counted: %s", error)
                continue
            for host, count in closed.items():
                logger.warning("%s held more than %d connections: %d were closed.", host, self._most, count)

    def enforce(self) -> Counter[str]:
        """Closes the connections beyond the limit of each address, the newest first. Returns their number by address.

        Reads /proc, so call it from a thread other than the event loop's.
        """
        counts, closed = Counter[str](), Counter[str]()
        known = set[_Peer]()
        numbers = {peer: number for number in _open_files() if (peer := self._peer_of(number)) is not None}
        for peer in sorted(numbers, key=lambda peer: peer not in self._known):
            host, _ = peer
            counts[host] += 1
            if counts[host] <= self._most:
                known.add(peer)
            elif self._shut_down(numbers[peer], peer):
                closed[host] += 1
        self._known = known
        return closed

    def _peer_of(self, number: int) -> _Peer | None:
        """Returns the peer of a connection to the port, by its file descriptor; None for all other files."""
        with suppress(OSError), _duplicated(number) as connection:  # the file was closed meanwhile, or is no socket
            return self._connected_to(connection)
        return None

    def _shut_down(self, number: int, peer: _Peer) -> bool:
        with suppress(OSError), _duplicated(number) as connection:
            if self._connected_to(connection) == peer:  # by now the descriptor may be another file's
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _connected_to(self, connection: socket.socket) -> _Peer | None:
        """Returns a socket's peer, None if the socket has another port. Raises OSError if it is not connected."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
            return None
        host, port = connection.getpeername()[:2]
        return host, port


@contextmanager
def _duplicated(number: int) -> Iterator[socket.socket]:
    """Duplicates a socket, so that its owner cannot close it during the use. Raises OSError if it is no socket."""
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
