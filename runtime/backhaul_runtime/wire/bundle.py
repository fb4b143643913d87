"""Several tensors as few: those that share memory travel once, as bytes, with a view for each.

Autograd saves views: a query, a key and a value of one projection, a matrix and its transpose. Sent one by one they
would take their memory twice, on the wire and on the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.layout import ALIGNMENT_BYTES, Layout, byte_view, layout_of, view_at
from backhaul_runtime.torch_internals.storages import storage_key
from backhaul_runtime.wire.tensor_stream import OutgoingTensor, decode_layout, encode_layout


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as (part of) one of a bundle's parcels.

    Attributes:
        position: The position of the tensor among those requested.
        parcel: Index of the parcel.
        layout: None for the parcel itself, else how to view the parcel's bytes.
        offset_bytes: The offset of the view in its tensor.
    """

    position: int
    parcel: int
    layout: Layout | None = None
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """Parcels to send, and what each position is of them."""

    parcels: tuple[OutgoingTensor, ...]
    views: tuple[View, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parcels."""
        return sum(parcel.layout.span_bytes for parcel in self.parcels)


def bundle(tensors: Sequence[tuple[int, Tensor]]) -> Bundle:
    """Bundles tensors given with their positions. Shares their memory; parcels come in the order of first use.

    Raises:
        UnsupportedTensorError: For one that has no bytes to send.
    """
    groups: dict[int, list[tuple[int, Layout, Tensor]]] = {}
    for position, tensor in tensors:
        layout = layout_of(tensor)  # first: what has no bytes has no storage either
        groups.setdefault(storage_key(tensor), []).append((position, layout, tensor))
    parcels: list[OutgoingTensor] = []
    views: list[View] = []
    for members in groups.values():
        first = members[0]
        if all(layout == first[1] and _start(tensor) == _start(first[2]) for _, layout, tensor in members):
            views += [View(position, len(parcels)) for position, _, _ in members]
            parcels.append(OutgoingTensor(first[2].detach(), first[1]))
            continue
        low = min(_start(tensor) for _, _, tensor in members)
        high = max(_start(tensor) + layout.span_bytes for _, layout, tensor in members)
        low -= low % ALIGNMENT_BYTES  # so that every view's address keeps its place modulo 64
        views += [View(position, len(parcels), layout, _start(tensor) - low) for position, layout, tensor in members]
        parcels.append(OutgoingTensor.of(byte_view(first[2], low, high - low)))
    return Bundle(tuple(parcels), tuple(views))


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def unbundle(tensors: Sequence[Tensor], views: Sequence[View]) -> dict[int, Tensor]:
    """The tensors by position, sharing memory as they did. Raises TransferError for a view outside its parcel."""
    for view in views:
        if view.parcel >= len(tensors):
            raise TransferError(f"a view names tensor {view.parcel} of {len(tensors)}")
    return {view.position: view_of(tensors[view.parcel], view) for view in views}


def view_of(parcel: Tensor, view: View) -> Tensor:
    """A view of its parcel. Raises TransferError where it does not fit."""
    layout = view.layout
    if layout is None:
        return parcel
    start = parcel.storage_offset() * parcel.element_size() + view.offset_bytes
    if view.offset_bytes + layout.span_bytes > parcel.nbytes or start % layout.dtype.itemsize:
        raise TransferError(f"a view of {layout} at byte {view.offset_bytes} does not fit {parcel.nbytes} bytes")
    return view_at(parcel, view.offset_bytes, layout)


def encode_view(view: View) -> segment_pb2.View:
    """The view as it stands in a message."""
    message = segment_pb2.View(position=view.position, tensor=view.parcel)
    if view.layout is not None:
        message.spec.CopyFrom(segment_pb2.ViewSpec(tensor=encode_layout(view.layout), offset_bytes=view.offset_bytes))
    return message


def decode_view(message: segment_pb2.View) -> View:
    """The view a message describes. Raises TransferError for a layout that no tensor can have."""
    if not message.HasField("spec"):
        return View(message.position, message.tensor)
    return View(message.position, message.tensor, decode_layout(message.spec.tensor), message.spec.offset_bytes)
