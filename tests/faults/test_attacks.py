"""What a client that holds the token can do to a worker: nothing that lasts, and nothing to others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import backhaul
from backhaul import LimitError, ProgramError, SessionUnknownError, TransferError
from backhaul._worker_client.connection.grpc_errors import error_of
from backhaul_proto.v1 import segment_pb2, session_pb2, telemetry_pb2
from backhaul_server.worker.engine.stored_values import ReadProgram, is_same
from backhaul_server.worker.limits import UNNAMED_STREAMS
from conftest import QUIET, wait_until
from support.attacks import ATTACKS, reports
from support.bits import grad_of
from support.compiling_fuzz import CompilingFuzzer
from support.fuzz import Fuzzer
from support.hostile import MIB, OPTIONS, Hostile, Memory, Stalled, chain
from support.processes import WorkerProcess
from support.wire import Services

BUDGET_BYTES = 64 * MIB
MOST_BYTES = BUDGET_BYTES * 11 // 10 + 150 * MIB


def gradients(session: "backhaul.Session | None") -> list[torch.Tensor]:
    """Those of two steps of a small model, with a worker or without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        y = model(x) if session is None else session.checkpoint(model, x, returns="gradients")
        y.square().sum().backward()
    return [grad_of(parameter) for parameter in model.parameters()]


def check_honest(worker: WorkerProcess) -> None:
    """A strict session gets the gradients that it gets without a worker, bit for bit."""
    wait_until(lambda: not worker.telemetry().queued_requests, "what runs has ended")
    # Hostile sessions are not closed. What their segments name is held until their leases end.
    wait_until(lambda: worker.telemetry().memory.segment_bytes < BUDGET_BYTES // 2, "there is room for others")
    with backhaul.connect(worker.address, strict=True, settings=QUIET) as session:
        assert all(map(torch.equal, gradients(session), gradients(None)))


@pytest.fixture(scope="module")
def victim() -> Iterator[WorkerProcess]:
    """A worker with a small budget, on which nothing has run but one segment."""
    with WorkerProcess("--memory", f"{BUDGET_BYTES}B", "--lease", "20") as process:
        check_honest(process)
        yield process
        process.kill()  # a worker that is asked to end waits for what hostile sessions have not collected


def attacked(worker: WorkerProcess, attack: Callable[[Hostile, int], None], times: int) -> None:
    """Does an attack so many times over, and looks at what becomes of the worker."""
    process, memory = worker.serving(), Memory(worker)
    with Hostile(worker.address) as client:
        attack(client, times)
        assert memory.peak_bytes <= MOST_BYTES
    check_honest(worker)
    assert worker.serving() == process


LONG = {"programs", "generator_states"}
"""Attacks that take 20 seconds or more. They run with the distributed tests."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=name, marks=pytest.mark.distributed if name in LONG else ())
        for name, attack in ATTACKS.items()
    ],
)
def test_memory_stays_within_the_budget(victim: WorkerProcess, attack: Callable[[Hostile, int], None]) -> None:
    attacked(victim, attack, 1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_it_does_so_however_long_it_lasts(victim: WorkerProcess, attack: Callable[[Hostile, int], None]) -> None:
    attacked(victim, attack, 5)


def fuzz(worker: WorkerProcess, seed: int, attempts: int, kind: type[Fuzzer] = Fuzzer) -> None:
    """Makes so many attempts, each session's for a while, and looks at the worker all the time."""
    process, memory = worker.serving(), Memory(worker)
    for part in range(0, attempts, 1_000):
        with Hostile(worker.address) as client:
            fuzzer = kind(client, seed + part)
            for number in range(part, min(part + 1_000, attempts)):
                fuzzer.attempt()
                assert worker.serving() == process, f"attempt {number} ended the worker"
        assert fuzzer.accepted > 0
        assert memory.peak_bytes <= MOST_BYTES
    check_honest(worker)
    assert worker.serving() == process


@pytest.mark.slow
def test_fuzzed_requests_and_programs(victim: WorkerProcess) -> None:
    fuzz(victim, seed=0, attempts=300)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_hundred_thousand_fuzzed_requests_and_programs(victim: WorkerProcess) -> None:
    fuzz(victim, seed=1_000_000, attempts=100_000)


@pytest.mark.soak
@pytest.mark.timeout(7_200)
@pytest.mark.filterwarnings("ignore")  # of Inductor's import
def test_twenty_thousand_fuzzed_requests_to_a_worker_that_compiles() -> None:
    with WorkerProcess("--memory", "1GiB", "--lease", "20", "--compile") as worker:
        check_honest(worker)
        fuzz(worker, seed=2_000_000, attempts=20_000, kind=CompilingFuzzer)
        assert "A program was compiled" in worker.logged()
        worker.kill()


def test_a_session_names_only_what_it_has_sent_or_been_sent(victim: WorkerProcess) -> None:
    with Hostile(victim.address) as owner, Hostile(victim.address) as thief:
        program = chain("aten.sin.default", 1, 16)
        (address,) = owner.ready(program, torch.tensor([3.0, 1.0, 4.0, 1.0]))
        (answer,) = thief.ask(
            save=segment_pb2.SaveRequest(
                key=thief.key(1), program=thief.program(program), sources=[address], superseded=[address]
            )
        )
        assert list(answer.save.missing_tensors) == [address]  # as it is said of one that nobody has
        fetch = segment_pb2.FetchSourcesRequest(addresses=[address])
        assert [list(fetched.tensors.chunks) for fetched in thief.ask(fetch_sources=fetch)] == [[]]
        assert list(owner.recompute(1))[-1].tensors.chunks[0].data != b""  # what it superseded was not its own
        before = victim.telemetry().memory
        thief.ready(program, torch.tensor([3.0, 1.0, 4.0, 1.0]))
        after = victim.telemetry().memory
        assert list(thief.recompute(1)) != []
        taken = [memory.segment_bytes + memory.cached_bytes for memory in (before, after)]
        assert taken[1] - taken[0] < 10_000  # the segment itself; the tensor is shared
        for client in (owner, thief):
            request = session_pb2.CloseSessionRequest(session=client.session)
            client.sessions.CloseSession(request, timeout=60)


def test_tensors_and_programs_of_one_address_are_compared_bit_by_bit() -> None:
    x = torch.tensor([0.0, float("nan")])
    program = chain("aten.sin.default", 1, 16)
    assert is_same(x, x.clone())
    assert not is_same(x, torch.tensor([-0.0, float("nan")]))
    assert not is_same(x, x.view(1, 2))
    assert is_same(ReadProgram(program, b"1"), ReadProgram(program, b"1"))
    assert not is_same(ReadProgram(program, b"1"), ReadProgram(program, b"2"))
    assert not is_same(x, ReadProgram(program, b"1"))


def test_streams_that_name_no_session_are_bounded(victim: WorkerProcess) -> None:
    ended = threading.Event()

    def nothing() -> Iterator[Any]:
        ended.wait(60)
        yield from ()

    with ExitStack() as opened:
        calls = []
        for _ in range(3):  # of one connection gRPC takes 32
            client = opened.enter_context(Hostile(victim.address))
            calls += [client.segments.Exchange(nothing()) for _ in range(30)]
        opened.callback(ended.set)

        def refused() -> list[Any]:
            return [call for call in calls if call.done()]

        wait_until(lambda: len(refused()) == len(calls) - UNNAMED_STREAMS.most, "what is too much is refused")
        assert all(isinstance(error_of(call), LimitError) for call in refused())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "kind"),
    [([], TransferError), ([segment_pb2.Request(session="guessed")], SessionUnknownError)],
    ids=["says nothing", "tries a name"],
)
def test_a_stream_that_names_no_session_is_ended(
    requests: list[segment_pb2.Request], kind: type[backhaul.BackhaulError]
) -> None:
    ended = threading.Event()

    def said() -> Iterator[segment_pb2.Request]:
        yield from requests
        ended.wait(60)

    with WorkerProcess("--lease", "1") as worker, Hostile(worker.address) as client, ExitStack() as after:
        after.callback(ended.set)
        with pytest.raises(grpc.RpcError) as caught:
            list(client.segments.Exchange(said()))
        assert isinstance(error_of(caught.value), kind)


