"""Finds where a call's graph uses its sources, so that each use can return a contribution of its own.

Floating-point sums depend on their order. Without checkpointing, autograd adds the contributions of a tensor's uses one
by one, last use first. So a segment returns one contribution per use in that order, and autograd adds them in the same
order as without it. A use is an edge of the graph: from a node of the call to the node of a source.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

from backhaul_runtime.errors import Refusal
from backhaul_runtime.torch_internals.private import is_node_of, leaf_of


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """An edge into a source: `node` passes its `input_index`-th input gradient to the source.

    Attributes:
        node: The node that the edge leaves.
        input_index: The position of the gradient among those that the node returns.
        sequence: The node's sequence number.
    """

    node: Node
    input_index: int
    sequence: int


Target = tuple[Node, int]
"""A node and the index of one of its outputs: the place where the gradient of a tensor arrives."""


def find_uses(
    outputs: Sequence[Tensor],
    targets: Mapping[Target, int],
    first_sequence: int,
    target_count: int,
    recorded: Set[type] = frozenset(),
) -> list[list[Use]]:
    """Walks the graph of a call from its outputs to its sources.

    Args:
        outputs: Differentiable outputs of the call.
        targets: For each target, the number of the source, or of the autocast cast of a source, whose gradient arrives
            there.
        first_sequence: Autograd's sequence number when the call began. Nodes with a smaller one were made before.
        target_count: The number of sources and casts that are numbered in `targets`.
        recorded: The classes of nodes of those custom autograd functions that the program runs.

    Returns:
        The uses of each source and cast by number, followed by those of each output, each list with the last use first,
        as backward reaches them. An output has uses if another output depends on it.

    Raises:
        Refusal: The graph holds a node that no recorded op makes, or leads to an older node that is no source's.
    """
    uses: list[list[Use]] = [[] for _ in range(target_count + len(outputs))]
    numbers = {**_edges(outputs, target_count), **targets}
    stack = [output.grad_fn for output in outputs]
    for node in _each_once(stack):
        if is_custom(node) and type(node) not in recorded:
            raise Refusal(f"the custom autograd function {name_of(node).removesuffix('Backward')}")
        for index, (following, output_nr) in enumerate(node.next_functions):
            if following is None:
                continue
            number = numbers.get((following, output_nr))
            if number is not None:
                uses[number].append(Use(node, index, node._sequence_nr()))
            elif following._sequence_nr() < first_sequence:
                raise Refusal(f"its graph leads to a node that was made before the call ({name_of(following)})")
            else:
                stack.append(following)
    for of_source in uses:
        of_source.sort(key=lambda use: (-use.sequence, use.input_index))
    return uses


def _edges(outputs: Sequence[Tensor], first: int = 0) -> dict[Target, int]:
    return {(o.grad_fn, o.output_nr): number for number, o in enumerate(outputs, first) if o.grad_fn is not None}


@dataclass(frozen=True, slots=True, eq=False)
class BackwardStage:
    """A part of a call's backward.

    Attributes:
        outputs: Positions of the outputs whose gradients the stage starts from.
        nodes: The nodes of the call's graph that belong to the stage; at least those that use a source or an output.
    """

    outputs: tuple[int, ...]
    nodes: Set[Node]


def find_stages(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], uses: Sequence[Sequence[Use]]
) -> list[BackwardStage]:
    """Divides a call's graph into stages, at each output that other outputs depend on.

    Autograd completes the gradient of such an output, and shows it to hooks, before it computes anything behind it. So
    backward goes by stages: each stage computes the contributions of its outputs to sources and to outputs of other
    stages. Every output of a stage must lead to everything that the stage contributes to. Otherwise a backward from
    only one output would also visit what only the others lead to: autograd follows all edges of a node.

    Args:
        outputs: The outputs of the call, as for `find_uses`.
        targets: The targets of sources and casts, as for `find_uses`.
        uses: The result of `find_uses`.

    Returns:
        The stages. A stage comes after those whose outputs it uses.

    Raises:
        Refusal: Two outputs share a part of their graph but lead to different sources or outputs.
    """
    if len(outputs) == 1:
        return [BackwardStage((0,), {use.node for used in uses for use in used})]
    ends = _edges(outputs).keys() | targets.keys()
    reached = [_reached(output, ends) for output in outputs]
    stage_of = list(range(len(outputs)))
    part_of: dict[Node, int] = {}
    # Outputs that reach a common node form one stage: the node can only run once.
    for position, nodes in enumerate(reached):
        for node in nodes:
            common = stage_of[part_of.setdefault(node, position)]
            stage_of = [stage_of[position] if stage == common else stage for stage in stage_of]
    # Only what these nodes compute leaves the call.
    for using in {use.node for used in uses for use in used}:
        stage = stage_of[part_of[using]]
        # A backward from one output would also run this node for sources that only another output may ask for.
        if any(stage_of[position] == stage and using not in nodes for position, nodes in enumerate(reached)):
            raise Refusal("its outputs share a part of its inside, but lead to different inputs or to each other")
    # A stage that contributes to an output of another one comes before it, because autograd completes the gradient of
    # an output before it enters what is behind.
    needs = {
        (stage_of[part_of[use.node]], stage_of[position])
        for position, used in enumerate(uses[len(uses) - len(outputs) :])
        for use in used
    }
    order: list[int] = []
    left = dict.fromkeys(stage_of)
    while left:
        ready = next(s for s in left if all(below in order for above, below in needs if above == s))
        order.append(ready)
        del left[ready]
    return [
        BackwardStage(
            tuple(position for position, own in enumerate(stage_of) if own == stage),
            {node for node, position in part_of.items() if stage_of[position] == stage},
        )
        for stage in order
    ]


def _reached(output: Tensor, ends: Set[Target]) -> set[Node]:
    """Returns the nodes that an output leads to, up to the targets in `ends`."""
    reached: set[Node] = set()
    stack = [output.grad_fn]
    for node in _each_once(stack):
        reached.add(node)
        stack += [following for following, number in node.next_functions if (following, number) not in ends]
    return reached


def find_casts(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], first_sequence: int
) -> dict[int, list[Target]]:
    """Finds where a call's graph casts a source, by autocast or by the function itself.

    Args:
        outputs: The outputs of the call, as for `find_uses`.
        targets: The targets of sources, as for `find_uses`.
        first_sequence: As for `find_uses`. Older casts are found too: autocast may have made one for an earlier call.

    Returns:
        The targets of the casts, by the number of the source that they cast.
    """
    casts: dict[int, list[Target]] = {}
    stack = [output.grad_fn for output in outputs]
    for node in _each_once(stack):
        is_cast = name_of(node) == "ToCopyBackward0"
        for following, output_nr in node.next_functions:
            if following is None:
                continue
            number = targets.get((following, output_nr))
            if number is None and (is_cast or node._sequence_nr() >= first_sequence):
                stack.append(following)
            elif number is not None and is_cast:
                casts.setdefault(number, []).append((node, 0))
    return casts


def structure_of(outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Returns what the graph of a call is: equal for graphs with the same nodes and edges.

    Args:
        outputs: Differentiable outputs of the call.
        sources: The sources of the call, at which its graph ends.
    """
    ends: dict[Any, int]
    with torch.enable_grad():
        ends = {get_gradient_edge(t)[:2]: index for index, t in enumerate(sources) if t.requires_grad}
    numbers: dict[Node | None, int] = {None: 0}
    reached = list[tuple[str, list[Any]]]()
    stack = [output.grad_fn for output in outputs]
    for node in _each_once(stack):
        numbers[node] = len(numbers)
        edges = [ends.get(edge, edge) for edge in node.next_functions]
        stack += [edge[0] for edge in edges if not isinstance(edge, int)]
        reached.append((name_of(node), edges))
    starts = [(numbers[output.grad_fn], output.output_nr) for output in outputs]
    nodes = [(name, *[e if isinstance(e, int) else (numbers[e[0]], e[1]) for e in edges]) for name, edges in reached]
    return (*starts, *nodes)


