"""Hostile or damaged messages to a real worker, and trainers that use more than their share."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

import backhaul
from backhaul import BudgetError, ProgramError, SegmentUnknownError, SessionUnknownError, TransferError, WorkerLostError
from backhaul._worker_client.answers.answer_stream import AnswerStream, Messages
from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.grpc_errors import error_of
from backhaul._worker_client.connection.stubs import Stubs
from backhaul_proto.v1 import (
    program_pb2,
    segment_pb2,
    session_pb2,
    tensor_pb2,
)
from backhaul_runtime.errors import from_bytes
from backhaul_runtime.program.codec import encode_state
from backhaul_runtime.program.program import Node, Program, SourceRef
from backhaul_runtime.tensors.digest import address_of, content_digest, saved_digest
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire import tensor_batches
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from conftest import QUIET, QUIET_S, wait_until
from support.bits import grad_of
from support.hostile import Hostile, chain, of_nodes
from support.processes import WorkerProcess
from support.proxy import SlowProxy
from support.wire import METHODS, Asked, plain


class Wire(Hostile):
    """A client of a worker that sends what a trainer never would, and ends its session."""

    def end_session(self) -> None:
        self.sessions.CloseSession(session_pb2.CloseSessionRequest(session=self.session), timeout=60)

    def close(self) -> None:
        self.end_session()
        self.channel.close()

    def send(self, *messages: tensor_pb2.TensorBatch, session: str | None = None) -> tensor_pb2.PutTensorsResponse:
        named = self.session if session is None else session
        return self.tensors.PutTensors(
            iter([tensor_pb2.PutTensorsRequest(session=named, tensors=message) for message in messages]), timeout=60
        )

    def saved(self, number: int, program: Program, x: torch.Tensor) -> segment_pb2.OperationKey:
        """Saves a segment with one source that requires a gradient. Returns the key of its first backward."""
        self.last_program = self.program(program)
        request = segment_pb2.SaveRequest(key=self.key(number, 1), program=self.last_program, sources=self.put(x))
        (answer,) = self.ask(save=request)
        assert answer.save == segment_pb2.SaveResult()
        return request.key


@pytest.fixture
def wire(worker: WorkerProcess) -> Iterator[Wire]:
    wire = Wire(worker.address)
    yield wire
    wire.close()


def refused(call: Callable[..., object], *args: Any, **kwargs: Any) -> backhaul.BackhaulError:
    with pytest.raises((grpc.RpcError, backhaul.BackhaulError)) as caught:
        call(*args, **kwargs)
    return (
        error_of(caught.value)
        if isinstance(caught.value, grpc.RpcError)
        else cast(backhaul.BackhaulError, caught.value)
    )


def outgoing(tensor: torch.Tensor) -> OutgoingTensor:
    return OutgoingTensor(tensor, layout_of(tensor), address_of(tensor))


def batches(outgoing_tensors: Iterable[OutgoingTensor]) -> Iterator[tensor_pb2.TensorBatch]:
    return map(plain, tensor_batches.batches(outgoing_tensors))


def test_a_flipped_bit_is_caught_and_nothing_of_it_is_kept(wire: Wire, worker: WorkerProcess) -> None:
    before = worker.telemetry().memory.cached_bytes
    (batch,) = batches([outgoing(torch.randn(100))])
    for position in range(0, 400, 7):
        damaged = tensor_pb2.TensorBatch.FromString(batch.SerializeToString())
        data = bytearray(damaged.chunks[0].data)
        data[position] ^= 1 << position % 8
        damaged.chunks[0].data = bytes(data)
        assert isinstance(refused(wire.send, damaged), TransferError)
    assert worker.telemetry().memory.cached_bytes == before


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_request_without_a_checksum_is_refused_by_name(method: MethodDescriptor, wire: Wire) -> None:
    kind = (False, False), (False, True), (True, False), (True, True)
    make = dict(zip(kind, ("unary_unary", "unary_stream", "stream_unary", "stream_stream"), strict=True))
    call = getattr(wire.channel, make[method.client_streaming, method.server_streaming])(
        f"/{method.containing_service.full_name}/{method.name}"
    )
    data = GetMessageClass(method.input_type)().SerializeToString()

    def answers() -> list[bytes]:
        answer = call(iter([data]) if method.client_streaming else data, timeout=60)
        return list(answer) if method.server_streaming else [answer]

    error = refused(answers)
    assert isinstance(error, TransferError)
    assert "do not fit its checksum: it was damaged on the way" in error.message


def test_contents_under_another_address_are_refused(wire: Wire) -> None:
    (batch,) = batches([OutgoingTensor(torch.ones(4), layout_of(torch.ones(4)), bytes(16))])
    assert isinstance(refused(wire.send, batch), TransferError)


def test_a_stream_that_ends_early_leaves_nothing(wire: Wire, worker: WorkerProcess) -> None:
    before = worker.telemetry().memory.cached_bytes
    messages = list(batches([outgoing(torch.randn(1 << 20))]))
    assert len(messages) > 3
    assert isinstance(refused(wire.send, *messages[:-1]), TransferError)
    assert worker.telemetry().memory.cached_bytes == before


def test_a_terabyte_is_refused_when_it_is_declared(wire: Wire) -> None:
    spec = tensor_pb2.TensorSpec(dtype="uint8", shape=[1 << 40], strides=[1], device="cpu")
    declared = tensor_pb2.TensorDeclaration(address=bytes(16), spec=spec, size_bytes=1 << 40)
    error = refused(wire.send, tensor_pb2.TensorBatch(declarations=[declared]))
    assert isinstance(error, BudgetError)
    assert error.needed_bytes >= 1 << 40


@pytest.mark.parametrize("session", ["", "0" * 32, "../../etc/passwd", "\0"])
def test_the_id_of_a_session_is_a_secret(session: str, wire: Wire) -> None:
    key = segment_pb2.OperationKey(segment=1)
    (batch,) = batches([outgoing(torch.ones(4))])
    program = program_pb2.PutProgramRequest(session=session)
    assert isinstance(refused(wire.programs.PutProgram, program, timeout=60), SessionUnknownError)
    assert isinstance(refused(wire.send, batch, session=session), SessionUnknownError)
    requests: list[dict[str, Any]] = [
        {"save": segment_pb2.SaveRequest(key=key)},
        {"backward": segment_pb2.BackwardRequest(key=key)},
        {"recompute": segment_pb2.RecomputeRequest(key=key)},
        {"release": segment_pb2.ReleaseRequest(keys=[key])},
        {"collect_gradients": segment_pb2.CollectGradientsRequest()},
        {"fetch_sources": segment_pb2.FetchSourcesRequest()},
    ]
    for request in requests:
        assert isinstance(refused(next, Asked(wire.segments, session, **request)), SessionUnknownError)


def test_a_request_that_is_refused_says_what_it_took_and_the_stream_goes_on(wire: Wire, worker: WorkerProcess) -> None:
    (batch,) = batches([outgoing(torch.randn(4))])
    damaged = tensor_pb2.TensorBatch.FromString(batch.SerializeToString())
    damaged.chunks[0].data = bytes(16)
    key = segment_pb2.OperationKey(segment=1)
    (address,) = [declaration.address for declaration in batch.declarations]
    named = segment_pb2.SaveRequest(key=key, program=bytes(16), sources=[address])
    late = segment_pb2.SaveRequest(key=key, after_release=0)
    wire.ask(release=segment_pb2.ReleaseRequest(number=1))
    named.after_release = 1
    before = worker.telemetry().memory.cached_bytes

    def in_turn() -> Iterator[segment_pb2.Request]:
        for request in (
            segment_pb2.Request(session=wire.session),
            segment_pb2.Request(session="0" * 32, save=named, tensors=batch),
            segment_pb2.Request(save=named, tensors=damaged),
            segment_pb2.Request(save=named),
            segment_pb2.Request(save=late, tensors=batch),
            segment_pb2.Request(save=named),
        ):
            yield request
            answered.acquire(timeout=60)

    answered, refusals = threading.Semaphore(0), []
    for answer in wire.segments.Exchange(in_turn(), timeout=60):
        error = from_bytes(answer.error or answer.save.error)
        refusals.append((answer.number, type(error), list(answer.save.stored), list(answer.save.missing_tensors)))
        answered.release()
    assert refusals == [
        (1, TransferError, [], []),
        (2, TransferError, [], []),
        (3, TransferError, [], []),
        (4, type(None), [], [address]),
        (5, SegmentUnknownError, [address], []),
        (6, type(None), [], []),
    ]
    assert worker.telemetry().memory.cached_bytes > before


def test_a_source_may_be_named_by_the_tensor_that_comes_with_it(wire: Wire) -> None:
    x = torch.randn(4)
    key = wire.saved(1, chain("aten.sin.default", 1, 16), torch.randn(4))
    program = wire.last_program
    key.segment = 2
    (unnamed,) = batches([OutgoingTensor.of(x)])
    for sources, missing in (([b""], []), ([b"", b""], [b""])):
        request = segment_pb2.SaveRequest(key=key, program=program, sources=sources)
        (answer,) = wire.ask(save=request, tensors=unnamed)
        assert list(answer.save.missing_tensors) == missing
        key.segment += 1
    key.segment = 2
    answers = wire.ask(recompute=segment_pb2.RecomputeRequest(key=key))
    assert answers[-1].recompute.digests == [saved_digest(layout_of(x), content_digest(x, layout_of(x)))]


def test_a_program_that_is_none_is_refused(wire: Wire) -> None:
    request = program_pb2.PutProgramRequest(session=wire.session, program=b"\xff\xff")
    assert isinstance(refused(wire.programs.PutProgram, request, timeout=60), ProgramError)


def test_a_save_that_arrives_after_its_release_is_refused(wire: Wire) -> None:
    x = torch.randn(4)
    key = wire.saved(1, chain("aten.tanh.default", 1, x.nbytes), x)
    save = segment_pb2.SaveRequest(key=key, program=wire.last_program, sources=[address_of(x)], after_release=6)
    wire.ask(release=segment_pb2.ReleaseRequest(keys=[key], number=7))
    assert isinstance(refused(wire.ask, save=save), SegmentUnknownError)
    error = refused(wire.ask, recompute=segment_pb2.RecomputeRequest(key=key))
    assert isinstance(error, SegmentUnknownError)


def test_released_and_unknown_segments_look_alike(wire: Wire) -> None:
    for number in (1, 1 << 60):
        key = segment_pb2.OperationKey(segment=number)
        wire.ask(release=segment_pb2.ReleaseRequest(keys=[key]))
        error = refused(wire.ask, recompute=segment_pb2.RecomputeRequest(key=key))
        assert error.message == f"this worker has no segment {number} of this session"


def test_a_program_that_takes_far_more_than_it_says_fails_alone(own_worker: WorkerProcess) -> None:
    wire = Wire(own_worker.address)
    huge = Node("aten.ones.default", ((1 << 34,),), (("dtype", torch.uint8),), 0, (16,), draws=False)
    program = of_nodes(huge, sources=0)
    address = wire.program(program)
    key = segment_pb2.OperationKey(segment=1, backward=1)
    wire.ask(save=segment_pb2.SaveRequest(key=key, program=address))
    error = refused(wire.ask, recompute=segment_pb2.RecomputeRequest(key=key))
    assert isinstance(error, backhaul.ReplayError)
    assert own_worker.telemetry().memory.resident_bytes < 1 << 30
    wire.close()
    with backhaul.connect(own_worker.address) as session:
        session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns="gradients").sum().backward()
        assert session.report().remote == 1


@pytest.mark.slow
def test_answers_that_are_being_read_are_finished(own_worker: WorkerProcess) -> None:
    wire, x = Wire(own_worker.address), torch.randn(4 << 20)
    key = wire.saved(1, chain("aten.tanh.default", 5, x.nbytes), x)
    answer = wire.asked(recompute=segment_pb2.RecomputeRequest(key=key, positions=range(5)))
    received = 0
    for message in answer:
        if not received and message.HasField("tensors"):
            own_worker.process.send_signal(signal.SIGTERM)
            time.sleep(1.5)  # longer than the grace for idle streams
        received += sum(len(chunk.data) for chunk in message.tensors.chunks)
    assert received == 5 * x.nbytes
    assert own_worker.process.wait(60) == 0
    wire.channel.close()


@pytest.mark.slow
def test_an_execution_that_does_not_end_holds_nobody_up(own_worker: WorkerProcess, usual_limits: None) -> None:
    hog, x = Wire(own_worker.address), torch.zeros(1500, 1500)
    key = hog.saved(1, chain("aten.mm.default", 16, x.nbytes, SourceRef(0)), x)
    hogged = hog.asked(recompute=segment_pb2.RecomputeRequest(key=key, positions=[0]))
    assert next(hogged).HasField("progress")
    with backhaul.connect(own_worker.address, settings=QUIET) as session:
        started = time.monotonic()
        x = torch.randn(3, requires_grad=True)
        session.checkpoint(torch.sin, x, returns="gradients").sum().backward()
        assert torch.equal(grad_of(x), x.detach().cos())
        assert session.report().fallbacks + session.report().remote == 1
        assert time.monotonic() - started < QUIET_S / 4  # bounds the wait, not the speed of the machine
    hogged.cancel()
    hog.channel.close()


@pytest.mark.slow
def test_too_many_answers_at_once_are_refused(wire: Wire) -> None:
    x = torch.randn(1 << 20)
    answers, errors = [], []
    for number in range(20):
        key = wire.saved(number, chain("aten.tanh.default", 2, x.nbytes), x)
        answer = wire.asked(recompute=segment_pb2.RecomputeRequest(key=key, positions=[0, 1]))
        answers.append(answer)
        try:
            while not next(answer).HasField("recompute"):
                pass
        except backhaul.BackhaulError as error:
            errors.append(error)
    assert len(errors) == 4
    assert all(isinstance(error, BudgetError) for error in errors)
    for answer in answers:
        answer.cancel()


def fetched(wire: Wire, *addresses: bytes) -> list[torch.Tensor]:
    receiver = TensorReceiver()
    for answer in wire.ask(fetch_sources=segment_pb2.FetchSourcesRequest(addresses=addresses)):
        receiver.add(answer.tensors)
    assert all(address in addresses for address in receiver.addresses())
    return [tensor for _, tensor in receiver.stored()]


def test_only_what_segments_of_the_session_name_is_fetched(wire: Wire, worker: WorkerProcess) -> None:
    other, (x, cached, others) = Wire(worker.address), torch.randn(3, 100)
    key = wire.saved(1, chain("aten.tanh.default", 1, x.nbytes), x)
    wire.send(*batches([outgoing(cached)]))
    other.saved(1, chain("aten.tanh.default", 1, others.nbytes), others)
    addresses = [address_of(x), address_of(cached), address_of(others), bytes(16), b"", address_of(x)]
    assert [torch.equal(tensor, x) for tensor in fetched(wire, *addresses)] == [True]
    assert fetched(wire) == fetched(wire, *addresses[1:-1]) == []
    wire.ask(release=segment_pb2.ReleaseRequest(keys=[key]))
    assert fetched(wire, address_of(x)) == []
    other.close()


@pytest.mark.slow
def test_what_is_being_fetched_is_held_until_then_and_counts_as_an_answer(own_worker: WorkerProcess) -> None:
    wire, x = Wire(own_worker.address), torch.randn(4 << 20)
    key = wire.saved(1, chain("aten.tanh.default", 1, x.nbytes), x)
    request = segment_pb2.FetchSourcesRequest(addresses=[address_of(x)])
    answers = [wire.asked(fetch_sources=request) for _ in range(16)]
    receivers = [TensorReceiver() for _ in answers]
    for receiver, answer in zip(receivers, answers, strict=True):
        receiver.add(next(answer).tensors)
    assert isinstance(refused(wire.ask, fetch_sources=request), BudgetError)
    wire.ask(release=segment_pb2.ReleaseRequest(keys=[key]))
    assert own_worker.telemetry().memory.segment_bytes >= x.nbytes
    for message in answers.pop():
        receivers[-1].add(message.tensors)
    (fetched,) = receivers[-1].tensors()
    assert torch.equal(fetched, x)
    for answer in answers:
        answer.cancel()
    wait_until(lambda: own_worker.telemetry().memory.segment_bytes == 0, "it is let go")
    wire.close()


def test_an_answer_that_takes_longer_than_its_deadline_is_given_up() -> None:
    parts = [
        segment_pb2.Answer(fetch_sources=segment_pb2.FetchSourcesResult(), tensor_count=1),
        segment_pb2.Answer(),
    ]
    messages = iter([TensorMessage(part, None, 0) for part in parts])
    pending = cast(Messages, SimpleNamespace(next=lambda _: next(messages), close=lambda: None))
    stream = AnswerStream(pending, lambda: 0.0)
    stream.result()
    with pytest.raises(WorkerLostError, match="takes too long to send"):
        stream.rest(time.monotonic())
    stream.close()


def test_answers_come_as_they_are_ready_whatever_their_size(wire: Wire) -> None:
    def backward(number: int, x: torch.Tensor) -> segment_pb2.BackwardRequest:
        gradient = torch.ones_like(x)
        (batch, *more) = batches([outgoing(gradient)])
        wire.send(batch, *more)
        return segment_pb2.BackwardRequest(
            key=wire.saved(number, chain("aten.tanh.default", 1, x.nbytes), x),
            start=segment_pb2.Start(
                gradients=[segment_pb2.OutputGradient(output=0, tensor=address_of(gradient))],
                ambient_state=encode_state(ambient_state.capture()),
            ),
        )

    xs = [torch.randn(size, requires_grad=True) for size in (4, 1 << 19, 4)]
    unknown = segment_pb2.BackwardRequest(key=segment_pb2.OperationKey(segment=99))
    asked = [unknown, *(backward(number, x.detach()) for number, x in enumerate(xs, 1))]
    requests = [segment_pb2.Request(session=wire.session, backward=request) for request in asked]
    answers: dict[int, list[segment_pb2.Answer]] = {}
    for answer in wire.segments.Exchange(iter(requests), timeout=60):
        answers.setdefault(answer.number, []).append(answer)
    assert [answers[1][0].HasField("error"), len(answers[1])] == [True, 1]
    for number, x in enumerate(xs, 2):
        receiver, parts = TensorReceiver(), [part for part in answers[number] if not part.HasField("progress")]
        assert {part.key.segment for part in parts} == {number - 1}
        assert [part.tensor_count for part in parts] == [1] + [0] * (len(parts) - 1)
        for part in parts:
            receiver.add(part.tensors)
        assert torch.equal(*receiver.tensors(), *torch.autograd.grad(x.tanh().sum(), x))


def test_what_is_pushed_goes_to_the_last_stream_that_takes_it(wire: Wire) -> None:
    """The other one is only without pushes from then on, and a session's end ends neither."""
    ended = threading.Event()

    def requests() -> Iterator[segment_pb2.Request]:
        release = segment_pb2.ReleaseRequest(number=1)
        yield segment_pb2.Request(session=wire.session, pushes_taken=0, release=release)
        ended.wait(60)
        yield segment_pb2.Request(release=release)

    calls = [wire.segments.Exchange(requests(), timeout=60) for _ in range(2)]
    assert [next(call).HasField("release") for call in calls] == [True, True]
    wire.end_session()
    ended.set()
    for call in calls:
        (refused,) = [from_bytes(answer.error) for answer in call]
        assert isinstance(refused, SessionUnknownError)


