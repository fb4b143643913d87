import pytest

from backhaul import AddressError
from backhaul_runtime.addresses import parse_address, parse_addresses


@pytest.mark.parametrize(
    ("text", "target", "is_local"),
    [
        ("gpu-box:50051", "gpu-box:50051", False),
        (" 127.0.0.1:0 ", "127.0.0.1:0", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:65535", "[::1]:65535", True),
        ("dns:///workers.svc:50051", "dns:///workers.svc:50051", False),
        ("unix:/run/b.sock", "unix:/run/b.sock", True),
        ("unix:///run/b.sock", "unix:/run/b.sock", True),
        ("unix:b.sock", "unix:b.sock", True),
        ("0.0.0.0:50051", "0.0.0.0:50051", False),
        ("127.1.2.3:1", "127.1.2.3:1", True),
        ("127.example.com:1", "127.example.com:1", False),
    ],
)
def test_reads_what_people_write(text: str, target: str, is_local: bool) -> None:
    address = parse_address(text)
    assert (address.target, address.is_local) == (target, is_local)


@pytest.mark.parametrize(
    "text", ["gpu-box", "gpu-box:", ":50051", "a b:1", "unix:", "a:70000", "http://a:1", "::1:5", ""]
)
def test_names_what_can_not_be_read(text: str) -> None:
    with pytest.raises(AddressError, match="host:port|port") as caught:
        parse_address(text)
    assert caught.value.address == text


def test_unix_paths_have_a_longest_length() -> None:
    parse_address("unix:/" + "x" * 106)
    with pytest.raises(AddressError, match="108 bytes, a Unix socket takes 107"):
        parse_address("unix:/" + "x" * 107)


def test_several_addresses() -> None:
    assert [address.port for address in parse_addresses("a:1, b:2,unix:/c")] == [1, 2, 0]


@pytest.mark.parametrize(("text", "message"), [("", "no address"), (" , ", "no address"), ("a:1,a:1", "stands twice")])
def test_lists_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(AddressError, match=message):
        parse_addresses(text)
