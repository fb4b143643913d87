"""Hostile or unlucky bytes on the wire of a real worker."""

import grpc
import pytest
import torch

import backhaul
from backhaul import BudgetError, ProgramError, SessionUnknownError, TransferError
from backhaul._calls import error_of
from backhaul_proto.v1 import (
    program_pb2,
    program_pb2_grpc,
    segment_pb2,
    segment_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    tensor_pb2,
    tensor_pb2_grpc,
)
from backhaul_runtime.digest import address_of
from backhaul_runtime.framing import Parcel, batches
from backhaul_runtime.layout import layout_of
from backhaul_runtime.protocol import PROTOCOL_VERSION
from support.processes import WorkerProcess


class Wire:
    """A client that can misbehave."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        opened = sessions.OpenSession(session_pb2.OpenSessionRequest(protocol_version=PROTOCOL_VERSION), timeout=10)
        self.session = opened.session
        self.close = lambda: sessions.CloseSession(session_pb2.CloseSessionRequest(session=self.session), timeout=10)
        self.programs = program_pb2_grpc.ProgramServiceStub(self.channel)
        self.tensors = tensor_pb2_grpc.TensorServiceStub(self.channel)
        self.segments = segment_pb2_grpc.SegmentServiceStub(self.channel)

    def put(self, *messages: tensor_pb2.TensorBatch, session: str | None = None) -> tensor_pb2.PutTensorsResponse:
        named = self.session if session is None else session
        return self.tensors.PutTensors(
            iter([tensor_pb2.PutTensorsRequest(session=named, tensors=message) for message in messages]), timeout=10
        )


@pytest.fixture
def wire(worker: WorkerProcess) -> Wire:
    wire = Wire(worker.address)
    yield wire
    wire.close()
    wire.channel.close()


def refused(call: object, *args: object, **kwargs: object) -> backhaul.BackhaulError:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return error_of(caught.value)


def parcel(tensor: torch.Tensor) -> Parcel:
    return Parcel(tensor, layout_of(tensor), address_of(tensor))


def test_a_flipped_bit_is_caught_and_nothing_of_it_is_kept(wire: Wire, worker: WorkerProcess) -> None:
    before = worker.telemetry().memory.cached_bytes
    (batch,) = batches([parcel(torch.randn(100))])
    for place in range(0, 400, 7):
        damaged = tensor_pb2.TensorBatch.FromString(batch.SerializeToString())
        data = bytearray(damaged.chunks[0].data)
        data[place] ^= 1 << place % 8
        damaged.chunks[0].data = bytes(data)
        assert isinstance(refused(wire.put, damaged), TransferError)
    assert worker.telemetry().memory.cached_bytes == before


def test_contents_under_another_address_are_refused(wire: Wire) -> None:
    (batch,) = batches([Parcel(torch.ones(4), layout_of(torch.ones(4)), bytes(16))])
    assert isinstance(refused(wire.put, batch), TransferError)


def test_a_stream_that_ends_early_leaves_nothing(wire: Wire, worker: WorkerProcess) -> None:
    before = worker.telemetry().memory.cached_bytes
    messages = list(batches([parcel(torch.randn(1 << 20))]))
    assert len(messages) > 3
    assert isinstance(refused(wire.put, *messages[:-1]), TransferError)
    assert worker.telemetry().memory.cached_bytes == before


def test_a_terabyte_is_refused_when_it_is_declared(wire: Wire) -> None:
    spec = tensor_pb2.TensorSpec(dtype="uint8", shape=[1 << 40], strides=[1], device="cpu")
    declared = tensor_pb2.TensorDeclaration(address=bytes(16), spec=spec, size_bytes=1 << 40)
    error = refused(wire.put, tensor_pb2.TensorBatch(declarations=[declared]))
    assert isinstance(error, BudgetError)
    assert error.needed_bytes >= 1 << 40


@pytest.mark.parametrize("session", ["", "0" * 32, "../../etc/passwd", "\0"])
def test_sessions_can_not_be_guessed(session: str, wire: Wire) -> None:
    key = segment_pb2.OperationKey(session=session, segment=1)
    (batch,) = batches([parcel(torch.ones(4))])
    for call, request in (
        (wire.programs.PutProgram, program_pb2.PutProgramRequest(session=session)),
        (wire.segments.SaveSegment, segment_pb2.SaveSegmentRequest(key=key)),
        (wire.segments.ReleaseSegments, segment_pb2.ReleaseSegmentsRequest(keys=[key])),
    ):
        assert isinstance(refused(call, request, timeout=10), SessionUnknownError)
    assert isinstance(refused(wire.put, batch, session=session), SessionUnknownError)
    for call, request in (
        (wire.segments.Backward, segment_pb2.BackwardRequest(key=key)),
        (wire.segments.Recompute, segment_pb2.RecomputeRequest(key=key)),
    ):
        assert isinstance(refused(lambda c=call, r=request: next(c(r, timeout=10))), SessionUnknownError)


def test_a_program_that_is_none_is_refused(wire: Wire) -> None:
    request = program_pb2.PutProgramRequest(session=wire.session, program=b"\xff\xff")
    assert isinstance(refused(wire.programs.PutProgram, request, timeout=10), ProgramError)


def test_released_and_unknown_segments_look_alike(wire: Wire) -> None:
    for number in (1, 1 << 60):
        key = segment_pb2.OperationKey(session=wire.session, segment=number)
        wire.segments.ReleaseSegments(segment_pb2.ReleaseSegmentsRequest(keys=[key]), timeout=10)
        error = refused(
            lambda key=key: next(wire.segments.Recompute(segment_pb2.RecomputeRequest(key=key), timeout=10))
        )
        assert error.message == f"this worker has no segment {number} of this session"


def test_a_program_that_takes_far_more_than_it_says_fails_alone(own_worker: WorkerProcess) -> None:
    from backhaul_runtime import ambient
    from backhaul_runtime.program import Node, Program, ResultRef
    from backhaul_runtime.program_codec import encode_program

    wire = Wire(own_worker.address)
    huge = Node("aten.ones.default", ((1 << 34,),), (("dtype", torch.uint8),), 0, (16,), draws=False)
    program = encode_program(Program((), (huge,), (ambient.capture(),), (ResultRef(0, 0),), 0, 0))
    address = wire.programs.PutProgram(
        program_pb2.PutProgramRequest(session=wire.session, program=program), timeout=10
    ).address
    key = segment_pb2.OperationKey(session=wire.session, segment=1, backward=1)
    wire.segments.SaveSegment(segment_pb2.SaveSegmentRequest(key=key, program=address), timeout=10)
    error = refused(lambda: list(wire.segments.Recompute(segment_pb2.RecomputeRequest(key=key), timeout=60)))
    assert isinstance(error, backhaul.ReplayError)
    assert own_worker.telemetry().memory.resident_bytes < 1 << 30
    wire.close()
    wire.channel.close()
    with backhaul.connect(own_worker.address) as session:
        session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns="gradients").sum().backward()
        assert session.report().remote == 1
