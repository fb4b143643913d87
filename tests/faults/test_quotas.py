"""A worker with several credentials: whose session is whose, what each may use, and tokens that come and go."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import backhaul
from backhaul import BackhaulError
from backhaul_proto.v1 import session_pb2
from backhaul_runtime.errors import ERROR_METADATA_KEY, from_bytes
from backhaul_runtime.process.credentials import bearer, make_token, read_token
from backhaul_runtime.wire.protocol import PROTOCOL_VERSION
from backhaul_runtime.wire.splicing import serialize
from conftest import QUIET, quiet, wait_until
from numerics.cases import blocks, stack
from support.bits import differing, plainly, train
from support.processes import WorkerProcess
from support.wire import METHODS, Services, refusal

OF_SESSIONS = [method for method in METHODS if method.name not in {"OpenSession", "GetTelemetry"}]


class Shared:
    """A worker that several people use.

    Args:
        directory: An empty directory.
        quotas: The quotas of each credential, as TOML.
    """

    def __init__(self, directory: Path, **quotas: str) -> None:
        self.directory, self.file = directory, directory / "credentials.toml"
        for name in quotas:
            make_token(directory / f"{name}.token")
        self.write(**quotas)
        audit = directory / "audit.jsonl"
        self.process = WorkerProcess("--memory", "512MiB", "--credentials", str(self.file), "--audit-log", str(audit))

    def write(self, **quotas: str) -> None:
        """Replaces the credentials."""
        tables = (f'[{name}]\ntoken_files = ["{name}.token"]\n{lines}\n' for name, lines in quotas.items())
        self.file.write_text("\n".join(tables))

    def token(self, name: str) -> str:
        return read_token(self.directory / f"{name}.token")

    def token_file(self, name: str) -> str:
        return str(self.directory / f"{name}.token")

    def audited(self, event: str) -> list[dict[str, Any]]:
        """What the audit log has about a kind of event."""
        lines = map(json.loads, (self.directory / "audit.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    worker = Shared(tmp_path_factory.mktemp("shared"), alice="", bob="sessions = 2", watcher="dashboard = true")
    with worker.process:
        yield worker


@pytest.fixture(scope="module")
def channel(shared: Shared) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared.process.address) as channel:
        yield channel


def opened(channel: grpc.Channel, token: str, trainer: str = "trainer") -> str:
    """Opens a session. Returns its id."""
    request = session_pb2.OpenSessionRequest(
        protocol_version=PROTOCOL_VERSION, trainer=trainer, run=f"run of {trainer}"
    )
    answer = Services(channel).sessions.OpenSession(request, timeout=60, metadata=bearer(token))
    return str(answer.session)


def naming(message: Message, session: str) -> Message:
    """Lets a request name a session wherever it can."""
    for field in message.DESCRIPTOR.fields:
        if field.name == "session":
            setattr(message, field.name, session)
        elif field.message_type is not None and field.name in {"key", "keys", "commits", "backwards"}:
            value = getattr(message, field.name)
            naming(value.add() if field.is_repeated else value, session)
    return message


def error_of(channel: grpc.Channel, method: Any, token: str, session: str) -> BackhaulError | None:
    """The error with which a call ends that names a session; None if it succeeds."""
    request = serialize(naming(GetMessageClass(method.input_type)(), session))
    call: Any = refusal(channel, method, token, request)
    return None if call is None else from_bytes(dict(call.trailing_metadata() or ()).get(ERROR_METADATA_KEY, b""))


@pytest.mark.parametrize("method", OF_SESSIONS, ids=lambda method: method.name)
def test_no_method_takes_the_session_of_another_credential(method: Any, shared: Shared, channel: grpc.Channel) -> None:
    session, before = opened(channel, shared.token("alice")), len(shared.audited("request denied"))
    error = error_of(channel, method, shared.token("bob"), session)
    assert isinstance(error, backhaul.CredentialError)
    assert error.message == "the session was opened with another credential than the one that the request shows"
    # The session is what it was, and its owner still has it.
    (telemetry,) = [s for s in shared.process.telemetry(shared.token("alice")).sessions if s.trainer == "trainer"]
    assert telemetry.last_error == ""
    keep = session_pb2.DESCRIPTOR.services_by_name["SessionService"].methods_by_name
    assert error_of(channel, keep["KeepSession"], shared.token("alice"), session) is None
    assert error_of(channel, keep["CloseSession"], shared.token("alice"), session) is None
    denials = shared.audited("request denied")[before:]
    assert [(line["credential"], "another credential" in line["why"]) for line in denials] in ([("bob", True)], [])
    assert shared.audited("request denied")[0]["credential"] == "bob"


def test_nobody_sees_the_sessions_of_others_but_a_dashboard(shared: Shared, channel: grpc.Channel) -> None:
    sessions = {name: opened(channel, shared.token(name), name) for name in ("alice", "bob")}
    steps = partial(train, build=blocks, run=stack, steps=2)
    for name in sessions:
        with backhaul.connect(shared.process.address, token_file=shared.token_file(name), settings=QUIET) as session:
            assert differing(steps(session.checkpoint), steps(plainly)) == []
            assert session.report().fallbacks == 0
            runs = {s.run for s in shared.process.telemetry(shared.token(name)).sessions}
            assert session.run in runs
            others = {"alice", "bob"} - {name}
            assert not others & {s.trainer for s in shared.process.telemetry(shared.token(name)).sessions}
            assert {"alice", "bob"} <= {s.trainer for s in shared.process.telemetry(shared.token("watcher")).sessions}
    reports = {name: shared.process.reports(shared.token(name)) for name in ("alice", "bob", "watcher")}
    assert len(reports["watcher"]) == len(reports["alice"]) + len(reports["bob"])
    assert min(len(part) for part in reports.values()) > 0
    for name, opened_session in sessions.items():
        close = session_pb2.DESCRIPTOR.services_by_name["SessionService"].methods_by_name["CloseSession"]
        assert error_of(channel, close, shared.token(name), opened_session) is None


def test_a_quota_of_sessions(shared: Shared, channel: grpc.Channel) -> None:
    ids = [opened(channel, shared.token("bob")) for _ in range(2)]
    with pytest.raises(grpc.RpcError, match='the credential "bob" may have 2 sessions'):
        opened(channel, shared.token("bob"))
    alice = opened(channel, shared.token("alice"))
    close = session_pb2.DESCRIPTOR.services_by_name["SessionService"].methods_by_name["CloseSession"]
    for session in ids:
        assert error_of(channel, close, shared.token("bob"), session) is None
    assert error_of(channel, close, shared.token("bob"), opened(channel, shared.token("bob"))) is None
    assert error_of(channel, close, shared.token("alice"), alice) is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["address", "file"])
def test_a_trainer_without_room_for_its_session_computes_itself(
    source: str, shared: Shared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = shared.process.address
    if source == "file":
        (tmp_path / "workers").write_text(f"{address}\n")
        address = f"file:{tmp_path / 'workers'}"
    connect = partial(
        backhaul.connect,
        address,
        token_file=shared.token_file("bob"),
        settings=quiet(connect_timeout_s=1000.0),
    )
    steps = partial(train, build=blocks, run=stack, steps=1)
    expected = steps(plainly)
    full = 'has no room for another session: the credential "bob" may have 2 sessions on this worker at once'
    with connect(), connect() as second:
        with pytest.raises(backhaul.LimitError, match=full) as error:
            connect(strict=True)
        assert (error.value.most, error.value.found) == (2, 3)
        with pytest.warns(backhaul.NotRemoteWarning, match=full), connect() as third:
            assert differing(steps(third.checkpoint), expected) == []
            assert third.report().remote == 0
            second.close()
            wait_until(lambda: third._workers[0].up is not None, "the worker has room for the session")
            assert differing(steps(third.checkpoint), expected) == []
            assert third.report().remote > 0


def test_the_log_names_who_opened_a_session_and_no_token(shared: Shared, channel: grpc.Channel) -> None:
    session = opened(channel, shared.token("alice"), "somebody:1")
    line = shared.audited("session opened")[-1]
    assert (line["credential"], line["trainer"], line["run"]) == ("alice", "somebody:1", "run of somebody:1")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["session"] == session[:8]
    text = (shared.directory / "audit.jsonl").read_text() + shared.process.logged()
    assert [name for name in ("alice", "bob", "watcher") if shared.token(name) in text] == []
    assert (shared.directory / "audit.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quotas", "reason"),
    [
        ('memory = "20KiB"', 'the credential "alice" may keep 20480 bytes'),
        ('inflight = "1KiB"', 'the credential "alice" may have in flight 1024 bytes'),
    ],
)
def test_a_trainer_beyond_a_quota_computes_itself(quotas: str, reason: str, tmp_path: Path) -> None:
    steps = partial(train, build=blocks, run=stack, steps=3)
    worker = Shared(tmp_path, alice=quotas)
    with (
        worker.process,
        backhaul.connect(worker.process.address, token_file=worker.token_file("alice"), settings=QUIET) as session,
    ):
        assert differing(steps(session.checkpoint), steps(plainly)) == []
        report = session.report()
        assert report.fallbacks > 0
        assert reason in str(report)


@pytest.mark.slow
def test_tokens_are_replaced_and_revoked_by_editing_files(tmp_path: Path) -> None:
    worker = Shared(tmp_path, alice="", bob="")
    steps = partial(train, build=blocks, run=stack, steps=2)
    expected = steps(plainly)
    ours = tmp_path / "ours"
    ours.write_text(worker.token("alice"))
    with (
        worker.process,
        backhaul.connect(worker.process.address, token_file=str(ours), settings=QUIET) as session,
    ):
        connection = session._workers[0].connection
        first = connection.up
        assert differing(steps(session.checkpoint), expected) == []
        # A second token is accepted beside the first. A mistake in the file changes nothing.
        make_token(tmp_path / "new.token")
        both = '[alice]\ntoken_files = ["alice.token", "new.token"]\n[bob]\ntoken_files = ["bob.token"]\n'
        worker.file.write_text(both + "memory = 5\n")
        wait_until(lambda: "what was read before stays valid" in worker.process.logged(), "the mistake is noticed")
        worker.file.write_text(both)
        wait_until(lambda: worker.audited("credentials changed") != [], "the file is read")
        assert connection.up is first
        assert worker.process.telemetry(read_token(tmp_path / "new.token")).sessions != []
        # The first one is revoked: its session ends, and nobody is let in with it.
        before = session.report().remote
        worker.write(bob="")
        worker.file.write_text(both.replace('"alice.token", ', ""))
        wait_until(lambda: connection.up is None, "the trainer is denied")
        assert worker.audited("credentials changed")[-1]["closed_sessions"] == 1
        assert differing(steps(session.checkpoint), expected) == []
        assert session.report().remote == before
        with grpc.insecure_channel(worker.process.address) as channel:
            for method in METHODS:
                error = error_of(channel, method, worker.token("alice"), "any")
                assert isinstance(error, backhaul.CredentialError)
                assert "wrong or revoked" in error.message
        assert worker.audited("request denied")[-1]["why"] == 'it shows a revoked token of "alice"'
        # The trainer's file gets the new one.
        ours.write_text(read_token(tmp_path / "new.token"))
        wait_until(lambda: connection.up is not None, "the trainer reads its file again")
        assert differing(steps(session.checkpoint), expected) == []
        assert session.report().remote > before
