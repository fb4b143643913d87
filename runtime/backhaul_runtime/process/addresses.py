"""Addresses of workers. Does not import torch."""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from backhaul_runtime.errors import AddressError

MAX_UNIX_PATH_BYTES = 107  # sockaddr_un holds 108 with its end
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_LOOPBACK = re.compile(r"127(\.\d{1,3}){1,3}")  # a name like 127.example.com may be anywhere
_EXAMPLES = 'write "host:port" or "unix:/path", several with commas between'


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one worker.

    Attributes:
        text: The address as the user wrote it.
        target: The address in gRPC's notation.
        host: The host without brackets; empty for a Unix socket.
        port: The TCP port; 0 for a Unix socket or for any free port.
        unix_path: The path of a Unix socket; empty otherwise.
        verified_name: The name that a worker's certificate must have; empty for the host.
    """

    text: str
    target: str
    host: str = ""
    port: int = 0
    unix_path: str = ""
    verified_name: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return bool(self.unix_path) or self.host in {"localhost", "::1"} or bool(_LOOPBACK.fullmatch(self.host))


def parse_address(text: str) -> Address:
    """Parses one address. Raises AddressError that says what is wrong."""
    stripped = text.strip()
    if stripped.startswith("unix:"):
        path = re.sub(r"^unix:(//(?=/))?", "", stripped)
        if not path:
            raise AddressError(f'the address "{text}" names no path: {_EXAMPLES}', address=text)
        return _of_socket(stripped, path)
    match = _HOST_PORT.fullmatch(stripped)
    if match is None:
        raise AddressError(f'the address "{text}" can\'t be read: {_EXAMPLES}', address=text)
    port = int(match["port"])
    if port > 65_535:  # noqa: PLR2004  TCP's limit
        raise AddressError(f'the address "{text}" has port {port}; the highest port is 65535', address=text)
    return Address(stripped, stripped, host=match["host"].strip("[]"), port=port)


def socket_address(path: str) -> Address:
    """Returns the address of a Unix socket from its path. Raises AddressError if it is too long or has a comma."""
    return _of_socket(f"unix:{path}", path)


def _of_socket(text: str, path: str) -> Address:
    size_bytes = len(os.fsencode(path))
    if size_bytes > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f'the path in "{text}" has {size_bytes} bytes, a Unix socket takes {MAX_UNIX_PATH_BYTES}: use a shorter '
            "directory",
            address=text,
        )
    if "," in path:  # gRPC splits at it even where it is encoded
        raise AddressError(f'the path in "{text}" has a comma, which ends an address: use another path', address=text)
    # The target is a URI for gRPC, in which %, # and ? would end the path or stand for something else.
    return Address(text, f"unix:{quote(os.fsencode(path))}", unix_path=path)


def is_private(directory: Path) -> bool:
    """Whether only this process's user can access a directory, so that no other user can have put a socket there."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