def test_answers_that_nobody_reads_are_bounded(victim: WorkerProcess) -> None:
    """A client that only sends is not read from for ever: what it sends would be answered in the worker's memory."""
    with Hostile(victim.address) as client:
        taken = 0

        def endless() -> Iterator[segment_pb2.Request]:
            nonlocal taken
            missing = [number.to_bytes(16, "big") for number in range(4_000)]  # each is named in the answer, too
            save = segment_pb2.SaveRequest(key=client.key(1), program=bytes(32), sources=missing)
            for taken in range(1, 4_000):  # noqa: B007  counts what gRPC has taken
                yield segment_pb2.Request(session=client.session, save=save)

        memory = Memory(victim)
        client.held.append(client.segments.Exchange(endless()))
        before = -1
        while not taken or taken != before:
            before = taken
            threading.Event().wait(2.0)
        assert 0 < taken < 1_000
        assert memory.peak_bytes < 64 * MIB
        assert victim.telemetry().epoch
    check_honest(victim)


def test_a_backward_of_a_segment_without_outputs_is_refused(victim: WorkerProcess) -> None:
    with Hostile(victim.address) as client:
        no_outputs = replace(chain("aten.sin.default", 1, 16), outputs=())
        (address,) = client.ready(no_outputs, torch.ones(4))
        with pytest.raises(ProgramError):
            client.ask(backward=client.backward(1, address))


@pytest.mark.slow
def test_telemetry_that_nobody_reads_is_bounded(victim: WorkerProcess) -> None:
    with Hostile(victim.address) as client:
        way = Stalled(victim.address)
        channel = grpc.insecure_channel(way.address, options=OPTIONS)
        client.held += [way, channel]
        services, request = Services(channel), telemetry_pb2.GetTelemetryRequest()
        before = refusals(victim, "GetTelemetry")
        services.telemetry.GetTelemetry(request, timeout=60)
        reports(client, 1)
        way.is_deaf = True
        unread = [services.telemetry.GetTelemetry.future(request) for _ in range(20)]
        wait_until(lambda: refusals(victim, "GetTelemetry") > before, "more than a few are refused")
        assert victim.telemetry().epoch  # which others are not kept from
        for call in unread:
            call.cancel()


def refusals(worker: WorkerProcess, method: str) -> int:
    return sum(rpc.errors for rpc in worker.telemetry().rpcs if rpc.method == method)
