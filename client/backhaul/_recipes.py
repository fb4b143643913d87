"""Reads off autograd's graph how a tensor follows from outputs of segments.

Only what the graph tells in full is read: residual adds, scalar factors, views. A norm, a dropout mask, a gate, or a
tensor without gradient is not in it; what depends on them is kept. See NOTE [Lineage].
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backhaul._graft import frame_of
from backhaul._lineage import Input, Leaf, Lineage, Op, Output, Recipe, ends_of
from backhaul_runtime.layout import Layout
from backhaul_runtime.recording import version_of

_MOST_NODES = 16
_LEAF = "torch::autograd::AccumulateGrad"


class _UnreadableError(Exception):
    """The graph does not tell how a tensor came about."""


def recipe_of(tensor: Tensor, layout: Layout, edge: GradientEdge) -> Recipe | None:
    """How a tensor follows from outputs of segments; None where it does not, or not by ops that can be read.

    Args:
        tensor: Met by a call that has just ended.
        layout: When the call met it.
        edge: Its place in the graph.
    """
    if layout.dtype.is_complex or layout.negative or layout.memory_order is None:
        return None
    try:
        recipe = _Reader(edge.node).read(edge.node, edge.output_nr)
    except (_UnreadableError, RuntimeError, AttributeError):  # the latter from a graph that was freed
        return None
    is_output = any(isinstance(end, Output) for end in ends_of(recipe))
    return recipe if is_output and version_of(tensor) == _version(recipe) else None


class _Reader:
    """Reads from a node on.

    Attributes:
        inputs: What the segments in reach started from, by the places that it has in the graph.
    """

    def __init__(self, start: Node) -> None:
        self.inputs: dict[tuple[Node, int], Input] = {}
        reached = {(start, 0)}
        for _ in range(_MOST_NODES):
            reached = {place for place in reached if place not in self.inputs}
            if not reached:
                return
            # The latest first: what a segment started from is found before what that came from, and not looked into.
            place = max(reached, key=lambda place: place[0]._sequence_nr())
            reached.remove(place)
            node = place[0]
            following = [(n, output_nr) for n, output_nr in node.next_functions if n is not None]
            if (lineage := _lineage_of(node)) is not None:
                for found, index in zip(following, lineage.uses, strict=True):
                    if not lineage.recording.sources[index].is_written:
                        self.inputs[found] = Input(lineage, index)
            elif node.name() in _READERS:
                reached.update(following)
        raise _UnreadableError

    def read(self, node: Node, output_nr: int) -> Recipe:
        """The recipe of a node's output."""
        if (found := self.inputs.get((node, output_nr))) is not None:
            return found
        if (lineage := _lineage_of(node)) is not None:
            return Output(lineage, output_nr)
        if node.name() == _LEAF:
            return Leaf(node.variable.detach())  # type: ignore[attr-defined]
        if (reader := _READERS.get(node.name())) is None:
            raise _UnreadableError
        function, count = reader(node)
        operands = node.next_functions[:count]
        if any(operand is None for operand, _ in operands):  # a number, or a tensor without gradient
            raise _UnreadableError
        return Op(function, tuple(self.read(operand, nr) for operand, nr in operands if operand is not None))


def _lineage_of(node: Node) -> Lineage | None:
    frame = frame_of(node)
    lineage = frame.lineage if frame is not None else None
    return lineage if lineage is not None and lineage.durability != "none" else None


def _version(recipe: Recipe) -> int:
    """The version counter of what nobody wrote to: a view shares that of what it is a view of."""
    match recipe:
        case Output(lineage, position):
            return lineage.versions[position]
        case Op(_View(), (operand,)):
            return _version(operand)
    return 0


class _View(partial[Tensor]):
    """A function whose result may share its operand's memory."""


Reader = Callable[[Any], tuple[Callable[..., Tensor], int]]
"""Gives for a node of autograd's graph what it did to its first so many operands."""


def _sum(function: Callable[..., Tensor]) -> Reader:
    return lambda node: (partial(function, alpha=node._saved_alpha), 2)


def _factor(function: Callable[..., Tensor]) -> Reader:
    def read(node: Any) -> tuple[Callable[..., Tensor], int]:
        if node.next_functions[1][0] is not None:
            raise _UnreadableError
        saved = node._raw_saved_other
        # Where hooks packed it, asking for it would run them: a segment's would recompute it.
        if getattr(saved, "unpack_hook", saved) is not None or not _is_number(saved.data):
            raise _UnreadableError
        factor = saved.data.item()
        return lambda operand: function(operand, factor), 1

    return read


def _is_number(value: Tensor | None) -> bool:
    return value is not None and value.dim() == 0 and value.device.type == "cpu"


def _reshaped(node: Any) -> tuple[Callable[..., Tensor], int]:
    shape = tuple(node._input_metadata[0].shape)
    return _View(lambda operand: operand.reshape(shape)), 1


def _signed(value: int) -> int:
    """Autograd shows negative dimensions as unsigned."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _view(function: Callable[..., Tensor], *names: str) -> Reader:
    def read(node: Any) -> tuple[Callable[..., Tensor], int]:
        values = [getattr(node, f"_saved_{name}") for name in names]
        signed = [list(map(_signed, v)) if isinstance(v, tuple) else _signed(int(v)) for v in values]
        return _View(lambda operand: function(operand, *signed)), 1

    return read


_READERS: dict[str, Reader] = {
    "AddBackward0": _sum(torch.add),
    "SubBackward0": _sum(torch.sub),
    "MulBackward0": _factor(torch.mul),
    "DivBackward0": _factor(torch.div),
    "NegBackward0": lambda node: (operator.neg, 1),
    "CloneBackward0": lambda node: (torch.clone, 1),
    **dict.fromkeys(
        (
            "AliasBackward0",
            "ReshapeAliasBackward0",
            "SqueezeBackward0",
            "SqueezeBackward1",
            "SqueezeBackward2",
            "UnsafeViewBackward0",
            "UnsqueezeBackward0",
            "ViewBackward0",
        ),
        _reshaped,
    ),
    "PermuteBackward0": _view(torch.permute, "dims"),
    "SelectBackward0": _view(torch.select, "dim", "index"),
    "SliceBackward0": _view(torch.ops.aten.slice.Tensor, "dim", "start", "end", "step"),
    "TBackward0": _view(torch.t),
    "TransposeBackward0": _view(torch.transpose, "dim0", "dim1"),
}
