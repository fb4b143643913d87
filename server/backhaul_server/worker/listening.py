"""Taking an address so that nobody else can take it too.

gRPC gives a second server the same TCP port (so_reuseport) or steals a live Unix socket without a word. So TCP ports
are taken exclusively, and a lock beside a socket's path is held for as long as the worker lives.
"""

import errno
import fcntl
import os
import resource
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

import grpc

from backhaul_runtime.process.addresses import Address, is_private
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES

MOST_FILES = 1 << 16
"""Descriptors that a worker asks for where its limit allows. Each connection takes one."""

_MOST_CONNECTIONS = 8_192  # an idle one takes 10 KiB
_HANDSHAKE_S, _IDLE_S = 5, 60  # trainers say something every second
_MOST_CALLS = 32  # of a connection; a trainer has some twenty


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, and returns how many. Many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def server_options(files: int) -> tuple[tuple[str, int], ...]:
    """GRPC's options for a server that may open so many files."""
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", 16 << 20),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
        ("grpc.max_concurrent_streams", _MOST_CALLS),
        ("grpc.max_allowed_incoming_connections", _most_connections(files)),
    )


def connections_of_a_peer(files: int) -> int:
    """How many connections one address may hold at a server that may open so many files."""
    return _most_connections(files) // 4


def _most_connections(files: int) -> int:
    return min(_MOST_CONNECTIONS, files // 2)


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
            lock = _lock_file(path.with_name(path.name + ".lock"))
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
        for path in (self.path, self.path.with_name(self.path.name + ".lock")):
            path.unlink(missing_ok=True)
        self._lock.close()


def _lock_file(path: Path) -> IO[bytes]:
    """Opens a file to be locked, made if need be. Somebody else's link to another file is not followed.

    Raises:
        OSError: It can't be opened, or is a link or no file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "what is to be locked is no file", str(path))
    return os.fdopen(descriptor, "r+b")


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
    # Else a lock that was made and not taken yet looks like a dead worker's.
    with _lock_file(directory / "lock") as turn:
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
