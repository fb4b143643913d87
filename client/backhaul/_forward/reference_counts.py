"""Finds out whether anything besides the return value of a call refers to one of its differentiable outputs.

A graft replaces the outputs by new tensors in new containers. Any other holder of an old output (a forward hook, an
attribute of a module, a list that is returned and kept) would then hold a tensor outside the graph, whose hooks would
never run. Python cannot list the holders, so references are counted and compared with those of the returned containers.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.torch_internals.graph_uses import is_custom, leaf_nodes
from backhaul_runtime.torch_internals.private import base_of, container_node, leaf_of, leaf_references, pytree


def has_other_references(returned: list[Any], is_output: Callable[[Tensor], bool]) -> bool:
    """Whether an output in this list, whose only item is the return value of a call, has further references.

    References to tensors, to the tensors that they are views of, and to their autograd nodes are counted. The caller
    must hold them only through the list. A container of an unknown type counts as another holder.
    """
    accounted: Counter[int] = Counter()
    objects: dict[int, Any] = {}
    _visit(returned, is_output, accounted, objects, set())
    for key in objects:  # noqa: PLC0206  a name for the value would add a reference
        if sys.getrefcount(objects[key]) - accounted[key] > _IDLE:
            return True
        if isinstance(objects[key], Tensor) and _is_referenced(objects[key]):
            return True
    return False


def unreferenced_leaves(outputs: Sequence[Tensor], first_sequence: int) -> list[Tensor]:
    """Returns the leaves in the graph of a call to which nothing else refers, so that nobody can read their `.grad`.

    Args:
        outputs: The differentiable outputs of the call.
        first_sequence: Autograd's sequence number when the call began.
    """
    nodes = leaf_nodes(outputs, first_sequence)
    return [
        leaf
        for node in nodes
        if leaf_references(node) == _of_unreferenced_leaf() and (leaf := leaf_of(node)) is not None
    ]


@cache
def _of_unreferenced_leaf() -> tuple[int, int]:
    with torch.enable_grad():
        output = torch.zeros((), requires_grad=True) + 1
    (node,) = leaf_nodes([output], 0)
    return leaf_references(node)


def _is_referenced(output: Tensor) -> bool:
    return (
        output.retains_grad
        or (base_of(output) is not None and sys.getrefcount(base_of(output)) > _IDLE_BASE)
        or (output.grad_fn is not None and sys.getrefcount(output.grad_fn) > _idle_of(output.grad_fn))
    )


def _idle_of(node: Node) -> int:
    """Returns the reference count of a node that nothing in Python refers to. A custom function's is an object."""
    return _IDLE_NODE if not is_custom(node) else _IDLE_FUNCTION


def _visit(
    container: Any,
    is_output: Callable[[Tensor], bool],
    accounted: Counter[int],
    objects: dict[int, Any],
    seen: set[int],
) -> bool:
    """Collects the outputs in a container, and the containers inside that have outputs."""
    children, _ = container_node(container).flatten_fn(container)
    own = set()
    for child in children:
        if isinstance(child, Tensor):
            wanted = is_output(child)
        elif pytree.tree_is_leaf(child):
            continue
        elif id(child) in seen:
            wanted = id(child) in objects
        else:
            seen.add(id(child))
            wanted = _visit(child, is_output, accounted, objects, seen)
        if wanted:
            objects[id(child)] = child
            own.add(id(child))
    for item in _references(container):
        if id(item) in own:
            accounted[id(item)] += 1
    return bool(own)


def _references(container: Any) -> Iterator[Any]:
    """Yields the objects that a container refers to, each as often as it does."""
    if isinstance(container, dict):
        yield from dict.values(container)
    elif isinstance(container, (list, tuple, deque)):
        yield from container
    yield from getattr(container, "__dict__", {}).values()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def _idle_counts() -> tuple[int, int, int, int]:
    """Returns the reference counts of objects without other references, in this version of Python and torch."""
    x = torch.zeros(2, requires_grad=True)
    with torch.enable_grad():
        tensors = {0: (x * 1).view(2, 1), 1: _Doubled.apply(x)}  # type: ignore[no-untyped-call]
    return (
        sys.getrefcount(tensors[0]),
        sys.getrefcount(base_of(tensors[0])),
        sys.getrefcount(tensors[0].grad_fn),
        sys.getrefcount(tensors[1].grad_fn),
    )


_IDLE, _IDLE_BASE, _IDLE_NODE, _IDLE_FUNCTION = _idle_counts()