def leaf_nodes(outputs: Sequence[Tensor], first_sequence: int) -> list[Node]:
    """Returns the nodes of a call's graph that accumulate gradients of leaves, with arguments as `custom_function`."""
    stack = [output.grad_fn for output in outputs]
    leaves = []
    for node in _each_once(stack):
        if leaf_of(node) is not None:
            leaves.append(node)
        elif node._sequence_nr() >= first_sequence:
            stack += [following for following, _ in node.next_functions]
    return leaves


def custom_function(outputs: Sequence[Tensor], first_sequence: int) -> str:
    """Returns the name of a custom autograd function in a call's graph, or an empty text if there is none.

    Args:
        outputs: The tensors that the call returned.
        first_sequence: Autograd's sequence number when the call began.
    """
    stack = [output.grad_fn for output in outputs]
    for node in _each_once(stack):
        if node._sequence_nr() < first_sequence:
            continue
        if is_custom(node):
            return name_of(node).removesuffix("Backward")
        stack += [following for following, _ in node.next_functions]
    return ""


def _each_once(stack: list[Node | None]) -> Iterator[Node]:
    """Yields each node on a stack once, with those that the caller pushes during the iteration."""
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node


def is_custom(node: Node | None) -> bool:
    """Whether a node belongs to a custom autograd function, in Python or C++, so that no op made it."""
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def is_module_hook(node: Node) -> bool:
    """Whether a node passes gradients to a module's full backward hooks."""
    return is_node_of(node, BackwardHookFunction)


def name_of(node: Node) -> str:
    """Returns the name of a node's class. `Node.name` would not do: a custom function may define that attribute."""
    return type(node).__name__
