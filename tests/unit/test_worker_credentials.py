"""The file with a worker's credentials: what it may say, and what is said about its mistakes."""

from pathlib import Path

import pytest

from backhaul import SettingError
from backhaul_runtime.process.credentials import bearer, make_token, read_token
from backhaul_server.worker.accounts import Quotas
from backhaul_server.worker.credentials import Caller, Credentials, read_credentials


def written(directory: Path, text: str) -> Path:
    file = directory / "credentials.toml"
    file.write_text(text)
    return file


def shown(token: str) -> list[str]:
    return [value for _, value in bearer(token)]


def test_all_that_a_file_may_say(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [alice]
        token_files = ["a.token", "/run/secrets/b"]
        memory = "8GiB"
        inflight = "64 MiB"
        requests = 4
        sessions = 2

        [watcher]
        token_files = ["w"]
        dashboard = true
        """,
    )
    alice, watcher = read_credentials(file)
    assert alice.token_files == (tmp_path / "a.token", Path("/run/secrets/b"))
    assert alice.quotas == Quotas(8 << 30, 64 << 20, 4, 2)
    assert (alice.sees_all, watcher.sees_all) == (False, True)
    assert watcher.quotas == Quotas()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name nobody"),
        ("alice = 1", "is no table"),
        ("[alice", "can't be read: Expected"),
        ("[alice]", "needs token_files"),
        ('[alice]\ntoken_files = "a"', "needs token_files"),
        ("[alice]\ntoken_files = []", "needs token_files"),
        ('[alice]\ntoken_files = [""]', "needs token_files"),
        ('[alice]\ntoken_files = ["a"]\nmemroy = "1GiB"', 'the unknown key "memroy", did you mean memory?'),
        ('[alice]\ntoken_files = ["a"]\nzzz = 1', "allowed are token_files, memory, inflight, requests, sessions"),
        ('[alice]\ntoken_files = ["a"]\nmemory = 5', "has a wrong memory: write a size with its unit"),
        ('[alice]\ntoken_files = ["a"]\nmemory = "64"', "has no unit"),
        ('[alice]\ntoken_files = ["a"]\nrequests = 0', "has a wrong requests: write a whole number above 0"),
        ('[alice]\ntoken_files = ["a"]\nsessions = true', "has a wrong sessions"),
        ('[alice]\ntoken_files = ["a"]\nsessions = 1.5', "has a wrong sessions"),
        ('[alice]\ntoken_files = ["a"]\ndashboard = "yes"', "has a wrong dashboard"),
        ('[alice]\ntoken_files = ["none"]', "none.* can't be read"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    make_token(tmp_path / "a")
    with pytest.raises(SettingError, match=message):
        Credentials(written(tmp_path, text))


def test_a_file_that_is_missing_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"No such file.*\n\[alice\]"):
        Credentials(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(SettingError, match="can't be read"):
        Credentials(tmp_path / "binary")


def test_no_two_credentials_have_one_token(tmp_path: Path) -> None:
    make_token(tmp_path / "a")
    with pytest.raises(SettingError, match='gives "alice" and "bob" the same token') as caught:
        Credentials(written(tmp_path, '[alice]\ntoken_files = ["a"]\n[bob]\ntoken_files = ["a"]\n'))
    assert read_token(tmp_path / "a") not in str(caught.value)


def test_callers_are_known_by_their_tokens(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_token(tmp_path / name)
    file = written(tmp_path, '[alice]\ntoken_files = ["a", "b"]\nrequests = 1\n')
    credentials = Credentials(file)
    first, second = (credentials.caller(shown(read_token(tmp_path / name))) for name in ("a", "b"))
    assert isinstance(first, Caller)
    assert isinstance(second, Caller)
    assert first.account is second.account
    assert first.token != second.token
    assert credentials.caller([]) is None
    assert credentials.caller(shown("x" * 20)) is None
    assert credentials.why_denied([]) == "no token"
    assert credentials.why_denied(shown("x" * 20)) == "an unknown token"
    assert not credentials.refresh()
    # Quotas change without any token changing; a removed token is remembered as revoked.
    written(tmp_path, '[alice]\ntoken_files = ["a", "b"]\nrequests = 25\n')
    assert not credentials.refresh()
    assert first.account.quotas.requests == 25
    written(tmp_path, '[alice]\ntoken_files = ["b"]\n')
    assert credentials.refresh()
    assert not credentials.accepts(first.token)
    assert credentials.why_denied(shown(read_token(tmp_path / "a"))) == 'a revoked token of "alice"'
    # A token file whose contents are replaced is a new token.
    (tmp_path / "b").unlink()
    assert not credentials.refresh()  # what was read before stays valid
    make_token(tmp_path / "b")
    assert credentials.refresh()
    assert not credentials.accepts(second.token)
    third = credentials.caller(shown(read_token(tmp_path / "b")))
    assert third is not None
    assert third.account is first.account
