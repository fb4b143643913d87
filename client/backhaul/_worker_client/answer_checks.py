"""What a worker's answer must be before anything of it is used.

A checksum shows that an answer came as it was sent. It does not show that the worker answered what it was asked.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.wire.bundle import View, decode_view, unbundle


def contributions_in(
    result: segment_pb2.BackwardResult,
    tensors: Sequence[Tensor],
    due: Sequence[tuple[int, Layout]],
    summed: Collection[int],
    slots: Collection[int],
) -> list[Contribution]:
    """The contributions that an answer to a backward consists of.

    An answer is refused unless all of this holds:

    - It has one contribution for each use of a source that forward's graph has, in the same order.
    - A view is that of the contribution that holds it, names a tensor of the answer and lies inside it. Each tensor of
      the answer is named by some view.
    - A gradient has the dtype and the shape that its use of the source takes, and is on that kind of device. A gradient
      of rank 0 may be on another device: autograd moves it.
    - A source whose contributions were asked for as a sum has a gradient at its first use alone.
    - Only what was allowed to stay on the worker is said to have stayed there, and no gradient came for it.

    Which gradient of several with the same dtype and shape belongs to which use, and whether a use has a gradient at
    all, only the worker knows.

    Args:
        result: The worker's answer without its tensors.
        tensors: That came with it.
        due: The source and the layout of the gradient of each contribution, in order. Only dtype, shape and device of
            the layout count.
        summed: Sources whose contributions were asked for as one.
        slots: Sources whose contributions may stay on the worker.

    Raises:
        TransferError: It is no answer to what was asked.
    """
    sources = [contribution.source for contribution in result.contributions]
    used = [source for source, _ in due]
    if sources != used:
        raise TransferError(f"gradients came for the sources {sources}, one per use, where forward used {used}")
    views: list[View] = []
    for index, contribution in enumerate(result.contributions):
        if not contribution.HasField("view"):
            if contribution.kept and contribution.source not in slots:
                raise TransferError(f"the worker kept a gradient of source {contribution.source}, which it may not")
            continue
        if contribution.kept or contribution.view.position != index:
            raise TransferError(
                f"contribution {index} came as number {contribution.view.position}"
                + (", and is said to be kept" if contribution.kept else "")
            )
        if contribution.source in summed and index and sources[index - 1] == contribution.source:
            raise TransferError(f"source {contribution.source} has two contributions where their sum was asked for")
        views.append(decode_view(contribution.view))
    gradients = _unbundled(tensors, views)
    for index, gradient in gradients.items():
        source, layout = due[index]
        is_there = gradient.device.type == layout.device or not gradient.dim()
        if (gradient.dtype, tuple(gradient.shape)) != (layout.dtype, layout.shape) or not is_there:
            raise TransferError(
                f"a gradient of source {source} came as {gradient.dtype} {list(gradient.shape)} on {gradient.device}, "
                f"it takes {layout.dtype} {list(layout.shape)} on {layout.device}"
            )
    return [Contribution(source, gradients.get(index)) for index, source in enumerate(sources)]


def _unbundled(tensors: Sequence[Tensor], views: Sequence[View]) -> Mapping[int, Tensor]:
    unnamed = set(range(len(tensors))) - {view.tensor_index for view in views}
    if unnamed:
        raise TransferError(f"tensors {sorted(unnamed)} of {len(tensors)} came for nothing")
    return unbundle(tensors, views)


def saved_views(views: Iterable[segment_pb2.View], wanted: Collection[int]) -> dict[int, View]:
    """What an answer to a recompute says of each saved tensor, by its position.

    Args:
        views: Where each saved tensor lies in the tensors that came with the answer.
        wanted: The positions that were asked for.

    Raises:
        TransferError: The answer does not name each of these positions once, and no other.
    """
    decoded = [decode_view(view) for view in views]
    counts = Counter(view.position for view in decoded)
    if counts != Counter(list(wanted)):
        raise TransferError(f"saved tensors came at the positions {sorted(counts.elements())}, not {sorted(wanted)}")
    return {view.position: view for view in decoded}


def check_saved(position: int, tensor: Tensor, layout: Layout) -> None:
    """Raises TransferError for a saved tensor that does not lie in memory as it did when autograd saved it."""
    layout_here = layout_of(tensor)
    if (layout_here.header, layout_here.device) != (layout.header, layout.device):
        raise TransferError(f"saved tensor {position} came as {layout_here}, autograd saved {layout}")
