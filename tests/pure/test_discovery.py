import socket
from pathlib import Path
from typing import Any

import pytest

from backhaul import AddressError, ConnectError
from backhaul_runtime.process.discovery import AddressSource, DnsSource, FileSource, parse_sources


def texts(source: AddressSource) -> list[str]:
    return [address.text for address in source.look()]


def test_addresses_and_sources_stand_side_by_side() -> None:
    sources = parse_sources("a:1, unix:/c,file:///shared/workers,dns:///workers.svc:50051")
    assert [source.text for source in sources] == [
        "a:1",
        "unix:/c",
        "file:///shared/workers",
        "dns:///workers.svc:50051",
    ]
    assert [source.is_fixed for source in sources] == [True, True, False, False]
    assert texts(sources[0]) == ["a:1"]
    assert isinstance(sources[2], FileSource)
    assert sources[2].path == Path("/shared/workers")
    assert isinstance(sources[3], DnsSource)
    assert (sources[3].name, sources[3].port) == ("workers.svc", 50051)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no address"),
        (" , ", "no address"),
        ("a:1,a:1", "stands twice"),
        ("file:x,file:x", "a source stands twice"),
        ("file:", "names no path"),
        ("dns:///workers", "can't be read"),
        ("dns:///workers:0", "names no host and port"),
        ("dns:///unix:/a", "names no host and port"),
        ("ftp://a:1", "can't be read"),
    ],
)
def test_lists_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(AddressError, match=message):
        parse_sources(text)


def test_a_file_is_read_at_each_look(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    (source,) = parse_sources(f"file:{path}")
    with pytest.raises(ConnectError, match=f'the file of addresses "{path}" can\'t be read: No such file'):
        source.look()
    path.write_text("a:1 # job 7\n\n# a comment\n  unix:/b\n")
    assert texts(source) == ["a:1", "unix:/b"]
    path.write_text("")
    assert texts(source) == []


@pytest.mark.parametrize(
    ("content", "message"), [(b"a:1\nb\n", '"b" can\'t be read'), (b"a:1\na:1\n", "twice"), (b"\xff\xfe", "not text")]
)
def test_what_a_file_must_not_hold(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_bytes(content)
    with pytest.raises((AddressError, ConnectError), match=message) as caught:
        FileSource("file:workers", path).look()
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
    addresses = DnsSource("dns:///workers:50051", "workers", 50051).look()
    assert [address.target for address in addresses] == expected
    assert {address.verified_name for address in addresses} == {"workers"}


def test_a_name_without_addresses_differs_from_a_resolver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def resolve(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    source = DnsSource("dns:///workers:1", "workers", 1)
    assert source.look() == []
    error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(ConnectError, match='"workers" can\'t be resolved: Temporary failure'):
        source.look()
