"""Bundles tensors that share memory: their memory is sent once, with a view for each tensor.

Autograd saves views: query, key and value of one projection, or a matrix and its transpose. Sent separately they would
take their memory several times, on the wire and on the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.layout import Layout, alignment_of, byte_view, layout_of, view_at
from backhaul_runtime.torch_internals.storages import storage_key
from backhaul_runtime.wire.layout_codec import decode_layout, encode_layout
from backhaul_runtime.wire.tensor_batches import OutgoingTensor


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as all or part of one of a bundle's tensors.

    Attributes:
        position: The position of the tensor among those requested.
        tensor_index: The index of the bundle's tensor that holds its bytes.
        layout: How to view those bytes, or None if the view is the whole tensor.
        offset_bytes: Where the view begins in the bytes of that tensor.
    """

    position: int
    tensor_index: int
    layout: Layout | None = None
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors to send, and where in them each requested tensor lies."""

    tensors: tuple[OutgoingTensor, ...]
    views: tuple[View, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors to send."""
        return sum(outgoing.layout.span_bytes for outgoing in self.tensors)


def bundle(tensors: Sequence[tuple[int, Tensor]]) -> Bundle:
    """Bundles tensors given with their positions. Shares their memory; those to send are in the order of first use.

    Raises:
        UnsupportedTensorError: A tensor has no bytes to send.
    """
    groups: dict[int, list[tuple[int, Layout, Tensor]]] = {}
    for position, tensor in tensors:
        layout = layout_of(tensor)  # first, because a tensor without bytes has no storage either
        groups.setdefault(storage_key(tensor), []).append((position, layout, tensor))
    outgoing_tensors: list[OutgoingTensor] = []
    views: list[View] = []
    for members in groups.values():
        first = members[0]
        if all(layout == first[1] and _start(tensor) == _start(first[2]) for _, layout, tensor in members):
            views += [View(position, len(outgoing_tensors)) for position, _, _ in members]
            outgoing_tensors.append(OutgoingTensor(first[2].detach(), first[1]))
            continue
        low = min(_start(tensor) for _, _, tensor in members)
        high = max(_start(tensor) + layout.span_bytes for _, layout, tensor in members)
        low -= low % alignment_of(first[1].device)  # keeps the alignment of every view
        views += [
            View(position, len(outgoing_tensors), layout, _start(tensor) - low) for position, layout, tensor in members
        ]
        outgoing_tensors.append(OutgoingTensor.of(byte_view(first[2], low, high - low)))
    return Bundle(tuple(outgoing_tensors), tuple(views))


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def unbundle(tensors: Sequence[Tensor], views: Sequence[View]) -> dict[int, Tensor]:
    """Returns the tensors by position, sharing memory as before. Raises TransferError for a view outside its tensor."""
    for view in views:
        if view.tensor_index >= len(tensors):
            raise TransferError(f"a view names tensor {view.tensor_index} of {len(tensors)}")
    return {view.position: view_of(tensors[view.tensor_index], view) for view in views}


def view_of(tensor: Tensor, view: View) -> Tensor:
    """Returns the part of a tensor that a view describes. Raises TransferError if the view does not fit."""
    layout = view.layout
    if layout is None:
        return tensor
    start = tensor.storage_offset() * tensor.element_size() + view.offset_bytes
    if view.offset_bytes + layout.span_bytes > tensor.nbytes or start % layout.dtype.itemsize:
        raise TransferError(f"a view of {layout} at byte {view.offset_bytes} does not fit {tensor.nbytes} bytes")
    return view_at(tensor, view.offset_bytes, layout)


def encode_view(view: View) -> segment_pb2.View:
    """Encodes a view as a message."""
    message = segment_pb2.View(position=view.position, tensor=view.tensor_index)
    if view.layout is not None:
        message.spec.CopyFrom(segment_pb2.ViewSpec(tensor=encode_layout(view.layout), offset_bytes=view.offset_bytes))
    return message


def decode_view(message: segment_pb2.View) -> View:
    """Decodes a view. Raises TransferError for an impossible layout."""
    if not message.HasField("spec"):
        return View(message.position, message.tensor)
    return View(message.position, message.tensor, decode_layout(message.spec.tensor), message.spec.offset_bytes)
