"""Records score_mod and mask_mod of flex_attention as nested programs. See NOTE [Nested programs]."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import ProgramError, Refusal
from backhaul_runtime.program.attention import INDEX, check_nested, check_option
from backhaul_runtime.program.program import CONSTANTS, NestedNode, NestedProgram, Ref, ResultRef, SourceRef
from backhaul_runtime.torch_internals.flex_attention import index_buffer, indexing_by_tensors, is_indexing
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode, unobserved
from backhaul_runtime.torch_internals.private import OpOverload

_OWN_STEPS = 6


def attention_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments of flex_attention with nested programs and lists in the place of functions and dicts.

    Raises:
        Refusal: No program can hold one of them.
    """
    query, key, value, score_mod, block_mask, scale, options, score_buffers, mask_buffers = args
    if not all(isinstance(buffer, Tensor) for buffer in (*score_buffers, *mask_buffers)):
        raise Refusal("score_mod or mask_mod of flex_attention captures a number that torch.compile takes for variable")
    pairs = tuple((name, given) for name, given in options.items() if given is not None)
    index = torch.zeros((), dtype=torch.int64, device=query.device)
    score = torch.zeros((), dtype=query.dtype, device=query.device)
    try:
        for pair in pairs:
            check_option(pair)
        on_scores = _nested_program("score_mod", score_mod, [score, *repeat(index, 4), *score_buffers])
        on_indices = _nested_program("mask_mod", block_mask[-1], [*repeat(index, 4), *mask_buffers])
    except ProgramError as error:
        raise Refusal(error.message) from None
    mask = (*block_mask[:-1], on_indices)
    return query, key, value, on_scores, mask, float(scale), pairs, tuple(score_buffers), tuple(mask_buffers)


def scratch_bytes(args: Sequence[Any]) -> int:
    """Returns an upper bound of the bytes that flex_attention makes for itself, given its arguments in a program.

    Without Inductor it holds a matrix of all scores, of 8 bytes each, for each step of its own and of its functions.
    """
    query, key, _, score_mod, block_mask, *_ = args
    steps = _OWN_STEPS + len(score_mod.nodes) + len(block_mask[-1].nodes)
    batch, heads, length, _ = query.shape
    return 8 * steps * int(batch * heads * length * key.shape[-2])


def _nested_program(name: str, function: Callable[..., Any], inputs: Sequence[Tensor]) -> NestedProgram:
    inputs = [
        tensor.detach().clone() if not tensor.dim() else tensor.detach() for tensor in inputs
    ]  # each another object
    recorder = _NestedRecorder(name, inputs)
    with torch.no_grad(), indexing_by_tensors(), recorder.within():
        returned = function(*inputs)
    program = NestedProgram(len(inputs), tuple(recorder.nodes), recorder.ref_of(returned))
    check_nested(program)
    return program


class _NestedRecorder(PreDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each op that a function runs. Raises Refusal for what no nested program can hold.

    Args:
        name: The name of the function, for reports.
        inputs: What the function is called with.
    """

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.nodes: list[NestedNode] = []
        self._name = name
        self._alive = list(inputs)  # so that no id is used again
        self._refs: dict[int, Ref] = {id(tensor): SourceRef(number) for number, tensor in enumerate(inputs)}

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op and notes it."""
        returned = op(*args, **kwargs)
        self._add(str(op), args, kwargs, returned)
        return returned

    def around_function(self, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Notes `buffer[indices]`."""
        if not is_indexing(function):
            self._stop(f"the custom autograd function {function.__name__}")
        with unobserved():
            returned = index_buffer(*args)
        self._add(INDEX, args, {}, returned)
        return returned

    def refuse(self, reason: str) -> None:
        """Raises Refusal."""
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        raise Refusal(f"{self._name} of flex_attention has {reason}")

    def ref_of(self, tensor: Any) -> Ref:
        """Returns the reference to a tensor."""
        if id(tensor) not in self._refs:
            self._stop("a tensor that torch.compile has not captured")
        return self._refs[id(tensor)]

    def _add(self, op: str, args: Sequence[Any], kwargs: dict[str, Any], returned: Any) -> None:
        if not isinstance(returned, Tensor) or returned.dim():
            self._stop(f"the op {op}, which does not return a number")
        pairs = tuple((name, self._given(value)) for name, value in kwargs.items())
        self.nodes.append(NestedNode(op, tuple(map(self._given, args)), pairs))
        self._refs[id(returned)] = ResultRef(len(self.nodes) - 1, 0)
        self._alive.append(returned)

    def _given(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.ref_of(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._given, value))
        if value is not None and type(value) not in CONSTANTS:
            self._stop(f"an argument of type {type(value).__name__}")
        return value
