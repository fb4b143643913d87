"""Attempts to make a worker hang, die or keep memory, by a client that holds the token.

Each of `ATTACKS` takes a number of repetitions. Most stay just within a worker's limits, since a request beyond them is
refused at once. What the worker answers does not matter: `tests/faults/test_attacks.py` looks at the worker itself.
"""

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import grpc
import torch

from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory
from backhaul_proto.v1 import (
    program_pb2,
    segment_pb2,
    telemetry_pb2,
    tensor_pb2,
)
from backhaul_runtime.errors import BackhaulError
from backhaul_runtime.program.program import Node, Program, RecordedChoice, SourceRef
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES, MAX_NAME
from backhaul_runtime.wire.region_offers import SharedMemoryRequest
from backhaul_runtime.wire.splicing import field_of
from support.hostile import MIB, OPTIONS, REFUSED, TIMEOUT_S, Hostile, Stalled, chain, of_nodes, seal
from support.wire import Asked, Services


def _ignoring_number(attempt: Callable[[], object], _: int) -> None:
    attempt()


def over_and_over(times: int, attempt: Callable[[int], object]) -> None:
    """Makes so many attempts; what is refused is nothing new. Fails if the worker is gone."""
    for number in range(times):
        try:
            attempt(number)
        except REFUSED as error:
            if isinstance(error, BackhaulError):
                continue
            assert error.code() is not grpc.StatusCode.UNAVAILABLE, f"after {number}: {error.details()}"


def names(client: Hostile, times: int) -> None:
    """Segments with the longest names."""
    (address,) = client.ready(chain("aten.sin.default", 1, 16), torch.ones(4))
    program = client.program(chain("aten.sin.default", 1, 16))
    over_and_over(100 * times, lambda n: client.save(n + 2, program, [address], name="\U0001f600" * MAX_NAME))


def generator_states(client: Hostile, times: int) -> None:
    """Segments with as many states as fit a message."""
    draws = (MAX_MESSAGE_BYTES - (64 << 10)) // (16 << 10)
    node = Node("aten.rand_like.default", (SourceRef(0),), (), 0, (16,), draws=True)
    program = client.program(of_nodes(*[node] * draws))
    (address,) = client.put(torch.ones(4))
    states = [os.urandom(16 << 10)] * draws
    over_and_over(10 * times, lambda n: client.save(n, program, [address], generator_states=states))


