"""Divides the graph of a loss, so that the middle of its backward can run elsewhere while the trainer goes on.

NOTE [Parts]
1. The *chain* is a sequence of grafts in which each one's gradient comes only from the one before, and perhaps from the
   loss's side. The *head* is everything between the loss and the chain that the chain does not lead to. The *tail* is
   everything else that the chain leads to. So head, chain and tail can be differentiated in this order.
2. Autograd adds contributions to one gradient in the order in which it runs the nodes that contribute: a left fold over
   descending sequence numbers. Within each part this order stays as it is. Where several parts contribute to one
   gradient, the nodes of the head have to be the later ones, and those of the tail the earlier ones. Otherwise a
   division would change the order, and the graph is not divided.
3. Asked for the gradient of a leaf, autograd runs every node that leads there, so the chain as well if it leads there.
   The gradient of such a leaf is taken in two steps: first up to the nodes of the head that lead to nothing else, then
   from these to the leaf.
4. A sum that is complete up to some part enters the next part as the gradient of a root, which autograd takes first. So
   the fold goes on with the same bits.
5. The tail runs later than in a loop without a block, and how much later can differ between ranks. So it must not
   communicate with other ranks, or their collectives would mismatch. A custom function, a hook or a parameter that is a
   tensor subclass may do that.
6. Where a tensor that the tail has saved is written to meanwhile, its version counter shows it. That of a batch norm's
   running statistics does not change, so a batch norm in eval mode must not be part of a tail.
7. A custom function in the tail may read what was changed meanwhile: values of its module or class, and whatever its
   forward has kept on the context. So it must not be part of a tail. Nor may one that torch has generated from the
   functions of a registered op.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from backhaul._backward.frame import Frame
from backhaul._forward.graft import GraftEdges, graft_edges, is_own_node
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.custom.class_names import is_foreign
from backhaul_runtime.torch_internals.data_parallel import is_sink
from backhaul_runtime.torch_internals.graph_uses import is_custom
from backhaul_runtime.torch_internals.private import leaf_of, reads_running_statistics, sequence_number

Target = tuple[Node, int]
"""A node and the number of one of its inputs in backward: where a gradient is summed up."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainSegment:
    """A segment of the chain.

    Attributes:
        frame: The frame of the segment.
        target: Where the gradient of its output is summed up.
        contributions: The index of each contribution that its backward returns, with its target, in the order in which
            autograd adds them.
        consume: Makes a later backward through the segment an error.
    """

    frame: Frame
    target: Target
    contributions: Sequence[tuple[int, Target]]
    consume: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The divided graph of a loss.

    Attributes:
        chain: The segments of the chain, in the order of backward. Empty if the graph is not divided.
        reason: Why the chain is empty; empty otherwise.
        head: Targets that the head's main path contributes to: leaves, the beginning of the chain, and `sides`.
        sides: Targets in the head from which only `shared` is reached.
        shared: Leaves that the head contributes to, and the chain or the tail as well.
        roots: Targets of the tail that the chain contributes to, other than leaves.
        tail: Leaves that the tail contributes to.
        leaves: All leaves that the loss leads to, by their target, in the order in which autograd completes their
            gradients.
        frames: The frames of all segments that the loss leads to.
        may_reuse: Whether the graph has hooks or custom functions, which may write to gradients that they returned.
    """

    chain: Sequence[ChainSegment]
    reason: str
    head: Sequence[Target]
    sides: Sequence[Target]
    shared: Sequence[Target]
    roots: Sequence[Target]
    tail: Sequence[Target]
    leaves: dict[Target, Tensor]
    frames: Sequence[Frame]
    may_reuse: bool

    def undivided(self, reason: str) -> "Parts":
        """Returns the same graph as one head, because of a reason."""
        return replace(self, chain=(), reason=reason, head=list(self.leaves), sides=(), shared=(), roots=(), tail=())


def divide(loss: Tensor, hooked: Set[Node], since: int) -> Parts:
    """Divides the graph of a loss.

    Args:
        loss: A differentiable tensor with a graph.
        hooked: Nodes of tensors on which a hook was registered since the block began.
        since: The sequence number of the first node that was created in the block.
    """
    assert loss.grad_fn is not None
    everything = _reached([loss.grad_fn])
    leaves = _leaves(everything)
    segments = {edges.target[0]: edges for node in everything if (edges := graft_edges(node)) is not None}
    frames = [edges.frame for edges in segments.values()]
    chain, reason = _chain(segments)
    if chain:
        try:
            return _parts(loss.grad_fn, everything, leaves, chain, frames, hooked, since)
        except Refusal as refusal:
            reason = refusal.reason
    return Parts((), reason, list(leaves), (), (), (), (), leaves, frames, _may_reuse(everything, hooked, since))


def _parts(
    root: Node,
    everything: Set[Node],
    leaves: dict[Target, Tensor],
    chain: Sequence[GraftEdges],
    frames: Sequence[Frame],
    hooked: Set[Node],
    since: int,
) -> Parts:
    inner = {node for edges in chain for node in edges.nodes}
    below = _reached({target[0] for edges in chain for _, target in edges.contributions} - inner)
    if root in inner:  # there would be no head from which to take the gradient that the chain begins with
        raise Refusal("the loss is itself the output of a segment")
    head = [node for node in everything if node not in inner and node not in below]
    # Rule 3: the gradient of a leaf that head and tail share is taken in two steps, so that the chain is not entered.
    shared = {target for node in head for target in _targets(node) if target in leaves and target[0] in below}
    sides = _leading_only_to(shared, head)
    through = {*head} - sides
    crossing = {target for node in through for target in _targets(node) if target[0] not in through}
    # The node that uses the leaf also leads to the chain, so autograd could not stop before it and go on from there.
    if crossing & shared:
        raise Refusal(
            "an operation after the last segment uses a parameter of a segment and also leads to the segments"
        )
    # Another edge into the chain or the tail would contribute to their gradients when the head runs, which is before
    # the chain has contributed (Rule 2).
    if any(target != chain[0].target and target[0] not in sides for target in crossing):
        raise Refusal("a tensor that a segment takes or returns is used after the last segment as well")
    # Autograd calls a tensor's hooks where a gradient ends and where one begins: twice where the head is interrupted.
    # A node from before the block may have hooks that the block does not know. A graft with hooks is in no chain.
    if any(node in sides and (node in hooked or sequence_number(node) < since) for node, _ in crossing):
        raise Refusal("a tensor computed from a parameter of a segment has a hook, or was made before the block")
    _check_may_wait(below, hooked)
    by_part = [
        [(sequence_number(node), target) for node in head for target in _targets(node)],
        [(edges.numbers[index], target) for edges in chain for index, target in edges.contributions],
        [(sequence_number(node), target) for node in below for target in _targets(node)],
    ]
    _check_order(by_part)
    return Parts(
        chain=[ChainSegment(edges.frame, edges.target, edges.contributions, edges.consume) for edges in chain],
        reason="",
        head=[*crossing, *[target for target in leaves if target[0] in through]],
        sides=[target for target in crossing if target[0] in sides],
        shared=list(shared),
        # Not the targets inside the chain, where the tail would otherwise begin once more if the trainer has computed
        # the chain, and no leaves, which have no backward.
        roots=[
            target for target in {target for _, target in by_part[1]} if target[0] in below and target not in leaves
        ],
        # Gradients of other targets would all be kept until the end of the tail.
        tail=[target for target in {target for _, target in by_part[2]} if target in leaves],
        leaves=leaves,
        frames=frames,
        may_reuse=_may_reuse(everything, hooked, since),
    )


def _check_may_wait(tail: Set[Node], hooked: Set[Node]) -> None:
    """Raises Refusal if a node of the tail must not run later than in a loop without a block."""
    if any(map(reads_running_statistics, tail)):  # Rule 6
        raise Refusal(
            "a batch norm before the last segments is in eval mode, and another call may change what it reads"
        )
    # Rule 5: collectives of the tail would come later than on a rank that does not divide its graph.
    if _has_ranks() and any(node in hooked or _may_communicate(node) for node in tail):
        raise Refusal(
            "in distributed training a custom function, a hook or a tensor subclass before the last segments may "
            "communicate, which all ranks must do in the same order"
        )
    if any(map(_may_read_state, tail)):  # Rule 7
        raise Refusal("a custom function before the last segments may read what changes before it runs")


def _may_read_state(node: Node) -> bool:
    """Whether a node is of a custom function whose backward may read what changes before it runs (Rule 7)."""
    function: Any = getattr(node, "_forward_cls", None)  # none of one in C++
    if not is_custom(node) or function is None:
        return False
    return not is_foreign(function.__module__) or function.__module__.startswith("torch._library")


def _leaves(everything: Set[Node]) -> dict[Target, Tensor]:
    """Returns the leaves by their target, in autograd's order: after the last node that contributes to each."""
    leaves = {(node, 0): leaf for node in everything if (leaf := leaf_of(node)) is not None}
    last: dict[Target, tuple[int, int]] = {}
    for node in everything:
        for index, target in enumerate(node.next_functions):
            if target in leaves:
                after = -sequence_number(node), index
                last[target] = max(after, last.get(target, after))
    return {target: leaves[target] for target in sorted(last, key=last.__getitem__)}


