"""Where workers are: addresses that users wrote, and resolvers that name changing workers. Does not import torch.

NOTE [Resolvers]
1. A resolver is named where an address may stand: `file:PATH` is a file with an address in each line,
   `dns:///NAME:PORT` all addresses that a name resolves to, and `ray:NAME` a fleet in a Ray cluster (see
   `ray_resolver.py`). An address is a resolver of one worker.
2. Resolvers are asked once a second. gRPC resolves a name again only when a connection breaks, and so would not
   notice a worker that has joined.
3. A resolver that cannot be read says nothing about workers. What it named before stays valid.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backhaul_runtime.errors import AddressError, ConnectError
from backhaul_runtime.process.addresses import Address, parse_address
from backhaul_runtime.process.ray_fleet import NEEDS_RAY, check_name, has_ray
from backhaul_runtime.process.ray_resolver import RayResolver

LOOK_INTERVAL_S = 1.0
"""Seconds between two requests to a resolver."""
_FORMS = 'write "host:port", "unix:/path", "dns:///name:port", "file:/path" or "ray:name", several with commas between'


class Resolver(Protocol):
    """What names the workers that there are now. Any thread may use it, one at a time."""

    @property
    def text(self) -> str:
        """The resolver as the user wrote it."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether it always names the same worker."""
        ...

    def resolve(self) -> list[Address]:
        """Returns the addresses of the workers that there are now; may block for some seconds.

        Raises:
            AddressError: The resolver has something else than an address.
            ConnectError: The resolver cannot be read.
        """
        ...

    def close(self) -> None:
        """Ends what `resolve` has started. A call in another thread fails or is discarded."""
        ...


@dataclass(frozen=True, slots=True)
class FixedResolver:
    """One address.

    Attributes:
        address: The address as it was parsed.
        is_fixed: True, for it always names the same worker.
    """

    address: Address
    is_fixed: bool = True

    @property
    def text(self) -> str:
        """The address as the user wrote it."""
        return self.address.text

    def resolve(self) -> list[Address]:
        """Returns the address."""
        return [self.address]

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class FileResolver:
    """A file with an address in each line. What follows a "#" is a comment.

    Attributes:
        text: The resolver as the user wrote it.
        path: The path of the file.
        is_fixed: False, for the file may change.
    """

    text: str
    path: Path
    is_fixed: bool = False

    def resolve(self) -> list[Address]:
        """Reads the file. See `Resolver.resolve`."""
        try:
            lines = self.path.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConnectError(
                f'the file of addresses "{self.path}" can\'t be read: {reason}. Write one address in each line',
                address=self.text,
            ) from None
        try:
            return _distinct([parse_address(a) for line in lines if (a := line.partition("#")[0].strip())], self.text)
        except AddressError as error:
            raise AddressError(f'{error.message} (in the file "{self.path}")', address=self.text) from None

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class DnsResolver:
    """All addresses of a name. Certificates of the workers must have the name.

    Where a name has IPv4 and IPv6 addresses, only the first kind counts: otherwise each worker would be used twice.

    Attributes:
        text: The resolver as the user wrote it.
        name: The name to resolve.
        port: The TCP port of the workers.
        is_fixed: False, for the name server's answer may change.
    """

    text: str
    name: str
    port: int
    is_fixed: bool = False

    def resolve(self) -> list[Address]:
        """Resolves the name. See `Resolver.resolve`."""
        try:
            answers = socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESS:
                return []
            raise ConnectError(f'"{self.name}" can\'t be resolved: {error.strerror}', address=self.text) from None
        families = {family for family, *_ in answers}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        hosts = sorted({str(where[0]) for kind, *_, where in answers if kind == family})
        return [self._address(f"[{host}]" if ":" in host else host) for host in hosts]

    def close(self) -> None:
        """Does nothing."""

    def _address(self, host: str) -> Address:
        text = f"{host}:{self.port}"
        return Address(text, text, host=host.strip("[]"), port=self.port, verified_name=self.name)


_NO_ADDRESS = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Answers of a name server that works: the name has no address, as that of a Kubernetes service without ready pods."""


def parse_resolvers(text: str) -> list[Resolver]:
    """Parses addresses and resolvers that are separated by commas.

    Raises:
        AddressError: One of them cannot be read, stands twice, or there is none.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise AddressError(f"no address in {text!r}: {_FORMS}", address=text)
    resolvers = [_resolver(part) for part in parts]
    _distinct([resolver.address for resolver in resolvers if isinstance(resolver, FixedResolver)], text)
    if len({resolver.text for resolver in resolvers}) < len(resolvers):
        raise AddressError(f'a resolver stands twice in "{text}": name each once', address=text)
    return resolvers


def _resolver(text: str) -> Resolver:
    if text.startswith("file:"):
        path = re.sub("^file:(//(?=/))?", "", text)
        if not path:
            raise AddressError(f'the address "{text}" names no path: {_FORMS}', address=text)
        return FileResolver(text, Path(path))
    if text.startswith("dns:"):
        address = parse_address(text.removeprefix("dns:///"))
        if not address.host or not address.port:
            raise AddressError(f'the address "{text}" names no host and port: {_FORMS}', address=text)
        return DnsResolver(text, address.host, address.port)
    if text.startswith("ray:"):
        try:
            name = check_name(text.removeprefix("ray:"))
        except ValueError as error:
            raise AddressError(f'the address "{text}" names no fleet: {error}', address=text) from None
        if not has_ray():
            raise AddressError(f'the address "{text}" {NEEDS_RAY}', address=text)
        return RayResolver(text, name)
    return FixedResolver(parse_address(text))


def _distinct(addresses: Sequence[Address], text: str) -> list[Address]:
    """Returns the addresses. Raises AddressError for a repeated worker."""
    for index, address in enumerate(addresses):
        if address.target in {other.target for other in addresses[:index]}:
            raise AddressError(f'"{address.text}" stands twice in "{text}": name each worker once', address=text)
    return [*addresses]
