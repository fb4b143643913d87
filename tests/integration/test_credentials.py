"""Trainers on workers that want a token: the right one, a wrong one, one that changes."""

import logging
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import backhaul
from backhaul import CredentialError, NotRemoteError, Session, SettingError
from backhaul_runtime.process.credentials import make_token, read_token
from conftest import QUIET, quiet, wait_until
from numerics.cases import blocks, stack
from support.bits import differing, grad_of, plainly, train
from support.nursery import run
from support.processes import WorkerProcess

connect = partial(backhaul.connect, settings=QUIET)


SHOWN: list[str] = []
"""Tokens of these tests."""


def new_token(path: Path) -> str:
    """Replaces what the file holds."""
    path.unlink(missing_ok=True)
    make_token(path)
    SHOWN.append(read_token(path))
    return str(path)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return new_token(tmp_path_factory.mktemp("token") / "token")


@pytest.fixture(scope="module")
def guarded(token_file: str) -> Iterator[WorkerProcess]:
    """A worker that logs all that it can, and never its token or another that somebody has shown."""
    options, all_of_it = ["--memory", "1GiB", "--token-file", token_file], {"BACKHAUL_LOG_LEVEL": "debug"}
    with WorkerProcess(*options, environment=all_of_it) as process:
        yield process
        with connect(process.address, token_file=token_file):
            pass  # so that it has logged a session, whichever of the tests this process has run
        logged = process.end()
    assert "opened a session" in logged
    assert [token for token in SHOWN if token in logged] == []


def compared(session: Session, returns: str) -> None:
    steps = partial(train, build=blocks, run=stack, steps=3)
    assert differing(steps(partial(session.checkpoint, returns=returns)), steps(plainly)) == []


def test_the_right_token_trains(returns: str, guarded: WorkerProcess, token_file: str) -> None:
    with connect(guarded.address, token_file=token_file) as session:
        compared(session, returns)
        assert session.report().remote == 6


def test_the_environment_names_the_file_too(
    guarded: WorkerProcess, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKHAUL_TOKEN_FILE", token_file)
    with connect(guarded.address) as session:
        compared(session, "auto")


def test_without_a_token_connect_says_how_to_give_one(guarded: WorkerProcess) -> None:
    with pytest.raises(CredentialError, match="wants a token: give the token file .* BACKHAUL_TOKEN_FILE") as caught:
        connect(guarded.address)
    assert vars(caught.value)["address"] == guarded.address


def test_a_wrong_token_is_named_by_its_file(guarded: WorkerProcess, tmp_path: Path) -> None:
    wrong = new_token(tmp_path / "wrong")
    with pytest.raises(CredentialError, match=f'"{guarded.address}" does not take the token in "{wrong}"'):
        connect(guarded.address, token_file=wrong)


def test_a_file_without_a_token_is_said_before_anybody_is_asked(guarded: WorkerProcess, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="can't be read: No such file"):
        connect(guarded.address, token_file=str(tmp_path / "missing"))
    with pytest.raises(SettingError, match="3 token files are given for 2 addresses"):
        connect("a:1,b:2", token_file="a,b,c")


@pytest.mark.slow
def test_a_worker_that_wants_none_takes_any(
    worker: WorkerProcess, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(worker.address, token_file=token_file) as session:
        compared(session, "auto")
    monkeypatch.setenv("BACKHAUL_TOKEN_FILE", "/no/such/file")
    with connect(settings=quiet(memory_bytes=1 << 30)) as session:  # one that connect() starts is never shown any
        compared(session, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_several_workers(is_shared: bool, guarded: WorkerProcess, token_file: str, tmp_path: Path) -> None:
    other = token_file if is_shared else new_token(tmp_path / "other")
    with WorkerProcess("--token-file", other) as second:
        files = token_file if is_shared else f"{token_file}, {other}"
        with connect(f"{guarded.address},{second.address}", token_file=files) as session:
            compared(session, "auto")
        if not is_shared:
            with pytest.raises(CredentialError, match=f'"{guarded.address}" does not take the token in "{other}"'):
                connect(f"{guarded.address},{second.address}", token_file=f"{other},{token_file}")


@pytest.mark.slow
def test_a_worker_that_comes_back_with_another_token_fails_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/b.sock"
    ours, theirs = new_token(tmp_path / "ours"), new_token(tmp_path / "theirs")
    with WorkerProcess("--token-file", ours, listen=address) as first:
        session = connect(address, token_file=ours)
        connection, linear, x = session._workers[0].connection, nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        y = session.checkpoint(linear, x)
        first.kill()
    with session, WorkerProcess("--token-file", theirs, listen=address):
        wait_until(lambda: "does not take the token" in connection.why_down, "the link says why")
        y.sum().backward()
        assert torch.equal(grad_of(x), torch.autograd.grad(linear(x).sum(), x)[0])
        compared(session, "auto")
        report = session.report()
        assert (report.remote, report.fallbacks) == (0, 7)
        with pytest.raises(NotRemoteError, match=f'does not take the token in "{ours}"'):
            session.checkpoint(linear, x, strict=True)
        assert len([r for r in caplog.records if "does not take the token" in r.getMessage()]) == 1

        Path(ours).write_text(Path(theirs).read_text())
        wait_until(lambda: connection.up is not None, "the file is read again")
        compared(session, "auto")
        assert session.report().remote == 6


def test_a_token_is_nowhere_to_be_seen(
    guarded: WorkerProcess, token_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, wrong = read_token(token_file), new_token(tmp_path / "wrong")
    with caplog.at_level(logging.DEBUG):
        with connect(guarded.address, token_file=token_file) as session:
            compared(session, "gradients")
            connection = session._workers[0].connection
            assert connection.up is not None
            shown = [
                session,
                session.config,
                session.report(),
                connection,
                connection.stubs(connection.up).segments.Exchange,
            ]
            seen = "".join(f"{thing!r}{thing}" for thing in shown)
            with pytest.raises(CredentialError) as caught:
                connect(guarded.address, token_file=wrong)
        seen += "".join(traceback.format_exception(caught.value)) + f"{caught.value.fields}{caught.value!r}"
        seen += caught.value.to_bytes().decode(errors="replace") + f"{guarded.telemetry(token)}{guarded.reports(token)}"
    seen += "".join(record.getMessage() for record in caplog.records)
    assert "GetTelemetry" in seen or "OpenSession" in seen
    assert [secret for secret in (token, read_token(wrong)) if secret in seen] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker", "dashboard"])
def test_beyond_this_machine_nobody_serves_without_one(name: str, token_file: str) -> None:
    def said(*options: str) -> str:
        more = ["--worker", "127.0.0.1:1"] if name == "dashboard" else []
        process = run(name, *more, "--listen", "192.0.2.1:0", *options)
        assert process.returncode == 2
        return process.stderr

    without = said()
    assert '"192.0.2.1:0" can be reached from other machines' in without
    assert "Make a token with `backhaul token FILE` and start with --token-file FILE" in without
    # An address that no machine has: it got that far.
    assert "can't listen on" in said("--token-file", token_file, *(["--plaintext"] if name == "worker" else []))
    if name == "worker":
        assert "accept that with --plaintext" in said("--token-file", token_file)
        assert "exclude each other" in said("--token-file", token_file, "--credentials", token_file)
    assert "can't be read" in said("--token-file", "/no/such/file")
