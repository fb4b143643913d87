"""Messages that carry tensors, written and read so that each byte is copied once on each side.

On the wire they are plain protobuf: any stub reads and writes them. What is written here has the tensors' field first,
and in each chunk the data last. What comes in that form is read in place, as views of the bytes that came; anything
else is left to protobuf, which alone decides what is valid.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from backhaul_proto.v1 import tensor_pb2

M = TypeVar("M", bound=Message)

SPLICED_BYTES = 64 << 10
"""Smaller messages are copied faster by protobuf than they are read here."""

_DECLARATION, _CHUNK = 0x0A, 0x12
_TENSOR, _OFFSET, _CHECKSUM, _DATA = 0x08, 0x10, 0x19, 0x22
_BYTES = 2  # wire type of what has a length
_LARGEST_SHIFT = 63  # a tenth byte may overflow: protobuf judges that


class Chunk(NamedTuple):
    """See TensorChunk in tensor.proto."""

    tensor: int
    offset_bytes: int
    checksum: int
    data: memoryview | bytes


@dataclass
class Batch:
    """See TensorBatch in tensor.proto. Chunks' data lies where it lay: that memory must not change.

    Attributes:
        declarations: Of tensors.
        chunks: Of their elements.
        held: What owns memory of chunks that nobody else may hold.
    """

    declarations: list[tensor_pb2.TensorDeclaration] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    held: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Carried(Generic[M]):
    """A message that came.

    Attributes:
        message: All of it but its tensors.
        tensors: None where it carries none. Views of what came, which live as long as they do.
        size_bytes: On the wire.
    """

    message: M
    tensors: Batch | tensor_pb2.TensorBatch | None
    size_bytes: int


def encode(batch: Batch, number: int, rest: bytes = b"") -> bytes:
    """A message with a batch in its field of that number. Copies the chunks' data, without the GIL where it is much.

    Args:
        batch: To be carried.
        number: Of the field.
        rest: The other fields, encoded.
    """
    parts: list[bytes | memoryview] = [
        field_of(_DECLARATION >> 3, declaration.SerializeToString()) for declaration in batch.declarations
    ]
    for tensor, offset, checksum, data in batch.chunks:
        head = b"\x08%b\x10%b\x19%b\x22%b" % (
            _varint(tensor),
            _varint(offset),
            checksum.to_bytes(8, "little"),
            _varint(len(data)),
        )
        parts += (b"\x12", _varint(len(head) + len(data)), head, data)
    size = sum(map(len, parts))
    return b"".join((_varint(number << 3 | _BYTES), _varint(size), *parts, rest))


def field_of(number: int, encoded: bytes) -> bytes:
    """An encoded message as a field of that number in another: fields that follow each other are a message."""
    return b"".join((_varint(number << 3 | _BYTES), _varint(len(encoded)), encoded))


def encode_all(batches: Iterable[Batch], number: int, rest: Message) -> Iterator[bytes]:
    """Encodes batches, the other fields with the first; those alone where there is no batch."""
    others = rest.SerializeToString()
    for batch in batches:
        yield encode(batch, number, others)
        others = b""
    if others:
        yield others


def deserializer(kind: type[M]) -> Callable[[bytes], Any]:
    """Reads messages of a kind: those with a field for tensors as `Carried`, others as they are."""
    for found in kind.DESCRIPTOR.fields:
        if found.message_type is tensor_pb2.TensorBatch.DESCRIPTOR:
            return partial(decode, kind=kind, name=found.name)
    return kind.FromString


def serialize(message: Message | bytes) -> bytes:
    """Writes messages that are not written yet."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def decode(data: bytes, kind: type[M], name: str) -> Carried[M]:
    """A message whose field of that name is a batch.

    Raises:
        DecodeError: The bytes are no such message.
    """
    if len(data) >= SPLICED_BYTES and (found := _in_place(data, kind, name)) is not None:
        return found
    message = kind.FromString(data)
    return Carried(message, getattr(message, name) if message.HasField(name) else None, len(data))


def _in_place(data: bytes, kind: type[M], name: str) -> Carried[M] | None:
    """As `decode`, None for any form but that of `encode`."""
    try:
        tag, at = _read_varint(data, 0)
        size, at = _read_varint(data, at)
        end = at + size
        if tag != kind.DESCRIPTOR.fields_by_name[name].number << 3 | _BYTES or end > len(data):
            return None
        view, batch = memoryview(data), Batch()
        while at < end:
            part = data[at]
            size, at = _read_varint(data, at + 1)
            part_end = at + size
            if part_end > end:
                return None
            if part == _CHUNK:
                batch.chunks.append(_chunk(data, view, at, part_end))
            elif part == _DECLARATION:
                batch.declarations.append(tensor_pb2.TensorDeclaration.FromString(data[at:part_end]))
            else:
                return None
            at = part_end
        message = kind.FromString(data[end:])
    except (_OtherFormError, IndexError):
        return None
    return None if message.HasField(name) else Carried(message, batch, len(data))


def _chunk(data: bytes, view: memoryview, at: int, end: int) -> Chunk:
    tensor, at = _read_varint(data, _after(data, at, _TENSOR))
    offset, at = _read_varint(data, _after(data, at, _OFFSET))
    at = _after(data, at, _CHECKSUM)
    checksum = int.from_bytes(data[at : at + 8], "little")
    size, at = _read_varint(data, _after(data, at + 8, _DATA))
    if at + size != end or tensor >> 32:
        raise _OtherFormError
    return Chunk(tensor, offset, checksum, view[at:end])


class _OtherFormError(Exception):
    """It may still be a message."""


def _after(data: bytes, at: int, tag: int) -> int:
    if data[at] != tag:
        raise _OtherFormError
    return at + 1


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where what follows it begins."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift == _LARGEST_SHIFT:
            raise _OtherFormError
    return value | byte << shift, at + 1


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 1 << 7:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
