"""Taking an address so that nobody else can take it too.

gRPC gives a second server the same TCP port (so_reuseport) or steals a live Unix socket without a word. So TCP ports
are taken exclusively, and a lock beside a socket's path is held for as long as the worker lives.
"""

import errno
import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import grpc

from backhaul_runtime.addresses import Address, is_private

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
)


class ListenError(Exception):
    """The address can't be taken; the message says why."""


class SocketPath:
    """A path for a Unix socket, taken until `release`, or until this process has ended however it did.

    Raises:
        ListenError: Another process has it, or no socket can be there.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_socket():
            raise ListenError(f"can't listen on {path}: a file that is no socket is there")
        try:
            lock = path.with_name(path.name + ".lock").open("w")
        except OSError as error:
            raise ListenError(f"can't listen on {path}: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ListenError(f"another worker listens on {path}") from None
        # Held open: the lock goes with the descriptor, also after kill -9.
        self._lock = lock
        self.path = path
        path.unlink(missing_ok=True)

    def release(self) -> None:
        """Removes the socket and its lock."""
        for path in (self.path, Path(self._lock.name)):
            path.unlink(missing_ok=True)
        self._lock.close()


def take_beside(address: str, kind: str) -> SocketPath:
    """Takes a path for another socket of a worker that listens on an address, which only its own user reaches.

    Beside its socket, or else in a directory of the user's, from where those of dead workers are removed.

    Raises:
        ListenError: The directory is somebody else's, or the path is taken.
        OSError: It can't be made.
    """
    if address.startswith("unix:"):
        return SocketPath(Path(f"{address.removeprefix('unix:')}.{kind}"))
    directory = Path(tempfile.gettempdir()) / f"backhaul-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_private(directory):
        raise ListenError(f"{directory} is not a directory of this user alone")
    with (directory / "lock").open(
        "w"
    ) as turn:  # else a lock that was made and not taken yet looks like a dead worker's
        fcntl.flock(turn, fcntl.LOCK_EX)
        for left in directory.glob("*.lock"):
            with suppress(ListenError):
                SocketPath(left.with_suffix("")).release()
        return SocketPath(directory / f"{address.rpartition(':')[2]}.{kind}")


class Listener:
    """Binds a server to an address and cleans up behind it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._path: SocketPath | None = None

    def bind(self, server: grpc.aio.Server) -> str:
        """Takes the address. Returns it with the port that was given. Raises ListenError."""
        if self._address.unix_path:
            self._path = SocketPath(Path(self._address.unix_path))
        else:
            self._check_port()
        target = self._address.target.removeprefix("dns:///")
        try:
            port = server.add_insecure_port(target)
        except RuntimeError as error:
            raise ListenError(f'can\'t listen on "{self._address.text}": {error}') from None
        if self._address.unix_path:
            return target
        host, _, _ = target.rpartition(":")
        return f"{host}:{port}"

    def _check_port(self) -> None:
        """Gives the system's reason where the port can't be had; gRPC keeps it to itself."""
        try:
            found = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in found:
                try:
                    with socket.socket(family, kind, protocol) as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind(address)
                except OSError as error:
                    # localhost names ::1 also where there is no IPv6: gRPC takes what there is.
                    if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                        raise
        except OSError as error:
            raise ListenError(f'can\'t listen on "{self._address.text}": {error.strerror or error}') from None

    def close(self) -> None:
        """Removes the socket and its lock."""
        if self._path is not None:
            self._path.release()
