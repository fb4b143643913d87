"""Rebuilds tensors from the stream of messages that `tensor_batches` describes.

The receiver checks declarations before it allocates, and offsets as chunks arrive. It returns a tensor only after its
last byte has arrived.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import LimitError, TransferError
from backhaul_runtime.tensors.buffer_pool import BUFFERS
from backhaul_runtime.tensors.differences import BLOCK_BYTES, BlockDecoder
from backhaul_runtime.tensors.digest import content_digest, device_sums, read_sums, tensor_address
from backhaul_runtime.tensors.layout import (
    Layout,
    allocate,
    fill,
    host_bytes,
    layout_of,
    payload,
    with_bits,
)
from backhaul_runtime.tensors.staging import is_staged, to_device
from backhaul_runtime.wire.layout_codec import decode_layout
from backhaul_runtime.wire.protocol import MAX_DECLARED
from backhaul_runtime.wire.splicing import MAX_CHUNKS, Batch, Chunk, TensorMessage, too_many_parts
from backhaul_runtime.wire.tensor_batches import EXPANDED_BYTES, may_differ, width_in


class _StreamedTensor:
    """A tensor that arrives in chunks, on the host or directly on a device."""

    def __init__(self, layout: Layout, address: bytes, device: torch.device | None, *, is_for_store: bool) -> None:
        self.layout = layout
        self.address = address
        self.received_bytes = 0
        device = device if device is not None and layout.is_on_accelerator else torch.device("cpu")
        # Hashes each chunk while it is in the CPU's cache. An accelerator's digest is another function.
        self._content = xxhash.xxh3_128() if is_for_store and layout.device == "cpu" else None
        self.is_staged = is_staged(device)
        self.has_device_digest = self.is_staged and self._content is None
        # Without gaps the chunks are copied to their final place. With gaps `finish` spreads the payload.
        self.tensor = allocate(layout, device, None if self.is_staged else BUFFERS.take)
        dense = layout.payload_bytes == layout.span_bytes
        self.data = (
            payload(self.tensor, layout)
            if dense
            else torch.empty(layout.payload_bytes, dtype=torch.uint8, device=device)
        )
        self.target = memoryview(b"") if self.is_staged else host_bytes(self.data)

    def add(self, chunk: "Chunk | tensor_pb2.TensorChunk") -> None:
        end = chunk.offset_bytes + len(chunk.data)
        if chunk.offset_bytes != self.received_bytes or end > self.layout.payload_bytes:
            raise TransferError(
                f"chunk of bytes {chunk.offset_bytes} to {end} came where {self.received_bytes} of "
                f"{self.layout.payload_bytes} were there"
            )
        if self._content is not None:
            self._content.update(chunk.data)
        if self.is_staged:
            to_device(chunk.data, self.data[chunk.offset_bytes : end])
        elif chunk.data:
            target = np.frombuffer(self.target[chunk.offset_bytes : end], np.uint8)
            np.copyto(target, np.frombuffer(chunk.data, np.uint8))  # releases the GIL, unlike the assignment to a slice
        self.received_bytes = end

    @property
    def is_complete(self) -> bool:
        return self.received_bytes == self.layout.payload_bytes

    def finish(self) -> Tensor:
        if not self.is_complete:
            raise TransferError(f"{self.received_bytes} bytes came of the {self.layout.payload_bytes} declared")
        if self.layout.payload_bytes != self.layout.span_bytes:
            fill(self.tensor, self.data, self.layout)
        return with_bits(self.tensor, self.layout)

    def host_digest(self) -> bytes:
        """Returns the content digest of a tensor on the host."""
        return self._content.digest() if self._content is not None else content_digest(self.finish(), self.layout)

    def forget(self) -> None:
        self.target = memoryview(b"")  # first: the view does not keep the memory alive
        self.tensor = self.data = torch.empty(0)


class _DifferentTensor(_StreamedTensor):
    """A tensor that arrives as its difference from one that is stored, block by block."""

    def __init__(
        self, layout: Layout, address: bytes, device: torch.device | None, base: Tensor, *, is_for_store: bool
    ) -> None:
        base_layout = layout_of(base)
        if not may_differ(layout) or not may_differ(base_layout) or not address:
            raise TransferError(f"a tensor of {layout} cannot be sent as a difference")
        if (base_layout.dtype, base_layout.payload_bytes) != (layout.dtype, layout.payload_bytes):
            raise TransferError(f"a tensor of {layout} is declared as the difference from one of {base_layout}")
        super().__init__(layout, address, device, is_for_store=is_for_store)
        self._base: Tensor | None = payload(base.detach(), base_layout)
        self._decoder = BlockDecoder()

    def expanded_bytes(self, chunk: "Chunk | tensor_pb2.TensorChunk") -> int:
        return max(0, min(BLOCK_BYTES, self.layout.payload_bytes - chunk.offset_bytes))

    def add(self, chunk: "Chunk | tensor_pb2.TensorChunk") -> None:
        size = self.expanded_bytes(chunk)
        if self._base is None or not size or chunk.offset_bytes != self.received_bytes:
            raise TransferError(
                f"a compressed block at byte {chunk.offset_bytes} came where {self.received_bytes} of "
                f"{self.layout.payload_bytes} were there"
            )
        before = self._base[chunk.offset_bytes : chunk.offset_bytes + size].cpu()
        block = self._decoder.decode(chunk.data, np.frombuffer(host_bytes(before), np.uint8), width_in(self.layout))
        super().add(Chunk(chunk.tensor, chunk.offset_bytes, block.data))
        if self.is_complete:
            self._base = None

    def forget(self) -> None:
        self._base = None
        super().forget()


class _SharedTensor:
    """A host tensor whose elements lie in shared memory."""

    is_complete = True
    has_device_digest = False

    def __init__(self, layout: Layout, address: bytes, read: Callable[[], Tensor], *, is_for_store: bool) -> None:
        self.layout = layout
        self.address = address
        self._read = read
        self._tensor: Tensor | None = None
        # Computed now, while the sender writes the next tensor.
        self._content = content_digest(self.finish(), layout) if is_for_store else b""

    def add(self, chunk: "Chunk | tensor_pb2.TensorChunk") -> None:
        raise TransferError(f"a chunk came for tensor {chunk.tensor}, which is in shared memory")

    def finish(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._read()
        return self._tensor

    def host_digest(self) -> bytes:
        """As that of `_StreamedTensor`."""
        return self._content

    def forget(self) -> None:
        self._tensor = None


def checked_address(layout: Layout, content: bytes, expected: bytes) -> bytes:
    """Returns a tensor's address. Raises TransferError if it differs from `expected`, unless that is empty."""
    actual = tensor_address(layout, content)
    if expected and actual != expected:
        raise TransferError(
            f"a tensor sent as {expected.hex()} has the contents of {actual.hex()}: "
            "it changed while it was read, or was damaged"
        )
    return actual


