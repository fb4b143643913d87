"""Taking an address so that nobody else can take it too.

gRPC gives a second server the same TCP port (so_reuseport) or steals a live Unix socket without a word. So TCP ports
are taken exclusively, and a lock beside a socket's path is held for as long as the worker lives.
"""

import fcntl
from pathlib import Path
from typing import IO

import grpc

from backhaul_runtime.addresses import Address

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
)


class ListenError(Exception):
    """The address can't be taken; the message says why."""


class Listener:
    """Binds a server to an address and cleans up behind it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock: IO[str] | None = None

    def bind(self, server: grpc.aio.Server) -> str:
        """Takes the address. Returns it with the port that was given. Raises ListenError."""
        if self._address.unix_path:
            self._lock_path(Path(self._address.unix_path))
        try:
            port = server.add_insecure_port(self._address.target)
        except RuntimeError as error:
            raise ListenError(f'can\'t listen on "{self._address.text}": {error}') from None
        if self._address.unix_path:
            return self._address.target
        host, _, _ = self._address.target.rpartition(":")
        return f"{host}:{port}"

    def _lock_path(self, path: Path) -> None:
        try:
            # Held open for the worker's life: the lock goes with the descriptor, also after kill -9.
            self._lock = path.with_name(path.name + ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ListenError(f"another worker listens on {path}") from None
        except OSError as error:
            raise ListenError(f"can't listen on {path}: {error}") from None
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the socket and its lock."""
        if self._lock is not None:
            for name in (self._address.unix_path, self._lock.name):
                Path(name).unlink(missing_ok=True)
            self._lock.close()
