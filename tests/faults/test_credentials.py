"""Who shows a worker no token, or another than its own, is denied whatever they ask; nothing of a token is seen."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.errors import ERROR_METADATA_KEY, from_bytes
from backhaul_runtime.process.credentials import make_token, read_token
from backhaul_runtime.sealing import sealed
from backhaul_runtime.wire.splicing import serialize
from support.processes import WorkerProcess

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (session_pb2, program_pb2, tensor_pb2, segment_pb2, telemetry_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DENIED = [*METHODS, REFLECTION, "/grpc.health.v1.Health/List", "/no.such.Service/Method"]
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    make_token(path)
    return path


@pytest.fixture(scope="module")
def token(token_file: Path) -> str:
    return read_token(token_file)


@pytest.fixture(scope="module")
def guarded(token_file: Path, token: str) -> Iterator[WorkerProcess]:
    """A worker with a token, which it never says."""
    with WorkerProcess("--memory", "256MiB", "--token-file", str(token_file)) as process:
        yield process
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert token not in Path(f"/proc/{process.pid}/environ").read_text()
        logged = process.end()
    assert token not in process.line + logged


@pytest.fixture(scope="module")
def channel(guarded: WorkerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.address) as channel:
        yield channel


def shown(case: str, token: str) -> Metadata:
    """What a request shows in each case."""
    right = ("authorization", f"Bearer {token}")
    return {
        "none": (),
        "empty": (("authorization", ""),),
        "wrong": (("authorization", f"Bearer {token[::-1]}"),),
        "prefix": (("authorization", f"Bearer {token[:-1]}"),),
        "longer": (("authorization", f"Bearer {token}x"),),
        "no scheme": (("authorization", token),),
        "other scheme": (("authorization", f"Basic {token}"),),
        "twice": (right, right),
        "right and wrong": (right, ("authorization", "Bearer wrong")),
        "wrong and right": (("authorization", "Bearer wrong"), right),
        "both in one": (("authorization", f"Bearer wrong, Bearer {token}"),),
        "in another header": (("x-authorization", f"Bearer {token}"), ("token", token)),
    }[case]


CASES = ["none", "empty", "wrong", "prefix", "longer", "no scheme", "other scheme", "twice", "right and wrong"]
CASES += ["wrong and right", "both in one", "in another header"]


def asked(channel: grpc.Channel, path: str, metadata: Metadata) -> grpc.Call:
    """The end of a call as a client of its kind makes it. One that streams never comes to its first message."""
    method, ended = METHODS.get(path), threading.Event()
    is_stream, answers_stream = (True, True) if method is None else (method.client_streaming, method.server_streaming)
    kind = getattr(channel, f"{'stream' if is_stream else 'unary'}_{'stream' if answers_stream else 'unary'}")

    def never() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    try:
        multicallable: Any = kind(path)
        request = never() if is_stream else b""
        with pytest.raises(grpc.RpcError) as caught:
            answer = multicallable(request, timeout=60, metadata=metadata)
            list(answer)
    finally:
        ended.set()
    assert isinstance(caught.value, grpc.Call)
    return caught.value


def kind_of(call: Any) -> str:
    error = from_bytes(dict(call.trailing_metadata() or ()).get(ERROR_METADATA_KEY, b""))
    return "" if error is None else type(error).__name__


@pytest.mark.parametrize("path", DENIED)
def test_a_request_that_does_not_show_the_token_is_denied(
    path: str, channel: grpc.Channel, token: str, subtests: pytest.Subtests
) -> None:
    for case in CASES:
        with subtests.test(case):
            call = asked(channel, path, shown(case, token))
            assert (call.code(), kind_of(call)) == (grpc.StatusCode.UNAUTHENTICATED, "CredentialError")
            said = f"{call.details()} {call.trailing_metadata()}"
            assert said == said.replace(token, "").replace(token[:-1], "")
            assert (
                call.details()
                == "the worker wants a token, and the request shows none, or one that is wrong or revoked"
            )


@pytest.mark.slow
def test_denials_are_logged_but_not_each(token_file: Path) -> None:
    with WorkerProcess("--memory", "256MiB", "--token-file", str(token_file)) as process:
        with grpc.insecure_channel(process.address) as channel:
            for _ in range(50):
                asked(channel, REFLECTION, ())
        logged = process.end()
    assert "Denied a request from ipv4:127.0.0.1" in logged
    assert "lines like this one were left out: Denied a request" in logged
    assert len(logged.splitlines()) < 40


@pytest.mark.parametrize("path", [path for path, method in METHODS.items() if not method.client_streaming])
def test_a_request_that_shows_it_gets_to_the_service(path: str, channel: grpc.Channel, token: str) -> None:
    ask: Any = channel.unary_stream(path)
    call = ask(sealed([]), timeout=60, metadata=(("authorization", f"Bearer {token}"),))
    try:
        list(call)
    except grpc.RpcError:  # an empty request is refused as such
        assert kind_of(call) != "CredentialError"
        assert call.details() != "Method not found!"


@pytest.mark.parametrize("path", [REFLECTION, "/no.such.Service/Method"])
def test_there_is_no_reflection_for_anybody(path: str, channel: grpc.Channel, token: str) -> None:
    ask: Any = channel.stream_stream(path)
    call = ask(iter([]), timeout=60, metadata=(("authorization", f"Bearer {token}"),))
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
def test_probes_need_no_token(metadata: Metadata, channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=60, metadata=metadata).status == serving
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60, metadata=metadata)
    assert next(watch).status == serving
    watch.cancel()


def test_probes_with_long_names_are_ended(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="a" * 300)
    for call in (lambda: health.Check(request, timeout=60), lambda: next(health.Watch(request, timeout=60))):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_who_is_denied_learns_of_no_session(guarded: WorkerProcess, channel: grpc.Channel, token: str) -> None:
    request = serialize(session_pb2.KeepSessionRequest(session="guessed"))
    keep: Any = channel.unary_unary("/backhaul_proto.v1.SessionService/KeepSession")
    ask = partial(keep, request, timeout=60)
    for metadata, kind in (((), "CredentialError"), (shown("twice", token)[:1], "SessionUnknownError")):
        with pytest.raises(grpc.RpcError) as caught:
            ask(metadata=metadata)
        assert kind_of(caught.value) == kind
    assert guarded.telemetry(token).sessions == []
