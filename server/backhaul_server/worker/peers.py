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
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("backhaul.worker")

_LOOK_S = 1.0


class Peers:
    """The connections to a port of this process.

    Args:
        port: On which it listens.
        most: Connections that an address may hold.
    """

    def __init__(self, port: int, most: int) -> None:
        self._port = port
        self._most = most
        self._known: set[tuple[str, int]] = set()

    async def watch(self) -> None:
        """Enforces the limit until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if len(_open_files()) > self._most:  # before that nobody can have too many
                closed = await asyncio.to_thread(self.enforce)
                for host, count in closed.items():
                    logger.warning("%s held more than %d connections: closed %d", host, self._most, count)

    def enforce(self) -> Counter[str]:
        """Closes what is too much of an address, the newest connections first. Returns how many by address."""
        held, closed = Counter[str](), Counter[str]()
        known = set[tuple[str, int]]()
        found = self._connections()
        for peer, connection in sorted(found.items(), key=lambda item: item[0] not in self._known):
            with connection:
                held[peer[0]] += 1
                if held[peer[0]] <= self._most:
                    known.add(peer)
                else:
                    closed[peer[0]] += 1
                    with suppress(OSError):  # it has ended
                        connection.shutdown(socket.SHUT_RDWR)
        self._known = known
        return closed

    def _connections(self) -> dict[tuple[str, int], socket.socket]:
        """By address and port of the peer, a descriptor of our own for the connection."""
        found: dict[tuple[str, int], socket.socket] = {}
        for number in _open_files():
            with suppress(OSError):  # closed since, or no socket
                descriptor = os.dup(number)
                try:
                    connection = socket.socket(fileno=descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
                peer = self._peer_of(connection)
                if peer is None or peer in found:  # a number may be that of a descriptor made here
                    connection.close()
                else:
                    found[peer] = connection
        return found

    def _peer_of(self, connection: socket.socket) -> tuple[str, int] | None:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
                return None
            host, port = connection.getpeername()[:2]
        except OSError:  # it listens, or has ended
            return None
        return host, port


def _open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]
