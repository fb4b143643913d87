"""The node that stands for a whole segment in the trainer's graph.

NOTE [Graft]
1. It receives the finished outputs inside a tuple and returns them detached, so that the segment's interior graph dies
   with the call. As plain arguments they would keep it alive.
2. Its inputs are the sources that take gradients, once per use, last use first: autograd then adds the contributions as
   it would have without checkpointing (see `backhaul_runtime.uses`).
3. Autograd alone holds the frame, as the packed form of a saved tensor. So the frame goes when autograd lets go of what
   it saved, a second backward meets torch's own error, and retain_graph works.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backhaul._frame import Frame
from backhaul_runtime.errors import DoubleBackwardError
from backhaul_runtime.layout import with_memory

_PLACEHOLDER = torch.empty(0)
_NODE = "_GraftBackward"


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, frame: Frame, outputs: tuple[Tensor, ...], *uses: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.frame = weakref.ref(frame)  # Rule 3
        ctx.save_for_backward(_PLACEHOLDER)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises torch's error where the graph was freed
        frame: Frame = ctx.frame()
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                f'segment {frame.name}: create_graph=True needs its interior graph, which returns="gradients" does not '
                'keep. Use returns="activations" for it',
                segment=frame.name,
            )
        given = {position: with_memory(gradient) for position, gradient in enumerate(gradients) if gradient is not None}
        return None, None, *[contribution.gradient for contribution in frame.gradients(given)]


def frame_of(node: Node) -> Frame | None:
    """The frame behind a node of the graph, if it is a graft's and still there."""
    found = getattr(node, "frame", None) if node.name() == _NODE else None
    return found() if found is not None else None


def graft(frame: Frame, outputs: Sequence[Tensor], uses: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the outputs with the segment as one node behind them.

    Args:
        frame: Of the segment; from now on autograd holds it.
        outputs: Differentiable, none sharing storage with a source or with another.
        uses: A source per use, in the order of `Frame.gradients`.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: frame, lambda _: _PLACEHOLDER):
        return _Graft.apply(frame, tuple(outputs), *uses)  # type: ignore[no-any-return, no-untyped-call]
