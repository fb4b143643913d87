"""Sends tensors as a stream of messages, which `tensor_receiver` rebuilds on the other side.

A stream declares each tensor before its first byte, then carries its elements in chunks. Messages hold about 1 MiB: a
large tensor takes many, small ones share one. The seal of the messages covers the bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors.differences import BLOCK_BYTES, width_of
from backhaul_runtime.tensors.layout import (
    Layout,
    dense_bytes,
    host_bytes,
    layout_of,
)
from backhaul_runtime.tensors.staging import DeviceMoment, device_moments, host_pieces
from backhaul_runtime.wire.layout_codec import encode_layout
from backhaul_runtime.wire.protocol import CHUNK_BYTES, MAX_DECLARED
from backhaul_runtime.wire.splicing import Batch, Chunk


@dataclass(frozen=True, slots=True)
class OutgoingTensor:
    """A tensor to send. Its memory is read while the stream is written and must not change until then.

    Construct it in the thread that computes the tensor: an accelerator's tensor is read once the work that is queued on
    this thread's stream so far is done.

    Attributes:
        tensor: The tensor, on any device; an accelerator's is read in pieces through host memory.
        layout: The layout of the tensor.
        address: The address under which the receiver stores it. Empty if the receiver computes the address, or knows
            the tensor by its position in the stream.
        made: The moment on the device after which the tensor may be read, by default the present one; empty for a
            tensor on the host.
        difference: How the tensor differs from one that the receiver holds; None to send all of its elements.
    """

    tensor: Tensor
    layout: Layout
    address: bytes = b""
    made: Sequence[DeviceMoment] = ()
    difference: "EncodedDifference | None" = None

    def __post_init__(self) -> None:
        if self.layout.is_on_accelerator and not self.made:
            object.__setattr__(self, "made", device_moments([self.tensor]))

    @classmethod
    def of(cls, tensor: Tensor) -> "OutgoingTensor":
        """Returns an outgoing tensor without an address. Raises UnsupportedTensorError as `layout_of` does."""
        return cls(tensor, layout_of(tensor))

    def declaration(self, location: tensor_pb2.Location | None = None) -> tensor_pb2.TensorDeclaration:
        """Returns the message that announces the tensor, with its location if it is in shared memory."""
        return tensor_pb2.TensorDeclaration(
            address=self.address,
            spec=encode_layout(self.layout),
            size_bytes=self.layout.payload_bytes,
            location=location,
        )


class EncodedDifference(Protocol):
    """A tensor as its difference from one that the receiver holds, see NOTE [Differences]."""

    @property
    def base(self) -> bytes:
        """The address of the tensor that the receiver holds."""
        ...

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yields the offset and the frame of each block, in order. Called once."""
        ...


def may_differ(layout: Layout) -> bool:
    """Whether a tensor can be sent as a difference: it has elements, and no gaps between them."""
    return 0 < layout.payload_bytes == layout.span_bytes


def width_in(layout: Layout) -> int:
    """Returns the bytes of one number of a tensor, see `width_of`."""
    return width_of(layout.dtype.itemsize, is_complex=layout.dtype.is_complex)


EXPANDED_BYTES = 4 << 20
"""Bytes of tensors that the frames of one message may yield. Decoding so many takes the worker's event loop 6 ms."""

PLACED_BYTES = 16 << 20
"""Bytes written to shared memory before a message declares them, so that the receiver reads while more is written."""

SharedWriter: TypeAlias = Callable[[OutgoingTensor], tensor_pb2.Location | None]
"""Copies a tensor into shared memory and returns its location. Returns None if the tensor must be sent as chunks."""


def payload_bytes(outgoing_tensors: Iterable[OutgoingTensor]) -> int:
    """Returns the bytes of the elements of tensors."""
    return sum(outgoing.layout.payload_bytes for outgoing in outgoing_tensors)


def batches(outgoing_tensors: Iterable[OutgoingTensor], write: SharedWriter = lambda _: None) -> Iterator[Batch]:
    """Encodes tensors as messages of about CHUNK_BYTES each, in order. The messages share the memory of the tensors.

    It waits for no device: the elements of an accelerator's tensors may be read once the batch is `complete`.

    Args:
        outgoing_tensors: The tensors to send. They must not change until the messages have been sent.
        write: Writes tensors to shared memory, see `SharedWriter`.
    """
    batch = Batch()
    filled = placed = expanded = 0
    for index, outgoing in enumerate(outgoing_tensors):
        if len(batch.declarations) == MAX_DECLARED:
            yield batch
            batch, filled, placed, expanded = Batch(), 0, 0, 0
        size = outgoing.layout.payload_bytes
        if outgoing.difference is not None:
            batch.declarations.append(
                tensor_pb2.TensorDeclaration(
                    address=outgoing.address,
                    spec=encode_layout(outgoing.layout),
                    size_bytes=size,
                    difference=tensor_pb2.Difference(base=outgoing.difference.base),
                )
            )
            for offset, frame in outgoing.difference.frames():
                batch.chunks.append(Chunk(index, offset, frame))
                filled += len(frame)
                expanded += min(BLOCK_BYTES, size - offset)
                if filled >= CHUNK_BYTES or expanded + BLOCK_BYTES > EXPANDED_BYTES:
                    yield batch
                    batch, filled, placed, expanded = Batch(), 0, 0, 0
            continue
        location = write(outgoing)
        batch.declarations.append(outgoing.declaration(location))
        if location is not None:
            placed += size
            if placed >= PLACED_BYTES:
                yield batch
                batch, filled, placed, expanded = Batch(), 0, 0, 0
            continue
        offset = 0
        for owners, data, complete in in_order(outgoing):
            left = data
            while left:
                piece = left[: CHUNK_BYTES - filled]
                batch.chunks.append(Chunk(index, offset, piece))
                batch.owners += owners
                batch.complete += complete
                left = left[len(piece) :]
                offset += len(piece)
                filled += len(piece)
                if filled >= CHUNK_BYTES:
                    yield batch
                    batch, filled, placed, expanded = Batch(), 0, 0, 0
    if batch.declarations or batch.chunks:
        yield batch


def in_order(outgoing: OutgoingTensor) -> Iterator[tuple[Sequence[Tensor], memoryview, Sequence[DeviceMoment]]]:
    """Yields the payload in order, as views of host memory.

    Each comes with the tensors that must be kept while it is used, and with the moments at which it is complete, before
    which it must not be read: see `host_pieces`.
    """
    if not outgoing.made and outgoing.layout.payload_bytes == outgoing.layout.span_bytes:
        yield [outgoing.tensor], dense_bytes(outgoing.tensor, outgoing.layout), []
        return
    for piece, complete in host_pieces(outgoing.tensor, outgoing.layout, outgoing.made):
        yield [piece, outgoing.tensor], host_bytes(piece), complete
