"""Where a call's graph takes its sources up, so that each use can return a contribution of its own.

Floating-point sums depend on their order. Without checkpointing, autograd adds what the uses of a tensor contribute one
by one, last use first. So a segment returns one contribution per use, in that order, and autograd adds them as it would
have. What counts as a use is read off the graph itself: an edge from a node of the call to the node of a source.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backhaul_runtime.errors import Refusal


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """An edge into a source: `node` hands its `input_index`-th input gradient to it."""

    node: Node
    input_index: int


Target = tuple[Node, int]
"""A node and the number of one of its outputs: where the gradient of a tensor arrives."""


def find_uses(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], first_sequence: int, target_count: int
) -> list[list[Use]]:
    """Walks the graph of a call from its outputs to its sources.

    Args:
        outputs: Differentiable outputs of the call.
        targets: The number of what takes gradients at each target: a source, or an autocast cast of one.
        first_sequence: Sequence number of autograd when the call began: older nodes belong to others.
        target_count: How many numbers there are.

    Returns:
        By number, then by output, the uses of each, last first: the order in which backward reaches them. An output has
        uses where others follow from it.

    Raises:
        Refusal: For nodes that no recorded op makes, and for graphs of others that are not a source's.
    """
    uses: list[list[Use]] = [[] for _ in range(target_count + len(outputs))]
    numbers = {**_edges(outputs, target_count), **targets}
    stack = [output.grad_fn for output in outputs]
    for node in _each_once(stack):
        if is_custom(node):
            raise Refusal(f"the custom autograd function {name_of(node).removesuffix('Backward')}")
        for index, (following, output_nr) in enumerate(node.next_functions):
            if following is None:
                continue
            number = numbers.get((following, output_nr))
            if number is not None:
                uses[number].append(Use(node, index))
            elif following._sequence_nr() < first_sequence:
                raise Refusal(f"its graph leads to one made before it ({name_of(following)})")
            else:
                stack.append(following)
    for of_source in uses:
        of_source.sort(key=lambda use: (-use.node._sequence_nr(), use.input_index))
    return uses


def _edges(outputs: Sequence[Tensor], first: int = 0) -> dict[Target, int]:
    return {(o.grad_fn, o.output_nr): number for number, o in enumerate(outputs, first) if o.grad_fn is not None}


@dataclass(frozen=True, slots=True, eq=False)
class BackwardStage:
    """A part of a call's backward.

    Attributes:
        outputs: Positions of the outputs whose gradients it starts from.
        nodes: Those nodes of the call's graph which belong to the stage, at least all that use something.
    """

    outputs: tuple[int, ...]
    nodes: Set[Node]


def find_stages(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], uses: Sequence[Sequence[Use]]
) -> list[BackwardStage]:
    """Divides a call's graph at those of its outputs that others follow from.

    The gradient of such an output is complete, and people can see it, before anything behind it is computed. So
    backward goes by stages: each computes what its outputs contribute to sources and to outputs of other stages. All
    outputs of a stage must lead to all that the stage contributes to: autograd goes on to whatever a node leads to,
    whichever of its outputs got a gradient.

    Args:
        outputs: The outputs of the call, as for `find_uses`.
        targets: The edges into sources, as for `find_uses`.
        uses: As `find_uses` gives them.

    Returns:
        The stages, each after those whose outputs it uses.

    Raises:
        Refusal: Outputs have a part of their graph in common, and don't lead to the same things.
    """
    if len(outputs) == 1:
        return [BackwardStage((0,), {use.node for used in uses for use in used})]
    ends = _edges(outputs).keys() | targets.keys()
    reached = [_reached(output, ends) for output in outputs]
    stage_of = list(range(len(outputs)))
    part_of: dict[Node, int] = {}
    for position, nodes in enumerate(reached):
        for node in nodes:
            common = stage_of[part_of.setdefault(node, position)]
            stage_of = [stage_of[position] if stage == common else stage for stage in stage_of]
    for node in {use.node for used in uses for use in used}:
        stage = stage_of[part_of[node]]
        if any(stage_of[position] == stage and node not in nodes for position, nodes in enumerate(reached)):
            raise Refusal("its outputs share a part of its inside, but lead to different inputs or to each other")
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
    """The nodes of a call's graph that an output leads to."""
    reached: set[Node] = set()
    stack = [output.grad_fn]
    for node in _each_once(stack):
        reached.add(node)
        stack += [following for following, number in node.next_functions if (following, number) not in ends]
    return reached


def find_casts(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], first_sequence: int
) -> dict[int, list[Target]]:
    """Finds where a call's graph casts what takes gradients: by autocast, or because the function said so.

    Args:
        outputs: The outputs of the call, as for `find_uses`.
        targets: The edges into sources, as for `find_uses`.
        first_sequence: As for `find_uses`. Older casts are found too: autocast may have made one for an earlier call.

    Returns:
        The casts by the number of what they are of. They can be used as targets.
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


def custom_function(outputs: Sequence[Tensor], first_sequence: int) -> str:
    """The name of a custom autograd function in a call's graph, empty where there is none.

    Args:
        outputs: What the call returned.
        first_sequence: The sequence number at which the call began.
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
    """The nodes on a stack, and those that its user puts there meanwhile, each once."""
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node


def is_custom(node: Node | None) -> bool:
    """Whether a node is a custom function's, which no op makes."""
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def name_of(node: Node) -> str:
    """The name of a node's kind. Not by `Node.name`: a custom function may have an attribute of that name."""
    return type(node).__name__
