"""Messages written and read: all of them sealed, and those with tensors so that each byte is copied once on each side.

On the wire they are plain protobuf: any stub reads and writes them. What is written here has the tensors' field first,
and in each chunk the data last. What comes in that form is read in place, as views of the bytes that came; anything
else is left to protobuf, which alone decides what is valid.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import BackhaulError, LimitError, TransferError
from backhaul_runtime.sealing import is_sealed, sealed
from backhaul_runtime.wire.fields import has_more_fields
from backhaul_runtime.wire.protocol import MAX_DECLARED

M = TypeVar("M", bound=Message)
T = TypeVar("T")

SPLICED_BYTES = 64 << 10
"""Smaller messages are copied faster by protobuf than they are read here."""

COUNTED_BYTES = 256 << 10
"""Of larger messages a worker counts the fields before protobuf reads them. In smaller ones they take 10 MB at most."""

MAX_CHUNKS = 2 * MAX_DECLARED
"""Chunks that one message may hold: one for each tensor it declares, and those of tensors declared before."""

_DECLARATION, _CHUNK = 0x0A, 0x12
_TENSOR, _OFFSET, _DATA = 0x08, 0x10, 0x22
_BYTES = 2  # wire type of what has a length
_LARGEST_SHIFT = 63  # a tenth byte may overflow: protobuf judges that


class Chunk(NamedTuple):
    """See TensorChunk in tensor.proto."""

    tensor: int
    offset_bytes: int
    data: memoryview | bytes


@dataclass
class Batch:
    """See TensorBatch in tensor.proto. Chunks' data lies where it lay: that memory must not change.

    Attributes:
        declarations: The declarations of tensors in this batch.
        chunks: The chunks of the tensors' elements.
        held: The owners of the chunks' memory, which have no other reference.
    """

    declarations: list[tensor_pb2.TensorDeclaration] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    held: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorMessage(Generic[M]):
    """A message that came.

    Attributes:
        message: All of it but its tensors.
        tensors: None where it carries none. Views of what came, which live as long as they do.
        size_bytes: The size of the message on the wire.
    """

    message: M
    tensors: Batch | tensor_pb2.TensorBatch | None
    size_bytes: int


def encode(
    batch: Batch,
    number: int,
    rest: bytes = b"",
    join: Callable[[Iterable[bytes | memoryview]], bytes] = sealed,
) -> bytes:
    """A message with a batch in its field of that number. Copies the chunks' data, without the GIL where it is much.

    Args:
        batch: The tensor batch that the message carries.
        number: The number of the batch's field.
        rest: The other fields, encoded.
        join: Makes the message of its parts: `b"".join` for one that will be a field of another, which has the seal.
    """
    parts: list[bytes | memoryview] = [
        field_of(_DECLARATION >> 3, declaration.SerializeToString()) for declaration in batch.declarations
    ]
    for tensor, offset, data in batch.chunks:
        head = b"\x08%b\x10%b\x22%b" % (_varint(tensor), _varint(offset), _varint(len(data)))
        parts += (b"\x12", _varint(len(head) + len(data)), head, data)
    size = sum(map(len, parts))
    return join((_varint(number << 3 | _BYTES), _varint(size), *parts, rest))


def field_of(number: int, encoded: bytes) -> bytes:
    """An encoded message as a field of that number in another: fields that follow each other are a message."""
    return b"".join((_varint(number << 3 | _BYTES), _varint(len(encoded)), encoded))


def encode_all(
    batches: Iterable[Batch],
    number: int,
    rest: Message,
    join: Callable[[Iterable[bytes | memoryview]], bytes] = sealed,
) -> Iterator[bytes]:
    """Encodes batches, the other fields with the first; those alone where there is no batch. See `encode`."""
    others = rest.SerializeToString()
    for batch in batches:
        yield encode(batch, number, others, join)
        others = b""
    if others:
        yield join([others])


def serialize(message: Message | bytes) -> bytes:
    """Writes and seals messages that are not written yet."""
    return message if isinstance(message, bytes) else sealed([message.SerializeToString()])


def deserializer(kind: type[M], most_fields: int | None = None) -> Callable[[bytes], Any]:
    """Reads messages of a kind: those with a field for tensors as `TensorMessage`, others as they are.

    A message that is refused is returned as the error that says why: see NOTE [Seal].

    Args:
        kind: The class of the messages.
        most_fields: A large message with more fields than these, its tensors aside, is refused before it is read. None
            for no limit.
    """
    parse = kind.FromString if most_fields is None else partial(_parse, kind=kind, most_fields=most_fields)
    read: Callable[[bytes], Any] = parse
    for descriptor in kind.DESCRIPTOR.fields:
        if descriptor.message_type is tensor_pb2.TensorBatch.DESCRIPTOR:
            read = partial(decode, kind=kind, name=descriptor.name, parse=parse)

    def checked(data: bytes) -> Any:
        if not is_sealed(data):
            return TransferError(
                f"the {len(data)} bytes of a message of type {kind.DESCRIPTOR.name} do not fit its checksum: it was "
                "damaged on the way, or the other side runs another version of Backhaul"
            )
        try:
            return read(data)
        except DecodeError as error:
            return TransferError(f"a message of type {kind.DESCRIPTOR.name} can't be read: {error}")
        except LimitError as error:
            return error.with_traceback(None)  # the traceback would keep the message alive

    return checked


def accepted(message: T | BackhaulError) -> T:
    """A message that a deserializer has read. Raises the error that stands for a refused one."""
    if isinstance(message, BackhaulError):
        raise message
    return message


def _parse(data: bytes, kind: type[M], most_fields: int) -> M:
    """Reads a message. Raises LimitError for a large one with too many fields."""
    if len(data) > COUNTED_BYTES and has_more_fields(data, kind, most_fields):
        what = f"fields of a {kind.DESCRIPTOR.name}"
        raise LimitError(
            f"more than {most_fields} {what} of {len(data)} bytes", limit=what, most=most_fields, found=most_fields + 1
        )
    return kind.FromString(data)


def decode(data: bytes, kind: type[M], name: str, parse: Callable[[bytes], M] | None = None) -> TensorMessage[M]:
    """A message whose field of that name is a batch.

    Args:
        data: The bytes of the message.
        kind: The protobuf class of the message.
        name: The name of the batch's field.
        parse: Reads what is not read in place; protobuf unless given.

    Raises:
        DecodeError: The bytes are no such message.
        LimitError: It holds more tensors than one message may.
    """
    parse = parse or kind.FromString
    if len(data) >= SPLICED_BYTES and (spliced := _in_place(data, kind, name, parse)) is not None:
        return spliced
    message = parse(data)
    return TensorMessage(message, getattr(message, name) if message.HasField(name) else None, len(data))


def _in_place(data: bytes, kind: type[M], name: str, parse: Callable[[bytes], M]) -> TensorMessage[M] | None:
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
            if len(batch.declarations) > MAX_DECLARED or len(batch.chunks) > MAX_CHUNKS:
                raise too_many_parts()
            if part == _CHUNK:
                batch.chunks.append(_chunk(data, view, at, part_end))
            elif part == _DECLARATION:
                batch.declarations.append(tensor_pb2.TensorDeclaration.FromString(data[at:part_end]))
            else:
                return None
            at = part_end
        message = parse(data[end:])
    except (_OtherFormError, IndexError):
        return None
    return None if message.HasField(name) else TensorMessage(message, batch, len(data))


def _chunk(data: bytes, view: memoryview, at: int, end: int) -> Chunk:
    tensor, at = _read_varint(data, _after(data, at, _TENSOR))
    offset, at = _read_varint(data, _after(data, at, _OFFSET))
    size, at = _read_varint(data, _after(data, at, _DATA))
    if at + size != end or tensor >> 32:
        raise _OtherFormError
    return Chunk(tensor, offset, view[at:end])


def too_many_parts() -> LimitError:
    """The error for a message that holds more tensors, or pieces of them, than one may."""
    return LimitError(
        f"a message declares more than {MAX_DECLARED} tensors, or holds more than {MAX_CHUNKS} pieces of tensors: send "
        "them in several messages",
        limit="tensors of a message",
        most=MAX_DECLARED,
        found=MAX_DECLARED + 1,
    )


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
    encoded = bytearray()
    while value >= 1 << 7:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
