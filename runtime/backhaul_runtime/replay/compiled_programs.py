"""Programs that run as a whole, compiled by torch's Inductor.

NOTE [Compiled programs]
1. A program with a `compilation` runs compiled. Trainer and worker compile the same program with the same settings, so
   both have the same forward and backward. With equal devices, settings of Inductor and compilers, which the
   fingerprint shows, they have the same kernels.
2. What is compiled is built from a program that has passed all checks: ops of the list, numbers and layouts.
3. Between its ops no value can be checked. So a program is refused if an op takes values that a worker has to check,
   or divides integers, which traps. A worker that its trainer has not started itself refuses indices too.
4. AOTAutograd's graphs have no second derivative, so a backward that is differentiated itself raises torch's error, as
   that of the compiled block does.
5. All random numbers follow from the generator's state before the first draw. They are Inductor's, not those that the
   ops draw one by one.
6. A compiled function is made before its program runs. A run never compiles.
"""

from collections.abc import Callable, MutableMapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from backhaul_runtime.errors import ProgramError, ReplayError
from backhaul_runtime.program.attention import INDEX, bound
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.op_rules import ABSOLUTE, rules, written_tensors
from backhaul_runtime.program.program import (
    FLEX_ATTENTION,
    Composite,
    GeneratorRef,
    NestedProgram,
    Node,
    Program,
    ResultRef,
    SourceRef,
)
from backhaul_runtime.program.undefined_saves import PARTLY_UNDEFINED, UNDEFINED_SAVES, undefined_saves
from backhaul_runtime.program.unsafe_arguments import checks_values
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.flex_attention import higher_order_op
from backhaul_runtime.torch_internals.inductor import CompiledFiles, compile_graph, writes_to_inputs
from backhaul_runtime.torch_internals.private import OpOverload, returns_of

CompiledFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Returns the outputs of a program for its sources. Autograd has one node for all of it."""

_ATTENTION = "aten.scaled_dot_product_attention.default"
_DIVIDING = ("floor_divide", "remainder", "fmod", "gcd", "lcm")
"""Names of ops whose compiled code divides integers, which ends the process for zero and for the least integer."""
_INDEXING = (
    *("embedding", "embedding_bag", "gather", "index", "index_add", "index_copy", "index_fill", "index_put"),
    *("index_reduce", "index_select", "masked_scatter", "max_unpool2d", "max_unpool3d", "multi_margin_loss"),
    *("multilabel_margin_loss", "nll_loss_nd", "cross_entropy_loss", "ctc_loss", "one_hot", "put"),
    *(
        "flex_attention",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "searchsorted",
        "take",
        "take_along_dim",
    ),
    *("bincount", "cov", "linalg_ldl_solve", "linalg_lu_solve", "lu_solve", "lu_unpack"),
    *("narrow.Tensor", "tensor_split.tensor_indices_or_sections"),
)
"""Names of ops that take indices or other integers which may be out of range, with the overload if others do not."""


def why_not_compiled(program: Program) -> str:
    """Returns why a program cannot run compiled; empty if it can."""
    if len(program.ambient_states) > 1:
        return "it changes a setting of torch inside"
    if program.functions or program.types:
        return "it runs custom functions"
    if any(source.is_written for source in program.sources) or program.casts:
        return "it writes to its inputs"
    for node in program.nodes:
        if node.op == FLEX_ATTENTION:
            continue
        op = resolve(node.op)
        if node.op in UNDEFINED_SAVES:
            return f"{node.op} saves memory that it does not write"
        if node.op in PARTLY_UNDEFINED and node.op != _ATTENTION:
            return f"{node.op} saves memory that it does not write"
        if checks_values(node.op) or node.op.split(".")[1] in _DIVIDING:
            return f"a worker has to check the values that {node.op} takes"
        if node.op in ABSOLUTE:
            return f"{node.op} takes an offset from the start of a storage"  # compiled code does not check it
        if node.fresh_casts or node.given:
            return f"{node.op} needs what happened before it"
        if any(isinstance(part, (GeneratorRef, Composite)) for part in node.parts):
            return f"{node.op} takes an object"
        if _result_numbers(op, node) is None:
            return f"the number of tensors that {node.op} returns is not fixed"
    return ""


def why_not_for_others(program: Program) -> str:
    """Returns why a worker with several trainers must not compile a program; empty if it may.

    Compiled code checks each index, but a thread of OpenMP that finds one out of range can only end the process.
    """
    op = next((node.op for node in program.nodes if takes_indices(node.op)), "")
    return f"an index out of range in {op} would end the worker, which other trainers may use" if op else ""


def takes_indices(op: str) -> bool:
    """Whether an op refuses some values of an integer tensor, and no check of values knows it."""
    _, name, overload = op.split(".")
    return name in _INDEXING or f"{name}.{overload}" in _INDEXING


def compile_program(program: Program, device: torch.device, files: CompiledFiles | None = None) -> CompiledFunction:
    """Compiles a program and its backward, for sources of its layouts. Takes seconds to minutes. Changes no values.

    Args:
        program: A program with a `compilation`.
        device: The device of those sources that are on no CPU.
        files: Where Inductor keeps what it makes for another process; None if only this process needs the function.

    Raises:
        ProgramError: The program cannot run compiled.
        ReplayError: Inductor failed, for example without a compiler on this machine.
    """
    if reason := why_not_compiled(program):
        raise ProgramError(f"the program cannot run compiled: {reason}")
    assert program.compilation is not None
    state = program.ambient_states[0] if program.ambient_states else ambient_state.capture()
    try:
        with ambient_state.restored():
            ambient_state.apply(state, ambient_state.capture())
            needs = [source.requires_grad for source in program.sources]
            sources = [
                (torch.device("cpu") if layout.device == "cpu" else device, layout.dtype, layout.shape, layout.strides)
                for layout in program.compilation.layouts
            ]
            graph = _graph(program)
            if any(
                node.op != FLEX_ATTENTION and rules(resolve(node.op)).written for node in program.nodes
            ) and writes_to_inputs(graph, sources, lambda op, args, kwargs: written_tensors(rules(op), args, kwargs)):
                raise ProgramError("the program cannot run compiled: it writes to its inputs")
            return compile_graph(graph, sources, needs, files)
    except ProgramError:
        raise
    except Exception as error:  # Inductor may raise any type of error
        first = next(iter(str(error).strip().splitlines()), "")
        raise ReplayError(f"Inductor could not compile the program: {type(error).__name__}: {first}") from error


functions: MutableMapping[Program, CompiledFunction] = WeakIdKeyDictionary()
"""The compiled functions of this process, by their programs, which the functions must not refer to."""


def function_of(program: Program) -> CompiledFunction:
    """Returns the compiled function of a program. Raises ReplayError if `functions` has none."""
    if (function := functions.get(program)) is None:
        raise ReplayError("the program was not compiled")
    return function


def undefined_saves_of(program: Program) -> Callable[[Tensor], bool]:
    """Returns which of the tensors that a compiled program saves have undefined bytes."""
    checks = [
        undefined_saves(resolve(node.op), node.args, dict(node.kwargs))
        for node in program.nodes
        if node.op == _ATTENTION
    ]
    return lambda tensor: any(is_undefined(tensor) for is_undefined in checks)


def device_of(sources: Sequence[Tensor]) -> torch.device:
    """Returns the device that a compiled program computes on, and from whose default generator it draws."""
    return next((source.device for source in sources if source.device.type != "cpu"), torch.device("cpu"))


def check_layouts(program: Program, layouts: Sequence[Layout]) -> None:
    """Raises ProgramError if sources of a compiled program have other layouts than those that it was compiled for."""
    if program.compilation is not None and program.compilation.layouts != tuple(layouts):
        raise ProgramError("a compiled program was saved with sources of other layouts than its own")


def _result_numbers(op: OpOverload, node: Node) -> list[int | None] | None:
    """Returns for each tensor that an op returns its number among what it returns; None for its only return value.

    Returns None altogether if that does not follow from the op's schema.
    """
    kinds = [str(returned.type) for returned in returns_of(op)]
    if kinds == ["Tensor"]:
        numbers: list[int | None] = [None]
    elif kinds == ["List[Tensor]"]:
        numbers = list(range(len(node.result_bytes)))
    else:
        numbers = [number for number, kind in enumerate(kinds) if kind == "Tensor"]
    return numbers if len(numbers) == len(node.result_bytes) else None


def _graph(program: Program) -> fx.GraphModule:
    """Returns the program as a graph of torch, which calls its ops in order."""
    root, graph = nn.Module(), fx.Graph()
    sources = [graph.placeholder(f"source_{number}") for number in range(len(program.sources))]
    results: list[list[fx.Node]] = []

    def given(value: Any) -> Any:
        match value:
            case SourceRef(index):
                return sources[index]
            case ResultRef(node, output):
                return results[node][output]
            case tuple():
                return [given(item) for item in value]
            case NestedProgram():
                name = f"function_{len(list(root.children()))}"
                root.add_module(name, _nested_graph(value))
                return graph.get_attr(name)
        return value

    for node in program.nodes:
        if node.op == FLEX_ATTENTION:
            *first, mask, scale, options, score_buffers, mask_buffers = node.args
            args = (*map(given, first), tuple(given(mask)), scale, dict(options))
            buffers = tuple(given(score_buffers)), tuple(given(mask_buffers))
            made = graph.call_function(higher_order_op(), (*args, *buffers))
            results.append([graph.call_function(getitem, (made, number)) for number in range(len(node.result_bytes))])
            continue
        op = resolve(node.op)
        args = tuple([given(value) for value in node.args])
        made = graph.call_function(op, args, {name: given(value) for name, value in node.kwargs})
        numbers = _result_numbers(op, node)
        assert numbers is not None
        results.append([made if number is None else graph.call_function(getitem, (made, number)) for number in numbers])
    graph.output(tuple(given(ref) for ref in program.outputs))
    return fx.GraphModule(root, graph)


def _nested_graph(program: NestedProgram) -> fx.GraphModule:
    """Returns a nested program as a graph of torch, as torch.compile captures score_mod and mask_mod."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(program.inputs)]
    results: list[fx.Node] = []

    for node in program.nodes:
        args = tuple([bound(value, inputs, results) for value in node.args])
        if node.op == INDEX:
            results.append(graph.call_function(getitem, (args[0], tuple(args[1]))))
        else:
            kwargs = {name: bound(value, inputs, results) for name, value in node.kwargs}
            results.append(graph.call_function(resolve(node.op), args, kwargs))
    graph.output(bound(program.output, inputs, results))
    return fx.GraphModule(nn.Module(), graph)
