"""Addresses that only one worker can listen on.

gRPC lets a second server share a TCP port (so_reuseport), or replaces a live Unix socket, without an error. So workers
bind TCP ports exclusively, and hold a lock beside the path of a Unix socket for as long as they live.
"""

import errno
import fcntl
import logging
import os
import resource
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import grpc

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.addresses import Address, is_private
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES

logger = logging.getLogger("backhaul.worker")

MOST_FILES = 1 << 16
"""Upper bound of the file descriptors that a worker asks for. Each connection takes one."""

_MOST_CONNECTIONS = 8_192  # an idle connection takes 10 KiB
_HANDSHAKE_S, _IDLE_S = 5, 60  # trainers send a request every second
_MOST_CALLS = 32  # per connection; a trainer has about twenty


def raise_file_limit() -> int:
    """Raises the limit of open files, which is 1,024 on many systems, and returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def server_options(files: int) -> tuple[tuple[str, int], ...]:
    """Returns gRPC's options for a server that may open this many files."""
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
    """Returns how many connections one address may hold at a server that may open this many files."""
    return _most_connections(files) // 4


def _most_connections(files: int) -> int:
    return min(_MOST_CONNECTIONS, files // 2)


class ListenError(Exception):
    """The worker cannot listen on the address; the message says why."""


class SocketPath:
    """A path for a Unix socket that no other worker can use until `release`, or until this process ends in any way.

    Args:
        path: The path of the socket. A socket that a dead worker has left there is removed.

    Raises:
        ListenError: Another worker holds the path, or something other than a socket is there.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_socket():
            raise ListenError(f"can't listen on {path}: it is a file, not a socket")
        try:
            lock = _lock_file(path.with_name(path.name + ".lock"))
        except OSError as error:
            raise ListenError(f"can't listen on {path}: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ListenError(f"another worker listens on {path}") from None
        # The kernel releases the lock when the file is closed, also after kill -9. So the file stays open.
        self._lock = lock
        self.path = path
        path.unlink(missing_ok=True)

    def release(self) -> None:
        """Removes the socket and its lock."""
        for path in (self.path, self.path.with_name(self.path.name + ".lock")):
            path.unlink(missing_ok=True)
        self._lock.close()


def _lock_file(path: Path) -> IO[bytes]:
    """Opens a file to lock, and creates it if it is missing. Does not follow links, which another user may have made.

    Raises:
        OSError: The file cannot be opened, or is a link or no regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "the lock is no regular file", str(path))
    return os.fdopen(descriptor, "r+b")


def take_beside(address: str, kind: str) -> SocketPath:
    """Takes a path for a further socket of a worker, which only the worker's user can access.

    The path lies beside the worker's Unix socket. A worker with a TCP address uses a directory of its user instead, and
    removes the sockets that dead workers have left there.

    Args:
        address: The address that the worker listens on.
        kind: The suffix of the path.

    Raises:
        ListenError: The directory belongs to another user, or another worker holds the path.
        OSError: The directory or the lock cannot be created.
    """
    if address.startswith("unix:"):
        return SocketPath(Path(f"{address.removeprefix('unix:')}.{kind}"))
    directory = Path(tempfile.gettempdir()) / f"backhaul-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not is_private(directory):
        raise ListenError(f"{directory} is not a directory of this user alone")
    # Without this lock, a worker that has created its lock file but not locked it would look dead.
    with _lock_file(directory / "lock") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for left in directory.glob("*.lock"):
            with suppress(ListenError):
                SocketPath(left.with_suffix("")).release()
        return SocketPath(directory / f"{address.rpartition(':')[2]}.{kind}")


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns the credentials of a server that requires clients with a certificate; see NOTE [Certificates].

    Raises:
        SettingError: The files cannot be used now.
    """

    def configuration() -> grpc.ServerCertificateConfiguration:
        certificate, key, authority = files.read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    seen = files.state

    def replaced() -> Any:
        nonlocal seen
        if (state := files.state) == seen:
            return None  # the present ones stay in use
        seen = state
        try:
            return configuration()
        except SettingError as error:
            logger.error("The certificates were replaced, but the former ones stay in use: %s", error.message)
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), replaced, require_client_authentication=True)


class Listener:
    """Binds a server to an address, and removes its Unix socket at the end.

    Args:
        address: The address to listen on; port 0 takes a free port.
        tls: The files of a server that speaks TLS; None: without TLS.
    """

    def __init__(self, address: Address, tls: TlsFiles | None = None) -> None:
        self._address, self._tls = address, tls
        self._path: SocketPath | None = None

    def bind(self, server: grpc.aio.Server) -> str:
        """Binds the server. Returns the address with the port that the system has chosen. Raises ListenError."""
        if self._address.unix_path:
            self._path = SocketPath(Path(self._address.unix_path))
        else:
            self._check_port()
        target = self._address.target
        try:
            if self._tls is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, server_credentials(self._tls))
        except RuntimeError as error:
            raise ListenError(f'can\'t listen on "{self._address.text}": {error}') from None
        if self._address.unix_path:
            return f"unix:{self._address.unix_path}"
        host, _, _ = target.rpartition(":")
        return f"{host}:{port}"

    def _check_port(self) -> None:
        """Raises ListenError with the system's reason if the port is not free, because gRPC does not report it."""
        try:
            targets = socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in targets:
                try:
                    with socket.socket(family, kind, protocol) as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind(address)
                except OSError as error:
                    # localhost resolves to ::1 even without IPv6, and gRPC then uses IPv4 alone.
                    if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                        raise
        except OSError as error:
            raise ListenError(f'can\'t listen on "{self._address.text}": {error.strerror or error}') from None

    def close(self) -> None:
        """Removes the Unix socket and its lock, if there is one."""
        if self._path is not None:
            self._path.release()
