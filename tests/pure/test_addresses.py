import os
from pathlib import Path

import pytest

from backhaul import AddressError
from backhaul_runtime.process.addresses import is_private, parse_address


@pytest.mark.parametrize(
    ("text", "target", "is_local"),
    [
        ("gpu-box:50051", "gpu-box:50051", False),
        (" 127.0.0.1:0 ", "127.0.0.1:0", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:65535", "[::1]:65535", True),
        ("unix:/run/b.sock", "unix:/run/b.sock", True),
        ("unix:///run/b.sock", "unix:/run/b.sock", True),
        ("unix:b.sock", "unix:b.sock", True),
        ("unix:/a%2F7/b?c#d e.sock", "unix:/a%252F7/b%3Fc%23d%20e.sock", True),
        ("unix:/ä.sock", "unix:/%C3%A4.sock", True),
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
    assert vars(caught.value)["address"] == text


def test_unix_paths_have_a_longest_length() -> None:
    parse_address("unix:/" + "x" * 106)
    with pytest.raises(AddressError, match="108 bytes, a Unix socket takes 107"):
        parse_address("unix:/" + "x" * 107)


def test_a_comma_ends_an_address() -> None:
    with pytest.raises(AddressError, match="comma"):
        parse_address("unix:/a,b.sock")


def test_only_a_directory_of_this_user_alone_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["own", "group's", "all's", "link", "file", "missing"]
    for name, mode in zip(names, (0o700, 0o710, 0o701), strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file").touch(mode=0o600)
    assert [name for name in names if is_private(tmp_path / name)] == ["own"]
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert not is_private(tmp_path / "own")
