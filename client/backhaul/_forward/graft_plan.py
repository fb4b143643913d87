"""Decides which nodes replace the graph of a segment, before they are made. See NOTE [Graft]."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from backhaul_runtime.torch_internals.graph_uses import BackwardStage, Use


class StandIn(NamedTuple):
    """A node that passes contributions on in the place of interior nodes.

    Attributes:
        sequence: The sequence number of the last one that backward reaches; None if the order does not matter.
        numbers: The number of the tensor that each contribution belongs to.
        positions: The position of each contribution among those of its graft.
        is_alias: Whether it passes on one contribution, to a parameter: an alias of that does the same in a tenth of
            the time.
    """

    sequence: int | None
    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    is_alias: bool


@dataclass(frozen=True, slots=True, eq=False)
class GraftStage:
    """The graft of one stage of backward.

    Attributes:
        outputs: The positions of the outputs that it returns.
        ways: The indices of the contributions that it hands on, in the order of `Frame.gradients`.
        stand_ins: The stand-ins behind it.
    """

    outputs: tuple[int, ...]
    ways: tuple[int, ...]
    stand_ins: tuple[StandIn, ...]


def graft_plan(
    used: Sequence[Tensor], uses: Sequence[Sequence[Use]], stages: Sequence[BackwardStage], *, in_order: bool
) -> list[GraftStage]:
    """Returns the grafts of a call, one for each stage.

    Args:
        used: The sources of the segment, then its casts.
        uses: For each of these, then for each output, the places of its use, in the order of `Frame.gradients`.
        stages: The stages of the segment's backward, at least one.
        in_order: Whether the order of contributions is kept also if it is not visible at present (Rule 3).
    """
    all_uses = [(number, use) for number, of_tensor in enumerate(uses) for use in of_tensor]
    plan = []
    for stage in stages:
        ways = tuple(index for index, (_, use) in enumerate(all_uses) if use.node in stage.nodes)
        mine = [all_uses[index] for index in ways]
        ordered = {number for number, _ in mine if number < len(used) and _shows_order(used[number])}
        is_visible = len(ordered) > 1 or len(stages) > 1
        boundaries = {number for number, _ in mine if number < len(used) and not used[number].is_leaf}
        groups = _in_order(mine, boundaries) if in_order or is_visible else _in_one(mine)
        stand_ins = tuple(
            StandIn(sequence, numbers, positions, len(numbers) == 1 and _is_parameter(used, numbers[0]))
            for sequence, numbers, positions in groups
        )
        plan.append(GraftStage(stage.outputs, ways, stand_ins))
    return plan


_Group = tuple[int | None, tuple[int, ...], tuple[int, ...]]
"""The sequence number, the numbers and the positions of a stand-in."""


def _in_one(mine: Sequence[tuple[int, Use]]) -> list[_Group]:
    return [(None, tuple(number for number, _ in mine), tuple(range(len(mine))))] if mine else []


def _in_order(mine: Sequence[tuple[int, Use]], boundaries: Set[int]) -> list[_Group]:
    """Returns a stand-in for each boundary, and one for each node that used something else (Rule 2)."""
    groups: dict[object, list[tuple[int, int, int, int]]] = {}
    for position, (number, use) in enumerate(mine):
        if number in boundaries:  # whose uses come in the order in which backward adds them
            groups.setdefault(number, []).append((position, position, number, use.sequence))
        else:
            groups.setdefault(use.node, []).append((use.input_index, position, number, use.sequence))
    return [
        (group[-1][3], tuple(number for _, _, number, _ in group), tuple(position for _, position, *_ in group))
        for group in map(sorted, groups.values())
    ]


def _is_parameter(used: Sequence[Tensor], number: int) -> bool:
    """Whether a tensor, by its number, is a leaf of a class whose views are plain. Tensors after `used` are outputs."""
    return number < len(used) and used[number].is_leaf and type(used[number]) in (Tensor, nn.Parameter)


def _shows_order(tensor: Tensor) -> bool:
    """Whether the order of contributions to a tensor is visible. Of a boundary only the sum is visible."""
    return tensor.is_leaf or type(tensor.grad_fn).__name__ == "ToCopyBackward0"
