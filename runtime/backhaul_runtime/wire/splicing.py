"""Encodes and decodes sealed messages. The bytes of tensors are copied once on each side.

The messages are plain protobuf on the wire: any stub can read and write them. The encoder here puts the field with the
tensors first, and the data last in each chunk. The decoder reads messages of that form in place, as views of the
received bytes. It leaves any other message to protobuf, which alone decides whether the message is valid.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import BackhaulError, LimitError, TransferError
from backhaul_runtime.sealing import is_sealed, sealed
from backhaul_runtime.wire.fields import has_more_fields
from backhaul_runtime.wire.protocol import MAX_DECLARED

if TYPE_CHECKING:
    from backhaul_runtime.tensors.staging import DeviceMoment  # it imports torch, which a dashboard has not

M = TypeVar("M", bound=Message)
T = TypeVar("T")

SPLICED_BYTES = 64 << 10
"""Size in bytes from which messages are read in place. Protobuf copies smaller ones in less time."""

COUNTED_BYTES = 256 << 10
"""Size in bytes above which a worker counts the fields first. Parsed, a smaller message takes at most 10 MB."""

MAX_CHUNKS = 2 * MAX_DECLARED
"""Number of chunks that one message may hold, for tensors declared in it and in earlier messages."""

_DECLARATION, _CHUNK = 0x0A, 0x12
_TENSOR, _OFFSET, _DATA = 0x08, 0x10, 0x22
_BYTES = 2  # wire type of fields with a length
_LARGEST_SHIFT = 63  # a tenth byte may overflow: protobuf decides whether that is valid


class Chunk(NamedTuple):
    """A piece of one tensor's elements. See TensorChunk in tensor.proto."""

    tensor: int
    offset_bytes: int
    data: memoryview | bytes


@dataclass
class Batch:
    """See TensorBatch in tensor.proto. Chunks are views: the memory behind them must not change.

    Attributes:
        declarations: The declarations of tensors in this batch.
        chunks: The chunks of the tensors' elements.
        owners: The owners of the chunks' memory, which the views themselves do not keep alive.
        complete: The moments at which copies from a device into that memory end. Before them it must not be read.
    """

    declarations: list[tensor_pb2.TensorDeclaration] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    owners: list[object] = field(default_factory=list)
    complete: "list[DeviceMoment]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorMessage(Generic[M]):
    """A received message.

    Attributes:
        message: The message, whose field for tensors is not to be read.
        tensors: The batch, None if the message has none. Its chunks may be views that keep the received bytes alive.
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
    """Encodes a message whose field `number` is a batch. Waits until the batch is `complete`, and copies its data.

    Args:
        batch: The tensor batch that the message carries.
        number: The number of the batch's field.
        rest: The other fields, encoded.
        join: Joins the parts of the message. `b"".join` for a message that will be a field of another, which is sealed.
    """
    for moment in reversed(batch.complete):  # the last one of a stream comes last: the others need no further wait
        moment.wait()
    parts: list[bytes | memoryview] = [
        field_of(_DECLARATION >> 3, declaration.SerializeToString()) for declaration in batch.declarations
    ]
    for tensor, offset, data in batch.chunks:
        head = b"\x08%b\x10%b\x22%b" % (_varint(tensor), _varint(offset), _varint(len(data)))
        parts += (b"\x12", _varint(len(head) + len(data)), head, data)
    size = sum(map(len, parts))
    return join((_varint(number << 3 | _BYTES), _varint(size), *parts, rest))


def field_of(number: int, encoded: bytes) -> bytes:
    """Wraps an encoded message as field `number` of another. Concatenated fields are a valid message."""
    return b"".join((_varint(number << 3 | _BYTES), _varint(len(encoded)), encoded))


def encode_all(
    batches: Iterable[Batch],
    number: int,
    rest: Message,
    join: Callable[[Iterable[bytes | memoryview]], bytes] = sealed,
) -> Iterator[bytes]:
    """Encodes one message per batch, as `encode` does.

    The first message also has the fields of `rest`. If there is no batch, they are a message of their own.
    """
    others = rest.SerializeToString()
    for batch in batches:
        yield encode(batch, number, others, join)
        others = b""
    if others:
        yield join([others])


def serialize(message: Message | bytes) -> bytes:
    """Encodes and seals a message. Returns bytes, which are encoded already, unchanged."""
    return message if isinstance(message, bytes) else sealed([message.SerializeToString()])


def deserializer(kind: type[M], most_fields: int | None = None) -> Callable[[bytes], Any]:
    """Returns a function that decodes messages of a class, to `TensorMessage` if the class has a field for tensors.

    For a message that is refused the function returns the error instead of raising it: see NOTE [Seal].

    Args:
        kind: The class of the messages.
        most_fields: The largest number of fields, tensors not counted. A large message with more is refused before it
            is parsed. None for no limit.
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
            return error.with_traceback(None)  # its frames would keep the bytes of the message alive

    return checked


def accepted(message: T | BackhaulError) -> T:
    """Returns a message that a deserializer has decoded. Raises the error if the message was refused."""
    if isinstance(message, BackhaulError):
        raise message
    return message


def _parse(data: bytes, kind: type[M], most_fields: int) -> M:
    """Parses a message. Raises LimitError for a large message with too many fields."""
    if len(data) > COUNTED_BYTES and has_more_fields(data, kind, most_fields):
        what = f"fields of a {kind.DESCRIPTOR.name}"
        raise LimitError(
            f"more than {most_fields} {what} of {len(data)} bytes", limit=what, most=most_fields, found=most_fields + 1
        )
    return kind.FromString(data)


def decode(data: bytes, kind: type[M], name: str, parse: Callable[[bytes], M] | None = None) -> TensorMessage[M]:
    """Decodes a message whose field `name` is a batch.

    Args:
        data: The bytes of the message.
        kind: The protobuf class of the message.
        name: The name of the batch's field.
        parse: Parses what is not read in place; None for protobuf's own parser.

    Raises:
        DecodeError: The bytes are no valid message of the class.
        LimitError: The message holds more tensors than one message may.
    """
    parse = parse or kind.FromString
    if len(data) >= SPLICED_BYTES and (spliced := _in_place(data, kind, name, parse)) is not None:
        return spliced
    message = parse(data)
    return TensorMessage(message, getattr(message, name) if message.HasField(name) else None, len(data))


def _in_place(data: bytes, kind: type[M], name: str, parse: Callable[[bytes], M]) -> TensorMessage[M] | None:
    """Decodes a message that has the form of `encode`. Returns None for any other form."""
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
    """Returns the error for a message with more declarations or chunks than one message may hold."""
    return LimitError(
        f"a message declares more than {MAX_DECLARED} tensors, or holds more than {MAX_CHUNKS} pieces of tensors: send "
        "them in several messages",
        limit="tensors of a message",
        most=MAX_DECLARED,
        found=MAX_DECLARED + 1,
    )


class _OtherFormError(Exception):
    """The bytes do not have the form that `encode` writes. Protobuf may still be able to parse them."""


def _after(data: bytes, at: int, tag: int) -> int:
    if data[at] != tag:
        raise _OtherFormError
    return at + 1


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at offset `at`, and the offset behind it."""
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
