"""Messages written and read by hand are protobuf's own, to every byte that anybody may send."""

from functools import partial

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from backhaul_proto.v1 import segment_pb2, tensor_pb2
from backhaul_runtime.sealing import sealed
from backhaul_runtime.wire import splicing
from backhaul_runtime.wire.splicing import (
    Batch,
    Chunk,
    TensorMessage,
    decode,
    deserializer,
    encode,
    encode_all,
    serialize,
)
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches

read = partial(decode, kind=tensor_pb2.PutTensorsRequest, name="tensors")
TENSORS = [torch.arange(30_000.0), torch.zeros(0), torch.tensor(2.0)]


def written() -> bytes:
    (data,) = encode_all(batches(map(OutgoingTensor.of, TENSORS)), 2, tensor_pb2.PutTensorsRequest(session="s"))
    return data


def as_message(carried: TensorMessage[tensor_pb2.PutTensorsRequest]) -> tensor_pb2.PutTensorsRequest:
    """What protobuf would have read."""
    message = tensor_pb2.PutTensorsRequest()
    message.CopyFrom(carried.message)
    if isinstance(carried.tensors, Batch):
        message.tensors.declarations.extend(carried.tensors.declarations)
        for chunk in carried.tensors.chunks:
            message.tensors.chunks.add(**{**chunk._asdict(), "data": bytes(chunk.data)})
    return message


def test_protobuf_reads_what_is_written() -> None:
    message = tensor_pb2.PutTensorsRequest.FromString(written())
    assert message.session == "s"
    assert [declared.size_bytes for declared in message.tensors.declarations] == [120_000, 0, 4]
    assert b"".join(chunk.data for chunk in message.tensors.chunks) == b"".join(
        tensor.numpy().tobytes() for tensor in TENSORS
    )


def test_what_is_written_is_read_in_place() -> None:
    data = written()
    carried = read(data)
    assert isinstance(carried.tensors, Batch)
    assert [memoryview(chunk.data).obj for chunk in carried.tensors.chunks] == [data, data]
    assert as_message(carried) == tensor_pb2.PutTensorsRequest.FromString(data)
    assert carried.size_bytes == len(data)


def test_what_protobuf_writes_is_read() -> None:
    message = tensor_pb2.PutTensorsRequest.FromString(written())
    for data in (message.SerializeToString(), message.SerializeToString() + written()):  # the latter merges
        assert as_message(read(data)) == tensor_pb2.PutTensorsRequest.FromString(data)


def test_a_message_that_carries_nothing() -> None:
    carried = deserializer(segment_pb2.Answer)(serialize(segment_pb2.Answer(progress=segment_pb2.Progress())))
    assert carried.tensors is None
    assert carried.message.HasField("progress")
    assert list(encode_all([], 2, tensor_pb2.PutTensorsRequest(session="s"))) == [sealed([b"\x0a\x01s"])]
    assert isinstance(deserializer(tensor_pb2.PutTensorsResponse)(sealed([])), tensor_pb2.PutTensorsResponse)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(1 << 32, 0, b"x"),
        Chunk(0, (1 << 64) - 1, b""),
        Chunk(0, 1 << 64, b"x"),
        Chunk((1 << 32) - 1, (1 << 63) - 1, b"x" * 300),
    ],
    ids=["tensor too large", "largest numbers", "eleven bits of a tenth byte", "large numbers"],
)
def test_numbers_are_read_as_protobuf_reads_them(chunk: Chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splicing, "SPLICED_BYTES", 0)
    same_as_protobuf(encode(Batch(chunks=[chunk]), 2))


def same_as_protobuf(data: bytes) -> None:
    try:
        expected = tensor_pb2.PutTensorsRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read(data)
    else:
        assert as_message(read(data)) == expected


SMALL = encode(Batch([tensor_pb2.TensorDeclaration(size_bytes=3)], [Chunk(0, 200, b"abc")]), 2, b"\x0a\x01s")


@pytest.mark.slow
@given(st.data())
def test_any_bytes_are_read_as_protobuf_reads_them(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splicing, "SPLICED_BYTES", 0)
        changed = bytearray(SMALL)
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(changed)))
            changed[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        same_as_protobuf(bytes(changed))


def test_no_part_of_a_message_is_one() -> None:
    data = written()
    for end in (1, 2, 5, 100, len(data) // 2, len(data) - 4):
        with pytest.raises(DecodeError):
            read(data[:end])
