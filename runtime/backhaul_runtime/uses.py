"""Where a call's graph takes its sources up, so that each use can return a contribution of its own.

Floating-point sums depend on their order. Without checkpointing, autograd adds what the uses of a tensor contribute one
by one, last use first. So a segment returns one contribution per use, in that order, and autograd adds them as it would
have. What counts as a use is read off the graph itself: an edge from a node of the call to the node of a source.
"""

from collections.abc import Mapping, Sequence
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
"""Node and output number that gradients of a source arrive at."""


def find_uses(
    outputs: Sequence[Tensor], targets: Mapping[Target, int], first_sequence: int, source_count: int
) -> list[list[Use]]:
    """Walks the graph of a call from its outputs to its sources.

    Args:
        outputs: Differentiable outputs of the call.
        targets: Index of the source behind each target.
        first_sequence: Sequence number of autograd when the call began: older nodes belong to others.
        source_count: Length of the result.

    Returns:
        The uses of each source, last first: the order in which backward reaches them.

    Raises:
        Refusal: For nodes that no recorded op makes, and for graphs of others that are not a source's.
    """
    uses: list[list[Use]] = [[] for _ in range(source_count)]
    seen: set[Node] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_custom(node):
            raise Refusal(f"the custom autograd function {node.name().removesuffix('Backward')}")
        for index, (following, output_nr) in enumerate(node.next_functions):
            if following is None:
                continue
            source = targets.get((following, output_nr))
            if source is not None:
                uses[source].append(Use(node, index))
            elif following._sequence_nr() < first_sequence and not _is_cached_cast(following, targets):
                raise Refusal(f"its graph leads to one made before it ({following.name()})")
            else:
                stack.append(following)
    for found in uses:
        found.sort(key=lambda use: (-use.node._sequence_nr(), use.input_index))
    return uses


def is_custom(node: Node | None) -> bool:
    """Whether a node is a custom function's, which no op makes."""
    return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def _is_cached_cast(node: Node, targets: Mapping[Target, int]) -> bool:
    """Whether this is autocast's cast of a source, made for an earlier call and found in its cache."""
    return node.name() == "ToCopyBackward0" and node.next_functions[0] in targets