@pytest.mark.slow
def test_half_an_upload_is_not_waited_for_longer_than_a_lease() -> None:
    def halted() -> Iterator[tensor_pb2.PutTensorsRequest]:
        first, *_ = batches([outgoing(torch.randn(1 << 20))])
        yield tensor_pb2.PutTensorsRequest(session=client.session, tensors=first)
        time.sleep(4)

    with WorkerProcess("--lease", "1") as worker:
        client = Wire(worker.address)
        error = refused(client.tensors.PutTensors, halted(), timeout=60)
        assert isinstance(error, TransferError | SessionUnknownError)
        assert worker.telemetry().memory.cached_bytes == 0
        client.channel.close()


def test_nothing_is_held_once_everybody_has_left(own_worker: WorkerProcess) -> None:
    wire = Wire(own_worker.address)
    wire.send(*batches([outgoing(torch.randn(1 << 20))]))
    assert own_worker.telemetry().memory.cached_bytes > 4 << 20
    wire.close()
    wait_until(lambda: own_worker.telemetry().memory.cached_bytes == 0, "what was cached is freed")


@pytest.mark.slow
def test_a_worker_far_away_is_reached(worker: WorkerProcess) -> None:
    with SlowProxy(worker.address, delay_s=0.2) as proxy, backhaul.connect(proxy.address, settings=QUIET) as session:
        x = torch.randn(3, requires_grad=True)
        session.checkpoint(torch.sin, x, returns="gradients").sum().backward()
        assert session.report().remote == 1


def test_a_call_on_a_closed_channel_is_an_error_of_ours() -> None:
    channel = grpc.insecure_channel("127.0.0.1:1")
    stubs = Stubs(channel, token="", silence_s=1.0)
    channel.close()
    with pytest.raises(WorkerLostError):
        call_unary(stubs.sessions.KeepSession, session_pb2.KeepSessionRequest(), 1.0)
    for is_large in (False, True):
        with pytest.raises(WorkerLostError):
            stubs.exchange.ask(segment_pb2.Request(session="any"), is_large=is_large)