def programs(client: Hostile, times: int) -> None:
    """Programs that take far more memory than their bytes, each held by a segment."""
    addresses = client.put(torch.ones(4))
    source, sine = SourceRef(0), "aten.sin.default"

    def shapes(number: int) -> Iterator[Program]:
        """All different in every round."""
        yield of_nodes(*[Node(sine, (source,), (), 0, (number,), draws=False)] * 40_000)
        given = (RecordedChoice(0, number),) * 40_000
        yield of_nodes(*[Node(sine, (source,), (), 0, (16,), False, False, given)] * 10)
        yield of_nodes(Node(sine, (source,), (), 0, tuple(range(300, 300 + number + 1_000_000)), draws=False))
        text = (("rounding_mode", chr(97 + number % 26) * (MAX_MESSAGE_BYTES // 2 + number)),)
        yield of_nodes(Node("aten.div.Tensor_mode", (source, source), text, 0, (16,), draws=False))
        shape = tuple(range(1, 300_000 + number))
        yield of_nodes(Node("aten.view.default", (source, shape), (), 0, (16,), draws=False))

    def attempt(number: int) -> None:
        for index, program in enumerate(shapes(number)):
            with contextlib.suppress(*REFUSED):
                client.save(10 * number + index, client.program(program), addresses)

    over_and_over(times, attempt)
    empty = program_pb2.Program(format=1).SerializeToString() + b"\x22\x00" * 8_192
    over_and_over(times, lambda n: client.program(empty + b"\x40" + bytes([n % 100 + 1])))


def sessions(client: Hostile, times: int) -> None:
    """Sessions with the longest names."""
    over_and_over(200 * times, lambda _: client.open("\U0001f600" * MAX_NAME))


def undeclared_results(client: Hostile, times: int) -> None:
    """Ops whose results, or temporary memory, take far more than their programs say."""
    x = torch.ones(1 << 14)
    (address,) = client.put(x)
    source = SourceRef(0)
    nodes = (
        Node("aten.repeat.default", (source, (1 << 16,)), (), 0, (16,), draws=False),
        Node("aten.tile.default", (source, (1 << 12, 64)), (), 0, (16,), draws=False),
        Node("aten.outer.default", (source, source), (), 0, (16,), draws=False),
        Node("aten.cdist.default", (source, source), (), 0, (16,), draws=False),
    )

    def attempt(number: int) -> None:
        client.save(number, client.program(of_nodes(nodes[number % len(nodes)])), [address])
        list(client.recompute(number))

    over_and_over(len(nodes) * times, attempt)


def small_tensors(client: Hostile, times: int) -> None:
    """Tensors of one element, of none, and with gaps."""
    count = itertools.count(1)

    def attempt(_: int) -> None:
        client.put(*(torch.tensor(float(next(count))) for _ in range(500)))
        client.put(*(torch.empty(0, next(count)) for _ in range(100)))
        client.put(torch.empty(4 * MIB).as_strided((2, next(count) % 7 + 1), (2 * MIB, 1)))

    over_and_over(4 * times, attempt)


def long_replays(client: Hostile, times: int) -> None:
    """Replays of many nodes, that hold next to nothing but the nodes."""
    program = client.program(chain("aten.sin.default", 5_000, 4))

    def attempt(number: int) -> None:
        client.save(number, program, client.put(torch.full((1,), float(number))))
        list(client.recompute(number, positions=range(0, 5_000, 2)))

    over_and_over(3 * times, attempt)


def results(client: Hostile, times: int) -> None:
    """Results with long lists, of many segments."""
    (address,) = client.put(torch.ones(4))
    program, short = (client.program(chain("aten.sin.default", length, 16)) for length in (500, 5))

    def attempt(number: int) -> None:
        client.save(number, program, [address])
        list(client.recompute(number, positions=range(500)))
        client.save(-number & 0xFFFF, short, [address], wants_projections=True)
        list(client.recompute(-number & 0xFFFF, positions=range(5)))

    over_and_over(5 * times, attempt)


def abandoned_requests(client: Hostile, times: int) -> None:
    """Requests that nobody waits for."""
    client.ready(chain("aten.sin.default", 2_000, 16), torch.ones(4))

    def attempt(number: int) -> None:
        call = client.recompute(1, number + 1, range(2_000), expected_s=float("nan"))
        next(call)
        call.cancel()

    over_and_over(30 * times, attempt)


def reports(client: Hostile, times: int) -> None:
    """Reports of as many empty things as may be in one, and of as many as fit one."""
    head = telemetry_pb2.PutReportsRequest(session=client.session).SerializeToString()
    put: Any = client.channel.unary_unary("/backhaul_proto.v1.TelemetryService/PutReports", seal)
    for empty in (b"\x12\x00" * 1_024 + b"\x1a\x00" * 1_024, b"\x12\x00" * 250_000, field_of(3, b"\x4a\x00" * 200_000)):
        report = head + field_of(2, empty)
        over_and_over(20 * times, partial(_ignoring_number, partial(put, report, timeout=TIMEOUT_S)))


def long_lists(client: Hostile, times: int) -> None:
    """Every list of every request, as long as it may be, and as long as fits the message."""
    (address,) = client.ready(chain("aten.sin.default", 1, 16), torch.ones(4))
    program, many = client.program(chain("aten.sin.default", 1, 16)), [os.urandom(16) for _ in range(8_192)]
    zeros = [0] * 8_192
    attempts: list[Callable[[], object]] = [
        lambda: client.save(2, program, [address], superseded=many),
        lambda: client.save(2, program, many),
        lambda: client.save(2, program, [address], transient_sources=zeros),
        lambda: client.save(
            2, program, [address], predecessors=[segment_pb2.Predecessor(segment=n) for n in range(8_192)]
        ),
        lambda: list(client.recompute(1, positions=range(8_192))),
        lambda: list(client.recompute(1, upcoming_segments=[1] * 64)),
        lambda: client.ask(backward=client.backward(1, address, slots=[segment_pb2.Slot()] * 8_192)),
        lambda: client.ask(release=segment_pb2.ReleaseRequest(keys=[client.key(9)] * 1_024)),
        lambda: client.ask(
            release=segment_pb2.ReleaseRequest(commits=segment_pb2.Commits(first=1, backwards=[client.key(9)] * 4_096))
        ),
        lambda: client.ask(fetch_sources=segment_pb2.FetchSourcesRequest(addresses=[*many[:255], address])),
    ]
    head = tensor_pb2.PutTensorsRequest(session=client.session).SerializeToString()
    declared = tensor_pb2.TensorDeclaration(
        spec=tensor_pb2.TensorSpec(dtype="float32", shape=[0], strides=[1], device="cpu")
    ).SerializeToString()
    put: Any = client.channel.stream_unary("/backhaul_proto.v1.TensorService/PutTensors", seal)

    def read_all(call: Any, request: bytes) -> None:
        list(call(request, timeout=TIMEOUT_S))

    def put_all(requests: list[bytes]) -> None:
        put(iter(requests), timeout=TIMEOUT_S)

    attempts += [
        partial(put_all, [head + field_of(2, batch)])
        for batch in (
            b"\x0a\x00" * 500_000,
            b"\x12\x00" * 500_000,
            field_of(1, declared) * 1_024,
            field_of(1, declared) + b"\x12\x00" * 2_000,
        )
    ]
    named = segment_pb2.Request(session=client.session).SerializeToString()
    call: Any = client.channel.unary_stream("/backhaul_proto.v1.SegmentService/Exchange", seal)
    for number, first in (
        (segment_pb2.Request.SAVE_FIELD_NUMBER, segment_pb2.SaveRequest(key=client.key(3))),
        (segment_pb2.Request.BACKWARD_FIELD_NUMBER, client.backward(1, address)),
        (segment_pb2.Request.RELEASE_FIELD_NUMBER, segment_pb2.ReleaseRequest()),
    ):
        encoded = first.SerializeToString()
        for tag in (b"\x0a\x00", b"\x42\x00", b"\x5a\x00", b"\x3a\x00", b"\x12\x00"):
            for size in (MIB, 2 * MIB - 1_000, 4 * MIB - 1_000):
                data = encoded + tag * ((size - len(encoded)) // 2)
                attempts.append(partial(read_all, call, named + field_of(number, data)))
    over_and_over(len(attempts) * times, lambda n: attempts[n % len(attempts)]())


def open_streams(client: Hostile, times: int) -> None:
    """Streams that are opened and left so."""
    open_ended = threading.Event()

    def silent(*first: Any) -> Iterator[Any]:
        yield from first
        open_ended.wait(TIMEOUT_S)

    for _ in range(20 * times):
        for more in ({}, {"pushes_taken": 0}, {"backward": client.backward(1, b"")}):
            request = segment_pb2.Request(session=client.session, **more)
            client.held.append(client.segments.Exchange(silent(request)))
        client.held.append(
            client.tensors.PutTensors.future(silent(tensor_pb2.PutTensorsRequest(session=client.session)))
        )
    time.sleep(0.5)
    open_ended.set()


def unread_answers(client: Hostile, times: int) -> None:
    """Answers with tensors and with telemetry that nobody reads."""
    reports(client, 1)
    x = torch.randn(MIB // 2)
    (address,) = client.ready(chain("aten.tanh.default", 1, x.nbytes), x)
    program = client.program(chain("aten.tanh.default", 1, x.nbytes))
    for _ in range(times):
        way = Stalled(client.address)
        channel = grpc.insecure_channel(way.address, options=OPTIONS)
        client.held += [way, channel]
        services = Services(channel)
        segments, telemetry = services.segments, services.telemetry
        with contextlib.suppress(*REFUSED):
            telemetry.GetTelemetry(telemetry_pb2.GetTelemetryRequest(), timeout=TIMEOUT_S)
        way.is_deaf = True
        for number in range(50):
            with contextlib.suppress(*REFUSED):
                client.save(number, program, [address])
            request = segment_pb2.RecomputeRequest(key=client.key(number, 1), positions=[0])
            client.held.append(Asked(segments, client.session, recompute=request))
            fetching = segment_pb2.FetchSourcesRequest(addresses=[address])
            client.held.append(Asked(segments, client.session, fetch_sources=fetching))
            client.held.append(telemetry.GetTelemetry.future(telemetry_pb2.GetTelemetryRequest()))
    time.sleep(1.0)


def half_messages(client: Hostile, times: int) -> None:
    """Large messages of which the end does not come."""
    way = Stalled(client.address)
    channel = grpc.insecure_channel(way.address, options=OPTIONS)
    client.held += [way, channel]
    put: Any = channel.unary_unary("/backhaul_proto.v1.ProgramService/PutProgram", seal)
    data = field_of(2, bytes(MAX_MESSAGE_BYTES - 100))
    count = 8 * times
    way.left_bytes = 0.97 * count * len(data)
    client.held += [put.future(data) for _ in range(count)]
    time.sleep(2.0)


def shared_memory(client: Hostile, times: int) -> None:
    """Regions, connections that name nobody, and answers that are never ended."""
    if not client.opened.memory_path:
        return
    for _ in range(4 * times):
        with contextlib.suppress(*REFUSED):
            opened = client.open("shared")
            memory = TrainerSharedMemory(opened.memory_path, opened.session)
            client.held.append(memory)
            memory._ask_for(60 * MIB)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(0.5)
    client.held.append(peer)
    peer.connect(client.opened.memory_path)
    peer.send(client.session.encode())
    with contextlib.suppress(OSError):
        for number in range(500 * times):
            peer.send(SharedMemoryRequest.ROOM.message(1 << 40))
            peer.send(SharedMemoryRequest.MORE.message((1 << 64) - 1 - number))
    for _ in range(50 * times):
        with contextlib.suppress(OSError):
            unnamed = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            unnamed.settimeout(0.2)
            client.held.append(unnamed)
            unnamed.connect(client.opened.memory_path)
    over_and_over(
        100 * times,
        lambda n: client.ask(fetch_sources=segment_pb2.FetchSourcesRequest(), answer=n + 1),
    )


def sums(client: Hostile, times: int) -> None:
    """Gradients of one element that stay, each under a name of its own."""
    _, gradient = client.put(torch.ones(1), torch.full((1,), 2.0))
    client.ready(chain("aten.sin.default", 1, 4), torch.ones(1))

    def attempt(number: int) -> None:
        slots = [segment_pb2.Slot(source=0, slot=number)]
        request = client.backward(1, gradient, number + 1, slots=slots, pass_number=number)
        client.ask(backward=request)
        if number % 2:
            commits = segment_pb2.Commits(round=1, first=number // 2 + 1, backwards=[client.key(1, number + 1)])
            client.ask(release=segment_pb2.ReleaseRequest(commits=commits))

    over_and_over(50 * times, attempt)


def connections(client: Hostile, times: int) -> None:
    """Connections that say nothing, and that say only that they speak HTTP/2."""
    host, _, port = client.address.rpartition(":")
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
    for said in (b"", hello[:10], hello):
        for _ in range(50 * times):
            with contextlib.suppress(OSError):
                peer = socket.create_connection((host, int(port)), timeout=2)
                client.held.append(peer)
                peer.sendall(said)


def kinds(client: Hostile, times: int) -> None:
    """Segments of which no two are alike: what is remembered of each kind is remembered of many."""
    sources = 500
    program = client.program(
        of_nodes(Node("aten.sin.default", (SourceRef(0),), (), 0, (4,), draws=False), sources=sources)
    )
    sizes = client.put(*(torch.zeros(size) for size in range(1, 51)))

    def attempt(number: int) -> None:
        named = [sizes[0], *(sizes[(number * 7 + index * (number + 1)) % 50] for index in range(sources - 1))]
        client.save(number, program, named)
        client.ask(release=segment_pb2.ReleaseRequest(keys=[client.key(number)]))

    over_and_over(50 * times, attempt)


def settings(client: Hostile, times: int) -> None:
    """Ambient settings that torch takes without a look."""
    _, gradient = client.put(torch.ones(4), torch.full((4,), 2.0))
    client.ready(chain("aten.sin.default", 1, 16), torch.ones(4))
    texts = ["0,0,0,0,0", ",".join("0" * 20), "0," * 1_000, "", "4,3,2,1,0", "9", "\x00"]

    def attempt(number: int) -> None:
        request = client.backward(1, gradient, number + 1)
        names = "sdp_priority", "default_dtype", "mkldnn_matmul_precision"
        name, text = names[number % len(names)], texts[number % len(texts)]
        request.start.ambient_state.settings[name].text = text
        client.ask(backward=request)

    over_and_over(len(texts) * times, attempt)


ATTACKS: Mapping[str, Callable[[Hostile, int], None]] = {
    attack.__name__: attack
    for attack in (
        names,
        generator_states,
        programs,
        undeclared_results,
        sessions,
        small_tensors,
        long_replays,
        results,
        abandoned_requests,
        reports,
        long_lists,
        open_streams,
        unread_answers,
        half_messages,
        shared_memory,
        sums,
        connections,
        kinds,
        settings,
    )
}
