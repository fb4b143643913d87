"""Messages end with a checksum of all of their bytes, and what does not is refused before it is read."""

import random

import pytest
import torch
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backhaul import TransferError
from backhaul_proto.v1 import segment_pb2, session_pb2, tensor_pb2
from backhaul_runtime.errors import TensorsMissingError, from_bytes
from backhaul_runtime.sealing import FIELD_NUMBER, SEAL_BYTES, is_sealed, sealed
from backhaul_runtime.wire.splicing import SPLICED_BYTES, Batch, accepted, deserializer, encode_all, serialize
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from support.wire import METHODS

KINDS = {kind.name: GetMessageClass(kind) for method in METHODS for kind in (method.input_type, method.output_type)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_request_and_response_has_a_checksum_and_is_still_protobuf(kind: type[Message]) -> None:
    data = serialize(kind())
    assert len(data) == SEAL_BYTES
    assert kind.DESCRIPTOR.fields_by_name["checksum"].number == FIELD_NUMBER
    message = kind.FromString(data)
    assert [field.name for field, _ in message.ListFields()] == ["checksum"]
    assert not isinstance(deserializer(kind)(data), TransferError)


def test_no_flipped_bit_is_let_through() -> None:
    release = segment_pb2.ReleaseRequest(keys=[segment_pb2.OperationKey(segment=7)])
    read = deserializer(segment_pb2.Request)
    data = serialize(segment_pb2.Request(session="0123456789abcdef", release=release))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferError, match="do not fit its checksum"):
            accepted(read(bytes(damaged)))


@pytest.mark.parametrize("size", [100, SPLICED_BYTES], ids=["small", "read in place"])
def test_no_flipped_bit_is_let_through_with_tensors(size: int) -> None:
    request = tensor_pb2.PutTensorsRequest(session="0123456789abcdef")
    (data,) = encode_all(batches([OutgoingTensor.of(torch.randn(size))]), request.TENSORS_FIELD_NUMBER, request)
    read, chosen = deserializer(tensor_pb2.PutTensorsRequest), random.Random(0)
    assert isinstance(accepted(read(data)).tensors, Batch) == (size == SPLICED_BYTES)
    ends = [*range(800), *range(8 * len(data) - 800, 8 * len(data))]
    for bit in ends + [chosen.randrange(8 * len(data)) for _ in range(500)]:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert isinstance(read(bytes(damaged)), TransferError)


@pytest.mark.parametrize("cut", [*range(1, SEAL_BYTES + 3)])
def test_what_has_no_checksum_is_refused(cut: int) -> None:
    data = serialize(session_pb2.KeepSessionRequest(session="ab"))
    read = deserializer(session_pb2.KeepSessionRequest)
    for damaged in (data[:-cut], data + bytes(cut), data[:-SEAL_BYTES], b""):
        assert isinstance(read(damaged), TransferError)


def test_what_is_sealed_and_no_message_is_refused_by_name() -> None:
    message = deserializer(segment_pb2.Request)(sealed([b"\xff\xff"]))
    with pytest.raises(TransferError, match="Request can't be read"):
        accepted(message)


def test_parts_are_hashed_as_one() -> None:
    assert sealed([b"ab", memoryview(b"c"), b""]) == sealed([b"abc"])
    assert is_sealed(sealed([]))


def test_an_error_that_was_damaged_is_not_taken_for_another() -> None:
    error = TensorsMissingError("2 gradients are named that this worker does not hold")
    data = error.to_bytes()
    assert str(from_bytes(data)) == error.message
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert from_bytes(bytes(damaged)) is None