def _no_memory(location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
    raise TransferError(f"a tensor is declared in region {location.region}, where no memory is shared")


def _no_base(address: bytes) -> Tensor:
    raise TransferError(f"a tensor is declared as the difference from {address.hex()}, where none is taken")


class TensorReceiver:
    """Rebuilds the tensors of one stream.

    Args:
        admit: Called with each layout before memory is allocated for it; raises an error to refuse the tensor.
        device: The device for tensors whose layout is on an accelerator; None for the host. Work that the calling
            thread queues on its stream afterwards sees the elements.
        locate: Finds a tensor in shared memory. Returns a function that is called once and returns the tensor. Raises
            TransferError for an invalid location.
        base: Finds the tensor that a declared one differs from, by its address. Called before `admit`. Raises an error
            if there is none.
        is_for_store: Whether the caller will call `stored`, so that digests are computed as chunks arrive.

    Attributes:
        spared_bytes: Bytes of elements that were not sent, because only differences from other tensors were.
    """

    def __init__(
        self,
        admit: Callable[[Layout], None] | None = None,
        device: torch.device | None = None,
        locate: Callable[[tensor_pb2.Location, Layout], Callable[[], Tensor]] = _no_memory,
        base: Callable[[bytes], Tensor] = _no_base,
        *,
        is_for_store: bool = False,
    ) -> None:
        self._admit = admit
        self._device = device
        self._locate = locate
        self._base = base
        self._is_for_store = is_for_store
        self.spared_bytes = 0
        self._arrivals: list[_StreamedTensor | _SharedTensor] = []
        self._complete = 0  # how many of the first are complete

    def add_carried(self, carried: TensorMessage[Any]) -> None:
        """Adds the tensors of a message, if it has any. Raises as `add` does."""
        if carried.tensors is not None:
            self.add(carried.tensors)

    def add(self, batch: "Batch | tensor_pb2.TensorBatch") -> None:
        """Adds the declarations and chunks of a message.

        Raises:
            LimitError: The message has more declarations or chunks than one message may have.
            TransferError: The message contradicts itself or earlier messages of the stream.
        """
        self.declare(batch)
        self.fill(batch)

    def declare(self, batch: "Batch | tensor_pb2.TensorBatch") -> None:
        """Adds the declarations of a message, before its chunks. Raises as `add` does."""
        if len(batch.declarations) > MAX_DECLARED or len(batch.chunks) > MAX_CHUNKS:
            raise too_many_parts()
        for declaration in batch.declarations:
            layout = decode_layout(declaration.spec)
            if declaration.size_bytes != layout.payload_bytes:
                raise TransferError(f"{declaration.size_bytes} bytes are declared for a tensor of {layout}")
            differs = declaration.HasField("difference")
            base = self._base(declaration.difference.base) if differs else None
            if self._admit is not None:
                self._admit(layout)
            self._arrivals.append(self._arrival(declaration, layout, base))

    def fill_waits(self, batch: "Batch | tensor_pb2.TensorBatch") -> bool:
        """Whether `fill` waits for an accelerator: it then reads tensors there from which others differ."""
        return (
            self._device is not None
            and is_staged(self._device)
            and any(
                chunk.tensor < len(self._arrivals)
                and isinstance(arrival := self._arrivals[chunk.tensor], _DifferentTensor)
                and arrival.is_staged
                for chunk in batch.chunks
            )
        )

    def fill(self, batch: "Batch | tensor_pb2.TensorBatch") -> None:
        """Adds the chunks of a message whose declarations were added. Raises as `add` does."""
        expanded = 0
        for chunk in batch.chunks:
            if chunk.tensor >= len(self._arrivals):
                raise TransferError(f"a chunk came for tensor {chunk.tensor} of {len(self._arrivals)} declared")
            arrival = self._arrivals[chunk.tensor]
            if isinstance(arrival, _DifferentTensor):
                expanded += arrival.expanded_bytes(chunk)
                self.spared_bytes += arrival.expanded_bytes(chunk) - len(chunk.data)
                if expanded > EXPANDED_BYTES:
                    raise LimitError(
                        f"the compressed blocks of a message yield more than {EXPANDED_BYTES} bytes: send them in "
                        "several messages",
                        limit="decompressed bytes of a message",
                        most=EXPANDED_BYTES,
                        found=expanded,
                    )
            arrival.add(chunk)

    def _arrival(
        self, declaration: tensor_pb2.TensorDeclaration, layout: Layout, base: Tensor | None
    ) -> _StreamedTensor | _SharedTensor:
        address, is_for_store = declaration.address, self._is_for_store
        if base is not None:
            if declaration.HasField("location"):
                raise TransferError("a tensor is declared both in shared memory and as a difference")
            return _DifferentTensor(layout, address, self._device, base, is_for_store=is_for_store)
        if declaration.HasField("location"):
            located = self._locate(declaration.location, layout)
            return _SharedTensor(layout, address, located, is_for_store=is_for_store)
        return _StreamedTensor(layout, address, self._device, is_for_store=is_for_store)

    def addresses(self) -> list[bytes]:
        """Returns the addresses of the tensors that were declared with one, in order."""
        return [arrival.address for arrival in self._arrivals if arrival.address]

    @property
    def stored_waits(self) -> bool:
        """Whether `stored` waits for an accelerator, which computes digests."""
        return any(arrival.has_device_digest for arrival in self._arrivals)

    def is_complete(self, index: int) -> bool:
        """Returns whether all bytes of the `index`-th declared tensor have arrived."""
        return index < len(self._arrivals) and self._arrivals[index].is_complete

    def has_all(self, count: int) -> bool:
        """Returns whether the stream's tensors, of which there are `count`, are complete.

        Raises TransferError if more were declared.
        """
        if len(self._arrivals) > count:
            raise TransferError(f"{len(self._arrivals)} tensors were declared in an answer of {count}")
        while self.is_complete(self._complete):
            self._complete += 1
        return self._complete == count

    def tensor(self, index: int) -> Tensor:
        """Returns the `index`-th declared tensor. Raises TransferError if its bytes have not all arrived."""
        if index >= len(self._arrivals):
            raise TransferError(f"the stream ended before tensor {index}")
        return self._arrivals[index].finish()

    def forget(self, index: int) -> None:
        """Drops the reference to the `index`-th tensor, so that its memory can be freed."""
        self._arrivals[index].forget()

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the stream. Raises TransferError if bytes of any are missing."""
        return [arrival.finish() for arrival in self._arrivals]

    def stored(self) -> list[tuple[bytes, Tensor]]:
        """Returns the address and tensor of each. Waits for an accelerator once.

        Raises TransferError if contents and declared address differ.
        """
        finished = [(arrival, arrival.finish()) for arrival in self._arrivals]
        sums = [
            device_sums(payload(tensor.detach(), arrival.layout))
            for arrival, tensor in finished
            if arrival.has_device_digest
        ]
        on_device = iter(read_sums(sums))
        contents = [next(on_device) if arrival.has_device_digest else arrival.host_digest() for arrival, _ in finished]
        return [
            (checked_address(arrival.layout, content, arrival.address), tensor)
            for (arrival, tensor), content in zip(finished, contents, strict=True)
        ]
