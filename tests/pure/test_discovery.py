import socket
from pathlib import Path
from typing import Any

import pytest

from backhaul import AddressError, ConnectError
from backhaul_runtime.process.discovery import DnsResolver, FileResolver, Resolver, parse_resolvers


def texts(resolver: Resolver) -> list[str]:
    return [address.text for address in resolver.resolve()]


def test_addresses_and_sources_stand_side_by_side() -> None:
    resolvers = parse_resolvers("a:1, unix:/c,file:///shared/workers,dns:///workers.svc:50051")
    assert [resolver.text for resolver in resolvers] == [
        "a:1",
        "unix:/c",
        "file:///shared/workers",
        "dns:///workers.svc:50051",
    ]
    assert [resolver.is_fixed for resolver in resolvers] == [True, True, False, False]
    assert texts(resolvers[0]) == ["a:1"]
    assert isinstance(resolvers[2], FileResolver)
    assert resolvers[2].path == Path("/shared/workers")
    assert isinstance(resolvers[3], DnsResolver)
    assert (resolvers[3].name, resolvers[3].port) == ("workers.svc", 50051)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no address"),
        (" , ", "no address"),
        ("a:1,a:1", "stands twice"),
        ("file:x,file:x", "a resolver stands twice"),
        ("file:", "names no path"),
        ("dns:///workers", "can't be read"),
        ("dns:///workers:0", "names no host and port"),
        ("dns:///unix:/a", "names no host and port"),
        ("ftp://a:1", "can't be read"),
    ],
)
def test_lists_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(AddressError, match=message):
        parse_resolvers(text)


def test_a_file_is_read_at_each_look(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    (resolver,) = parse_resolvers(f"file:{path}")
    with pytest.raises(ConnectError, match=f'the file of addresses "{path}" can\'t be read: No such file'):
        resolver.resolve()
    path.write_text("a:1 # job 7\n\n# a comment\n  unix:/b\n")
    assert texts(resolver) == ["a:1", "unix:/b"]
    path.write_text("")
    assert texts(resolver) == []


@pytest.mark.parametrize(
    ("content", "message"), [(b"a:1\nb\n", '"b" can\'t be read'), (b"a:1\na:1\n", "twice"), (b"\xff\xfe", "not text")]
)
def test_what_a_file_must_not_hold(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_bytes(content)
    with pytest.raises((AddressError, ConnectError), match=message) as caught:
        FileResolver("file:workers", path).resolve()
    assert str(path) in str(caught.value)


def answer(*hosts: str) -> list[Any]:
    families = [(socket.AF_INET6 if ":" in host else socket.AF_INET, host) for host in hosts]
    return [(family, socket.SOCK_STREAM, 6, "", (host, 50051)) for family, host in families]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (answer("10.0.0.2", "10.0.0.1", "10.0.0.2"), ["10.0.0.1:50051", "10.0.0.2:50051"]),
        (answer("fd00::1", "10.0.0.1"), ["10.0.0.1:50051"]),  # the same worker by both of its addresses
        (answer("fd00::2", "fd00::1"), ["[fd00::1]:50051", "[fd00::2]:50051"]),
    ],
)
def test_a_name_stands_for_all_its_addresses(
    answers: list[Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    addresses = DnsResolver("dns:///workers:50051", "workers", 50051).resolve()
    assert [address.target for address in addresses] == expected
    assert {address.verified_name for address in addresses} == {"workers"}


def test_a_name_without_addresses_differs_from_a_resolver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def resolve(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    resolver = DnsResolver("dns:///workers:1", "workers", 1)
    assert resolver.resolve() == []
    error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(ConnectError, match='"workers" can\'t be resolved: Temporary failure'):
        resolver.resolve()
