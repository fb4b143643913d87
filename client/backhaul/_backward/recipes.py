"""Reads from autograd's graph how a tensor follows from outputs and sources of segments.

Only what the graph describes completely is read: residual additions, constant factors and views. Norms, dropout masks,
gates and tensors without gradients are not in the graph, so tensors that depend on them are kept. See NOTE [Lineage].

Nodes are marked if a segment returned or was given a tensor that they produced. So reading ends at any tensor between
two segments, and also at the inside of a segment that returns activations.
"""

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from backhaul._backward.lineage import Input, Leaf, Lineage, Op, Output, Recipe, ends_of
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.torch_internals.graph_uses import name_of
from backhaul_runtime.torch_internals.private import edge_of, saved_alpha, saved_other, version_of

_MOST_NODES = 16
_LEAF = "AccumulateGrad"
_MARKS = "backhaul"


class _UnreadableError(Exception):
    """The graph does not describe how a tensor was computed."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Marks that a segment returned or was given the tensor of a node.

    Attributes:
        kind: The class `Output` or the class `Input`.
        lineage: The lineage of the segment. The reference is weak, because the graph must not keep alive what only a
            past backward needed.
        number: Position among the outputs, or index among the sources.
        version: Version counter of the tensor at the end of the call.
    """

    kind: type[Output | Input]
    lineage: "weakref.ref[Lineage]"
    number: int
    version: int


def mark_returned(lineage: Lineage, outputs: Sequence[Tensor]) -> None:
    """Marks the nodes of a segment's outputs, by position among the outputs of its program."""
    for position, output in enumerate(outputs):
        _mark(edge_of(output), Output, lineage, position, output)


def mark_given(lineage: Lineage, tensors: Sequence[Tensor], edges: Sequence[tuple[int, GradientEdge]]) -> None:
    """Marks the nodes of the sources of which a segment took copies.

    Args:
        lineage: The lineage of the segment.
        tensors: The caller's object behind each source.
        edges: These sources by index, with their graph edges.
    """
    for index, edge in edges:
        _mark(edge, Input, lineage, index, tensors[index])


def _mark(edge: GradientEdge, kind: type[Output | Input], lineage: Lineage, number: int, tensor: Tensor) -> None:
    if lineage.durability != "none":
        _marks_of(edge.node)[edge.output_nr] = _Mark(kind, weakref.ref(lineage), number, version_of(tensor))


def _marks_of(node: Any) -> dict[int, _Mark]:
    """Returns the marks of a node, by its output. They live as long as the node."""
    marks: dict[int, _Mark] = node.metadata.setdefault(_MARKS, {})
    return marks


def recipe_of(tensor: Tensor, source: RecordedSource, edge: GradientEdge) -> Recipe | None:
    """Returns how a tensor follows from outputs and sources of segments; None if it does not, or cannot be read.

    Args:
        tensor: A source of a call that has just ended.
        source: The record of the source.
        edge: The graph edge of the tensor.
    """
    layout = source.layout
    if layout.dtype.is_complex or layout.negative or layout.memory_order is None:
        return None
    try:
        recipe, version = _read(edge.node, edge.output_nr, iter(range(_MOST_NODES)))
    except (_UnreadableError, RuntimeError, AttributeError):  # the latter for a graph that was freed
        return None
    if version != version_of(tensor) or all(isinstance(end, Leaf) for end in ends_of(recipe)):
        return None
    if isinstance(recipe, Input) and (layout.is_on_accelerator or recipe.source.address != source.address):
        return None  # it may have changed since; comparing would make forward wait for an accelerator
    return recipe


def _read(node: Node, output_nr: int, nodes_left: Iterator[int]) -> tuple[Recipe, int]:
    """Returns the recipe of a node's output, and the version counter of that output if it was not written to since."""
    mark = _marks_of(node).get(output_nr)
    if mark is not None and (lineage := mark.lineage()) is not None:
        return mark.kind(lineage, mark.number), mark.version
    name = name_of(node)
    if name == _LEAF:
        return Leaf(node.variable.detach()), 0  # type: ignore[attr-defined]
    if name not in _READERS or next(nodes_left, None) is None:
        raise _UnreadableError
    function, count = _READERS[name](node)
    operands = []
    for operand, operand_nr in node.next_functions[:count]:
        if operand is None:  # a number, or a tensor without gradient
            raise _UnreadableError
        operands.append(_read(operand, operand_nr, nodes_left))
    # A view shares the version counter of its base.
    version = operands[0][1] if isinstance(function, _View) else 0
    return Op(function, tuple(recipe for recipe, _ in operands)), version


class _View(partial[Tensor]):
    """A function whose result may share memory with its operand."""


Reader = Callable[[Any], tuple[Callable[..., Tensor], int]]
"""Returns, for a node of autograd's graph, the function that it applied and the number of its tensor operands."""


def _sum(function: Callable[..., Tensor]) -> Reader:
    return lambda node: (partial(function, alpha=saved_alpha(node)), 2)


def _factor(function: Callable[..., Tensor]) -> Reader:
    def read(node: Any) -> tuple[Callable[..., Tensor], int]:
        if node.next_functions[1][0] is not None:
            raise _UnreadableError
        other = saved_other(node)
        if other is None or not _is_number(other):
            raise _UnreadableError
        factor = other.item()
        return lambda operand: function(operand, factor), 1

    return read


def _is_number(value: Tensor | None) -> bool:
    return value is not None and value.dim() == 0 and value.device.type == "cpu"


def _reshaped(node: Any) -> tuple[Callable[..., Tensor], int]:
    shape = tuple(node._input_metadata[0].shape)
    return _View(lambda operand: operand.reshape(shape)), 1


def _signed(value: int) -> int:
    """Converts a dimension, because autograd stores negative ones as unsigned numbers."""
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
