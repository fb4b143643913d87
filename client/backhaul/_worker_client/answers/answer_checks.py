"""Checks that an answer of a worker fits its request, before anything of the answer is used.

A checksum proves that an answer arrived as it was sent. It does not prove that the worker answered this request.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.layout import Layout, from_payload, layout_of
from backhaul_runtime.wire.bundle import View, decode_view, unbundle


def contributions_in(
    result: segment_pb2.BackwardResult,
    tensors: Sequence[Tensor],
    due: Sequence[tuple[int, Layout]],
    summed: Collection[int],
    slots: Collection[int],
) -> list[Contribution]:
    """Returns the contributions in the answer to a backward.

    The answer is rejected unless all of this holds:

    - It has one contribution for each use of a source in forward's graph, in the same order.
    - A view belongs to the contribution that holds it, names a tensor of the answer and lies inside it. Each tensor of
      the answer is named by some view.
    - A gradient has the dtype and the shape that its use of the source requires, and is on that type of device. A
      gradient of rank 0 may be on another device: autograd moves it.
    - A source whose contributions were requested as a sum has a gradient at its first use only.
    - Of a source either all contributions have stayed on the worker or none.
    - Only contributions that may stay on the worker have stayed there, and no gradient was sent for them.

    Only the worker knows which of several gradients with equal dtype and shape belongs to which use, and whether a use
    has a gradient at all.

    Args:
        result: The worker's answer without its tensors.
        tensors: The tensors of the answer.
        due: The source and the layout of the gradient of each contribution, in order. Only dtype, shape and device of
            the layout count.
        summed: Sources whose contributions were requested as a sum.
        slots: Sources whose contributions may stay on the worker.

    Raises:
        TransferError: The answer does not fit the request.
    """
    sources = [contribution.source for contribution in result.contributions]
    used = [source for source, _ in due]
    if sources != used:  # contributions are added in this order, so another one would give other bits
        raise TransferError(f"the answer has gradients for the sources {sources}, one per use, but forward used {used}")
    stayed = {contribution.source for contribution in result.contributions if contribution.uncollected}
    # A gradient that stays where no later message adds it would be missing from the sum.
    if forbidden := stayed.difference(slots):
        raise TransferError(f"the worker kept gradients of the sources {sorted(forbidden)}, which was not allowed")
    sent = {contribution.source for contribution in result.contributions if contribution.HasField("view")}
    # The trainer adds those that were sent at once, but those that were kept later: another order, other bits. One that
    # is both sent and kept would be added twice.
    if stayed & sent:
        raise TransferError(f"the worker kept some gradients of the sources {sorted(stayed & sent)}, and sent others")
    views: list[View] = []
    for index, (contribution, before) in enumerate(zip(result.contributions, [None, *sources[:-1]], strict=True)):
        if not contribution.HasField("view"):  # it stayed, or its use has no gradient
            continue
        # The gradient of another use is added at another place, or belongs to another source.
        if contribution.view.position != index:
            raise TransferError(f"contribution {index} has the number {contribution.view.position}")
        # A second gradient beside the sum would be added twice. Those of a source follow each other.
        if contribution.source in summed and contribution.source == before:
            raise TransferError(f"source {contribution.source} has two contributions, but their sum was requested")
        views.append(decode_view(contribution.view))
    gradients = _unbundled(tensors, views)
    for index, gradient in gradients.items():
        source, layout = due[index]
        # Autograd would sum or cast another gradient until it fits, instead of raising an error.
        is_there = gradient.device.type == layout.device or not gradient.dim()
        if (gradient.dtype, tuple(gradient.shape)) != (layout.dtype, layout.shape) or not is_there:
            raise TransferError(
                f"a gradient of source {source} is {gradient.dtype} {list(gradient.shape)} on {gradient.device}, "
                f"but must be {layout.dtype} {list(layout.shape)} on {layout.device}"
            )
    return [Contribution(source, gradients.get(index)) for index, source in enumerate(sources)]


def _unbundled(tensors: Sequence[Tensor], views: Sequence[View]) -> Mapping[int, Tensor]:
    unnamed = set(range(len(tensors))) - {view.tensor_index for view in views}
    if unnamed:
        raise TransferError(f"tensors {sorted(unnamed)} of {len(tensors)} of the answer are not used by any view")
    return unbundle(tensors, views)


def wanted_outputs(contents: Sequence[bytes], layouts: Sequence[Layout]) -> list[Tensor]:
    """Returns the values of outputs from their bytes in memory order, one for each layout.

    Raises:
        TransferError: The answer does not fit the request.
    """
    if [*map(len, contents)] != [layout.payload_bytes for layout in layouts]:
        raise TransferError(f"the answer has outputs of {[*map(len, contents)]} bytes, which are not those of forward")
    return [
        from_payload(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(layout.device), layout)
        for part, layout in zip(contents, layouts, strict=True)
    ]


def saved_views(views: Iterable[segment_pb2.View], wanted: Collection[int]) -> dict[int, View]:
    """Returns where each saved tensor of an answer lies, by position.

    Args:
        views: The views in the answer.
        wanted: The positions that were requested.

    Raises:
        TransferError: The answer does not name exactly the requested positions, each once.
    """
    decoded = [decode_view(view) for view in views]
    counts = Counter(view.position for view in decoded)
    if counts != Counter(list(wanted)):
        raise TransferError(
            f"the answer has saved tensors at the positions {sorted(counts.elements())} instead of {sorted(wanted)}"
        )
    return {view.position: view for view in decoded}


def check_saved(position: int, tensor: Tensor, layout: Layout) -> None:
    """Raises TransferError if a saved tensor has another memory layout than autograd's tensor had in forward."""
    layout_here = layout_of(tensor)
    if (layout_here.header, layout_here.device) != (layout.header, layout.device):
        raise TransferError(f"saved tensor {position} has the layout {layout_here}, but autograd saved {layout}")
