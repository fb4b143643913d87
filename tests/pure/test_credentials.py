"""Token files, and what counts as showing a token."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backhaul import SettingError
from backhaul_runtime.process.credentials import bearer, make_token, one_for_each, read_token, shows

TOKEN = "correct-horse-battery-staple"


def written(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_newline_at_the_end_is_not_of_the_token(end: str, tmp_path: Path) -> None:
    assert read_token(written(tmp_path, (TOKEN + end).encode())) == TOKEN


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"secret-of-15-ch", "holds fewer than 16 characters"),
        (b"s" * 1025, "holds more than 1024 characters"),
        (b"s" * 100_000, "holds more than 1024 characters"),
        (b"secret secret secret", "more than one word of printable ASCII"),
        (b"secretsecretsecret \n", "more than one word of printable ASCII"),
        (b"secretsecretsecret\n\n", "more than one word of printable ASCII"),
        (b"secretsecret\tsecret", "more than one word of printable ASCII"),
        (b"secretsecretsecret\x00", "more than one word of printable ASCII"),
        ("secretsecretsecret\u00e9".encode(), "more than one word of printable ASCII"),
    ],
)
def test_what_is_no_token_is_named_by_its_file_alone(content: bytes, wrong: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(SettingError, match=wrong) as caught:
        read_token(path)
    assert f'"{path}"' in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing", "", "nul\0"])
def test_a_file_that_can_not_be_read_is_named_with_what_makes_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"can't be read: .*`backhaul token "):
        read_token(tmp_path / name)


@pytest.mark.parametrize("mode", [0o604, 0o640])
def test_others_who_can_read_it_are_warned_of(mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, TOKEN.encode(), mode)
    assert read_token(path) == TOKEN
    assert [r.getMessage() for r in caplog.records] == [
        f"others than its owner can read the token file {path}: chmod 600 {path}"
    ]


@pytest.mark.parametrize("kind", ["private", "another user's", "on a read-only mount"])
def test_what_is_private_or_can_not_be_changed_is_not_warned_of(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, TOKEN.encode(), 0o600 if kind == "private" else 0o644)
    if kind == "another user's":
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    if kind == "on a read-only mount":
        flags = os.statvfs(tmp_path).f_flag | os.ST_RDONLY
        monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result((0,) * 8 + (flags, 255)))
    with caplog.at_level(logging.DEBUG):
        read_token(path)
    assert caplog.records == []


def test_a_new_token_is_its_owners_alone_and_like_no_other(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    assert [make_token(path) for path in paths] == [True, True]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)
    a, b = map(read_token, paths)
    assert a != b
    assert len(a) == 43  # 256 bits in base64
    assert make_token(paths[0]) is False
    assert read_token(paths[0]) == a
    assert sorted(tmp_path.iterdir()) == paths


def test_of_many_at_once_one_makes_the_token_and_all_read_it(tmp_path: Path) -> None:
    def made_and_read(_: int) -> tuple[bool, str]:
        return make_token(tmp_path / "token"), read_token(tmp_path / "token")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(made_and_read, range(50)))
    assert sum(is_new for is_new, _ in results) == 1
    assert len({token for _, token in results}) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "token"]


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    assert make_token(tmp_path / "token") is False
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("files", "workers", "expected"),
    [([], 2, ["", ""]), (["a"], 1, ["a"]), (["a"], 3, ["a", "a", "a"]), (["a", "b"], 2, ["a", "b"])],
)
def test_one_token_for_all_or_one_for_each(files: list[str], workers: int, expected: list[str]) -> None:
    assert one_for_each(files, workers) == expected


@pytest.mark.parametrize(("files", "workers"), [(["a", "b"], 3), (["a", "b"], 1)])
def test_other_numbers_of_tokens_are_refused(files: list[str], workers: int) -> None:
    with pytest.raises(SettingError, match=f"{len(files)} token files are given for {workers} addresses"):
        one_for_each(files, workers)


def test_what_is_shown_is_what_is_wanted() -> None:
    assert bearer("") == bearer(None) == ()
    ((key, value),) = bearer(TOKEN)
    assert (key, value) == ("authorization", f"Bearer {TOKEN}")
    assert shows([value], TOKEN)
    assert shows([f"bearer {TOKEN}"], TOKEN)  # schemes have no case


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [""],
        [TOKEN],
        ["Bearer"],
        ["Bearer "],
        [f"Bearer  {TOKEN}"],
        [f"Bearer {TOKEN} "],
        [f"Bearer {TOKEN[:-1]}"],
        [f"Bearer {TOKEN}x"],
        [f"Bearer {TOKEN.upper()}"],
        [f"Basic {TOKEN}"],
        [f"Bearer {TOKEN}"] * 2,
        [f"Bearer {TOKEN}", "Bearer other"],
        ["Bearer \u00e9"],
    ],
)
def test_anything_else_does_not_show_it(shown: list[str]) -> None:
    assert not shows(shown, TOKEN)
