"""Runs flex_attention of a program, with its nested programs as functions. See NOTE [Nested programs]."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.attention import INDEX, bound
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.op_rules import tensors_in
from backhaul_runtime.program.program import NestedProgram
from backhaul_runtime.torch_internals.flex_attention import index_buffer, run_flex_attention


def run_attention(args: Sequence[Any]) -> list[Tensor]:
    """Runs flex_attention with the arguments of a node. Returns its three results."""
    query, key, value, score_mod, block_mask, scale, options, score_buffers, mask_buffers = args
    mask = (*block_mask[:-1], function_of(block_mask[-1]))
    options, buffers = dict(map(tuple, options)), (tuple(score_buffers), tuple(mask_buffers))
    return list(run_flex_attention(query, key, value, function_of(score_mod), mask, scale, options, *buffers))


def function_of(program: NestedProgram) -> Callable[..., Tensor]:
    """Returns a nested program as a function, which torch calls once for all numbers."""

    def run(*inputs: Tensor) -> Tensor:
        results: list[Tensor] = []
        for node in program.nodes:
            args = [bound(value, inputs, results) for value in node.args]
            kwargs = {name: bound(value, inputs, results) for name, value in node.kwargs}
            if node.op == INDEX:
                buffer, indices = args
                if not isinstance(buffer, Tensor) or len(indices) != buffer.dim() or any(i.dim() for i in indices):
                    raise ProgramError(
                        "a nested program indexes a buffer by more or fewer numbers than it has dimensions"
                    )
                results.append(index_buffer(buffer, indices))
                continue
            if any(tensor.dim() for tensor in tensors_in((args, list(kwargs.values())))):
                raise ProgramError(f"a nested program takes a whole buffer for a number in {node.op}", op=node.op)
            results.append(resolve(node.op)(*args, **kwargs))
        returned: Tensor = bound(program.output, inputs, results)
        if returned.dim():
            raise ProgramError("a nested program returns a whole buffer")
        return returned

    return run
