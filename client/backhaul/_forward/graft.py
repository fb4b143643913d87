"""The autograd nodes that replace the graph of a segment.

NOTE [Graft]
1. One node, the graft, receives the finished outputs inside a tuple and returns them detached, so that the segment's
   interior graph dies with the call. As plain arguments they would keep that graph alive.
2. Behind the graft is a stand-in for each interior node that used a source or a cast. It passes on the contributions of
   that node and has its sequence number, so autograd runs it when it would have run the node. Thus parameters get their
   gradients in the same order as without checkpointing, and contributions to one tensor are added in that order too
   (see `backhaul_runtime.torch_internals.graph_uses`). All uses of a boundary share one stand-in, which hands their
   contributions on in that order: nothing outside the segment adds to the boundary's gradient in between.
3. With at most one parameter and without autocast there is no order to preserve, and one stand-in passes on everything.
   Under autocast the call may have made a cast that other code uses later.
4. Only autograd holds the frame, as the packed form of a saved tensor, and backward gets it by unpacking that. So the
   frame dies when autograd frees its saved tensors, a second backward raises torch's own error, and retain_graph works.
5. A call whose outputs follow from each other has a graft for each stage, see `find_stages`. The graft of the later
   stage leads to the outputs of the earlier one, so hooks of those outputs see the gradients.
6. If a stage has several outputs, each has a node of its own before the graft, with the sequence number of the node
   that produced it. So hooks on outputs run in the same order as without checkpointing.
7. The graft keeps what a stand-in returned in forward: a tensor without memory, through which a backward that is
   differentiated itself reaches the source.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backhaul._backward.frame import Frame
from backhaul._forward.graft_plan import GraftStage
from backhaul_runtime.tensors.layout import with_memory
from backhaul_runtime.torch_internals.graph_entries import is_history_node, with_history_of
from backhaul_runtime.torch_internals.private import (
    HOOK_METHODS,
    DisableTorchFunctionAndModes,
    applying,
    backward_class,
    is_node_of,
    pop_saved_tensor_hooks,
    sequence_number,
    set_sequence_number,
)
from backhaul_runtime.torch_internals.storages import storage_key

_PLACEHOLDER = torch.empty(0)


class _StandIn(torch.autograd.Function):
    """Passes contributions on in the place of an interior node (Rule 2)."""

    @staticmethod
    def forward(ctx: Any, *used: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([_without_memory(tensor) for tensor in used])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


def _without_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same dtype, shape and device whose elements share one address."""
    return torch.empty_strided(tensor.shape, [0] * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


class _Unpacked(threading.local):
    """The frame that a backward in this thread has unpacked. Others may also read `saved_tensors` of a graft."""

    is_wanted = False
    frame: Frame | None = None


_unpacked = _Unpacked()


def _packing(frame: Frame) -> Callable[[Tensor], Frame | Tensor]:
    """Returns the pack hook under which a graft saves its placeholder: the frame takes the place of it."""

    def pack(tensor: Tensor) -> Frame | Tensor:
        if storage_key(tensor) == storage_key(_PLACEHOLDER):
            return frame
        pop_saved_tensor_hooks()  # Ctrl-C has kept the hook from being taken off: what the caller saves stays as it is
        return tensor.detach()

    return pack


def _unpack(packed: Frame | Tensor) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if _unpacked.is_wanted:
        _unpacked.frame = packed
    return _PLACEHOLDER


def _consumed() -> None:
    """Stands where a graft refers to its frame, once an accumulation block has run the backward."""


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, frame: Frame, stage: GraftStage, outputs: tuple[Tensor, ...], *handed_on: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.frame = weakref.ref(frame)
        ctx.positions = stage.outputs
        ctx.ways = dict(zip(stage.ways, handed_on, strict=True))  # Rule 7
        ctx.is_hooked = False
        ctx.save_for_backward(_PLACEHOLDER)
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if ctx.frame is _consumed:
            raise RuntimeError("Trying to backward through a segment a second time, after an accumulation block did it")
        _unpacked.is_wanted = True
        try:
            ctx.saved_tensors  # noqa: B018  unpacks the frame (Rule 4), or raises torch's error if the graph was freed
        finally:
            _unpacked.is_wanted = False
        frame, _unpacked.frame = _unpacked.frame, None
        assert frame is not None
        given = {
            position: with_memory(gradient)
            for position, gradient in zip(ctx.positions, gradients, strict=True)
            if gradient is not None
        }
        contributions = frame.gradients(given, ctx.ways)
        return None, None, None, *[contributions[index].gradient for index in ctx.ways]


def _notes_hooks(register: Callable[..., Any]) -> Callable[..., Any]:
    def registering(node: Any, *args: Any) -> Any:
        node.is_hooked = True
        return register(node, *args)

    return registering


for _name in HOOK_METHODS:
    setattr(backward_class(_Graft), _name, _notes_hooks(getattr(backward_class(_Graft), _name)))


@dataclass(frozen=True, slots=True, eq=False)
class GraftEdges:
    """A graft, as a part of the graph of a loss.

    Attributes:
        frame: What the trainer keeps of the segment.
        target: The graft and 0: where the gradient of the segment's first output is summed up.
        nodes: The graft and its stand-ins.
        contributions: The index of each contribution that the segment's backward returns, with the node and the number
            of the node's input that it goes to, in the order in which autograd adds them.
        numbers: The sequence number of each contribution's stand-in, by the same index.
    """

    frame: Frame
    target: tuple[Node, int]
    nodes: frozenset[Node]
    contributions: Sequence[tuple[int, tuple[Node, int]]]
    numbers: Mapping[int, int]

    def why_not_deferred(self) -> str:
        """Returns why the segment's backward can run nowhere but in autograd; empty if a worker can run it alone."""
        graft: Any = self.target[0]
        output = graft.output()
        if graft.is_hooked or (output is not None and output.retains_grad):
            return "a hook on a boundary, or retain_grad, must see its gradient"
        if len(graft.positions) > 1 or self.frame.uses.is_staged:
            return "a segment returns several differentiable tensors"
        return "" if self.frame.remote is not None else self.frame.local_reason or "the trainer recomputes it"

    def consume(self) -> None:
        """Makes a later backward through the graft an error, as one through a graph that was freed is."""
        graft: Any = self.target[0]
        graft.frame = _consumed


def is_own_node(node: Node) -> bool:
    """Whether a node was made by Backhaul."""
    return is_node_of(node, _Graft) or is_node_of(node, _StandIn) or is_history_node(node)


def graft_edges(node: Node) -> GraftEdges | None:
    """Returns what a node contributes to if it is a graft; None for other nodes, and for a graft that was consumed."""
    graft: Any = node
    frame = graft.frame() if is_node_of(node, _Graft) else None
    if frame is None:
        return None
    contributions = []
    for index, (stand_in, number) in zip(graft.ways, graft.next_functions, strict=True):
        if stand_in is not None and (end := stand_in.next_functions[number])[0] is not None:
            contributions.append((-sequence_number(stand_in), number, index, end, stand_in))
    contributions.sort(key=lambda contribution: contribution[:2])
    return GraftEdges(
        frame,
        (node, 0),
        frozenset({node, *[stand_in for *_, stand_in in contributions]}),
        [(index, end) for _, _, index, end, _ in contributions],
        {index: -number for number, _, index, _, _ in contributions},
    )


def origin_of(edge: GradientEdge) -> tuple[Frame, int] | None:
    """Returns the frame and output position of a tensor that a graft returned; None if it has no living frame."""
    graft: Any = edge.node
    number = edge.output_nr
    if is_history_node(edge.node):
        graft, number = graft.next_functions[0]
    if not is_node_of(graft, _Graft):
        return None
    frame: Frame | None = graft.frame()
    return None if frame is None else (frame, graft.positions[number])


def graft(
    frame: Frame, outputs: Sequence[Tensor], used: Sequence[Tensor], plan: Sequence[GraftStage], later: int = 0
) -> tuple[Tensor, ...]:
    """Returns the outputs with the segment as one autograd node behind them, or one node for each stage.

    Args:
        frame: The frame of the segment. Autograd owns it from now on.
        outputs: Differentiable outputs that share no storage with a source or with each other.
        used: The sources of the segment, then its casts.
        plan: The grafts, from `graft_plan`.
        later: Added to the sequence numbers in the plan, if they are those of an earlier call.
    """
    grafted = list(outputs)
    with torch.enable_grad():
        for stage in plan:
            handed_on = _stand_ins(stage, [*used, *grafted], later)
            own = tuple([outputs[position] for position in stage.outputs])
            with torch.autograd.graph.saved_tensors_hooks(_packing(frame), _unpack):
                made = _apply_graft(frame, stage, own, *handed_on)
            made[0].grad_fn.output = weakref.ref(made[0])
            set_sequence_number(made[0], max([sequence_number(output.grad_fn) for output in own if output.grad_fn]))
            for position, tensor in zip(stage.outputs, made, strict=True):
                grafted[position] = tensor if len(made) == 1 else _own_node(tensor, outputs[position])
                vars(grafted[position]).update(vars(outputs[position]))  # attributes that the function has set
    return tuple(grafted)


def _own_node(of_graft: Tensor, output: Tensor) -> Tensor:
    """Returns an output with a node of its own (Rule 6)."""
    made = with_history_of(output, of_graft)
    assert output.grad_fn is not None
    set_sequence_number(made, sequence_number(output.grad_fn))
    return made


def _stand_ins(stage: GraftStage, tensors: Sequence[Tensor], later: int) -> list[Tensor]:
    """Returns what the stand-ins of a stage return for each of its contributions."""
    made: list[Tensor] = [_PLACEHOLDER] * len(stage.ways)
    with DisableTorchFunctionAndModes():
        for sequence, numbers, positions, is_alias in stage.stand_ins:
            if is_alias:
                first = made[positions[0]] = tensors[numbers[0]][...]
            else:
                stand_ins = _apply_stand_in(*[tensors[number] for number in numbers])
                first = stand_ins[0]
                for position, stand_in in zip(positions, stand_ins, strict=True):
                    made[position] = stand_in
            if sequence is not None:
                set_sequence_number(first, later + sequence)
    return made


_apply_graft: Callable[..., Any] = applying(_Graft)
_apply_stand_in: Callable[..., Any] = applying(_StandIn)
