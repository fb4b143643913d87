"""flex_attention in programs: torch's higher-order op, with its score_mod and mask_mod as nested programs.

NOTE [Nested programs]
1. score_mod and mask_mod are functions of single numbers: a score and its indices, or the indices alone. A nested
   program is the list of ops that such a function runs, of which torch makes one call for all scores at once.
2. Its ops are those of the list that compute a number from numbers, `nested_ops`, and `aten.index.Tensor`, which
   stands for `buffer[indices]`. A nested program holds no other nested program.
3. Each argument is a single number, except the buffer that is indexed, which needs an index for each of its dimensions.
   So no op makes more numbers than there are scores. Indices out of range are errors of the kernel, as elsewhere.
4. The names of options come from a table, and so do the texts among their values: Inductor writes them into its code.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.op_list import allowed_ops, resolve
from backhaul_runtime.program.op_rules import rules
from backhaul_runtime.program.program import FLEX_ATTENTION, NestedProgram, ResultRef, SourceRef
from backhaul_runtime.program.schema import check_call
from backhaul_runtime.program.unsafe_arguments import checks_values

INDEX = "aten.index.Tensor"
ARGUMENTS = 9
"""The number of the arguments of flex_attention in programs."""

MAX_NESTED_NODES = 1_000
_FURTHER = (
    *(f"aten.__{op}__.{kind}" for op in ("and", "or") for kind in ("Scalar", "Tensor")),
    *("aten.floor_divide.default", "aten.to.dtype", "aten.type_as.default"),
    *("aten.where.ScalarOther", "aten.where.ScalarSelf"),
    *("aten.full_like.default", "aten.ones_like.default", "aten.zeros_like.default"),
    *("aten.new_ones.default", "aten.new_zeros.default"),
)
_LONG = ("aten.special_", "aten.polygamma", "aten.mvlgamma", "aten.frexp")
"""What the names of ops begin with that loop as often as an argument says, or return two numbers."""

_OPTIONS = {
    **dict.fromkeys(("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"), (bool,)),
    **dict.fromkeys(("OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "FORCE_USE_FLEX_ATTENTION", "USE_TMA"), (bool,)),
    **{
        f"{direction}{name}": (int,)
        for direction in ("", "fwd_", "bwd_")
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
    },
}
"""The options of kernels that a program may hold, with the type of each value."""

_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
_BLOCK_MASK = (int, int, *["tensor"] * 2, *["optional"] * 9, bool, int, int, NestedProgram)
"""What the items of a block mask are: lengths, tensors, optional tensors, one flag, sizes of blocks, and mask_mod."""


@cache
def nested_ops() -> frozenset[str]:
    """Returns the names of the ops that a nested program may hold."""

    def is_of_numbers(name: str) -> bool:
        op = resolve(name)
        has_effects = rules(op).written or rules(op).draws or checks_values(name)
        return torch.Tag.pointwise in op.tags and not has_effects and not name.startswith(_LONG)

    return frozenset(filter(is_of_numbers, allowed_ops())) | allowed_ops().intersection((*_FURTHER, INDEX))


def check_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ProgramError if the arguments of a node are not those of flex_attention, with nested programs."""
    if len(args) != ARGUMENTS or kwargs:
        raise ProgramError(f"{FLEX_ATTENTION} takes {ARGUMENTS} positional arguments, the node has {len(args)}")
    *tensors, score_mod, block_mask, scale, options, score_buffers, mask_buffers = args
    buffers = (score_buffers, mask_buffers)
    if not all(isinstance(items, tuple) for items in (block_mask, options, *buffers)) or type(scale) is not float:
        raise ProgramError(f"{FLEX_ATTENTION} takes lists and a number, the node has others")
    if not all(isinstance(tensor, (SourceRef, ResultRef)) for tensor in (*tensors, *score_buffers, *mask_buffers)):
        raise ProgramError(f"{FLEX_ATTENTION} takes tensors, the node has others")
    if len(block_mask) != len(_BLOCK_MASK) or not all(map(_fits, _BLOCK_MASK, block_mask)):
        raise ProgramError(f"{FLEX_ATTENTION} takes a block mask of {len(_BLOCK_MASK)} items, the node has another")
    for option in options:
        check_option(option)
    for program, inputs in ((score_mod, 5 + len(score_buffers)), (block_mask[-1], 4 + len(mask_buffers))):
        if not isinstance(program, NestedProgram) or program.inputs != inputs:
            raise ProgramError(f"{FLEX_ATTENTION} takes a function of {inputs} numbers, the node has another")
        check_nested(program)


def check_option(option: Any) -> None:
    """Raises ProgramError for an option of kernels that is not in the table (Rule 4)."""
    try:
        name, value = option
    except (TypeError, ValueError):
        name, value = "", None
    known = type(name) is str and type(value) in _OPTIONS.get(name, ())
    if not known and not (name == "BACKEND" and value in _BACKENDS):
        raise ProgramError(f"{FLEX_ATTENTION} has an option that no program may hold: {str(option)[:80]}")


def _fits(kind: Any, value: Any) -> bool:
    if kind in ("tensor", "optional"):
        return isinstance(value, (SourceRef, ResultRef)) or (kind == "optional" and value is None)
    return type(value) is kind or (kind is bool and value is None)


def check_nested(program: NestedProgram) -> None:
    """Raises ProgramError for a nested program that holds another op or another kind of argument (Rule 2)."""
    if len(program.nodes) > MAX_NESTED_NODES:
        raise ProgramError(f"a nested program of {len(program.nodes)} ops, at most {MAX_NESTED_NODES} are allowed")
    for node in program.nodes:
        if node.op not in nested_ops():
            raise ProgramError(f'the op "{node.op}" is not on the list of ops of a nested program', op=node.op)
        check_call(resolve(node.op), node.args, dict(node.kwargs))
        if node.op == INDEX and not all(isinstance(index, (SourceRef, ResultRef)) for index in node.args[1]):
            raise ProgramError("a nested program indexes a buffer by other values than tensors", op=node.op)
        if node.op.startswith("aten.new_") and node.args[1:2] != ((),):
            raise ProgramError("a nested program makes a tensor that is not a single number", op=node.op)


def bound(value: Any, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns an argument of a nested program with what its references stand for: inputs, and one result per node."""
    match value:
        case SourceRef(index):
            return inputs[index]
        case ResultRef(node):
            return results[node]
        case tuple():
            return [bound(item, inputs, results) for item in value]
    return value