def _may_reuse(nodes: Iterable[Node], hooked: Set[Node], since: int) -> bool:
    """Whether nodes have hooks or are custom functions. Hooks from before the block are not known."""
    return any(
        node in hooked or (is_custom(node) and not is_own_node(node)) or sequence_number(node) < since for node in nodes
    )


def _has_ranks() -> bool:
    """Whether this trainer is one of several ranks."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def _may_communicate(node: Node) -> bool:
    """Whether a node may communicate with other ranks (Rule 5)."""
    if (leaf := leaf_of(node)) is not None:
        return type(leaf) not in (Tensor, nn.Parameter)
    return is_custom(node) and not is_own_node(node) and not is_sink(node)


def _leading_only_to(ends: Set[Target], nodes: Collection[Node]) -> set[Node]:
    """Returns those of the nodes whose edges all lead to each other or to `ends`."""
    sides = {node for node in nodes if leaf_of(node) is None}
    while True:
        leaving = {
            node for node in sides if any(target not in ends and target[0] not in sides for target in _targets(node))
        }
        if not leaving:
            return sides
        sides -= leaving


def _chain(segments: Mapping[Node, GraftEdges]) -> tuple[list[GraftEdges], str]:
    """Returns the grafts of the longest chain from the latest segment with a worker, and why there is none."""
    if not segments:
        return [], "no segment of this loss waits for its backward"
    on_workers = [node for node, edges in segments.items() if edges.frame.remote is not None]
    latest = max(on_workers or segments, key=sequence_number)
    chain = list[GraftEdges]()
    following: Node | None = latest
    while following is not None:
        edges = segments[following]
        if reason := edges.why_not_deferred():
            if not chain:
                return [], reason
            break
        chain.append(edges)
        before = {target[0] for _, target in edges.contributions} & segments.keys()
        following = max(before, key=sequence_number, default=None)
    # The tail must not lead back into the chain.
    while True:
        inner = {node for edges in chain for node in edges.nodes}
        below = _reached({target[0] for edges in chain for _, target in edges.contributions} - inner)
        returns_to = [index for index, edges in enumerate(chain) if below & edges.nodes]
        if not returns_to:
            return chain, "" if chain else "its segments depend on each other through other operations"
        del chain[returns_to[0] :]


def _check_order(by_part: Sequence[Sequence[tuple[int, Target]]]) -> None:
    """Raises Refusal if a division would change the order of additions (Rule 2)."""
    earliest: dict[Target, int] = {}
    for part in by_part:
        for number, target in part:
            if number >= earliest.get(target, number + 1):
                raise Refusal("a tensor is used before, inside and after its segments in another order than they run")
        for number, target in part:
            earliest[target] = min(number, earliest.get(target, number))


def leaves_of(outputs: Iterable[Tensor | GradientEdge]) -> list[Tensor]:
    """Returns the leaves that outputs of a graph lead to."""
    roots = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    reached = _reached(root for root in roots if root is not None)
    return [leaf for node in reached if (leaf := leaf_of(node)) is not None]


def _targets(node: Node) -> Iterable[Target]:
    return [(following, number) for following, number in node.next_functions if following is not None]


def _reached(roots: Iterable[Node]) -> set[Node]:
    """Returns the roots and all nodes that they lead to."""
    reached = set(roots)
    stack = list(reached)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None and following not in reached:
                reached.add(following)
                stack.append(following)
    return reached
