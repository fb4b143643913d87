"""What torch.compile calls in the place of a graph that it has captured. See NOTE [Graphs]."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from torch import Tensor, fx

from backhaul._backward.checkpointed_call import not_remote
from backhaul._backward.local_recompute import nesting
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.captured_graph import (
    CallKind,
    CapturedGraph,
    GraphCall,
    KnownSegment,
    Learned,
    OtherOpsError,
    undoing_writes,
)
from backhaul._forward.checkpoint import (
    Learn,
    kind_of_call,
    run_known,
    run_segment,
    runs_plainly,
)
from backhaul._forward.compiled_graph import compiled_segment
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Program
from backhaul_runtime.torch_internals.captured_graphs import (
    TorchCompilation,
    arguments_of_graph,
    compilation,
    compilation_now,
    compile_for_autograd,
    draws_in_python,
    forward_of_graph,
    holds_functions,
    inline_checkpoints,
    name_of_compiled,
    numbers_of_graph,
    side_effect_of_compiled,
    why_no_list_of_calls,
    with_own_settings,
)
from backhaul_runtime.torch_internals.generators import generators_in_use, restoring
from backhaul_runtime.torch_internals.inductor import compile_for_training, is_symbolic
from backhaul_runtime.torch_internals.wrapper_tensors import is_wrapper, overrides_functions

Kernels = Literal["eager", "inductor"]


@dataclass(slots=True, eq=False)
class GraphTarget:
    """Where the graphs of a call become segments.

    Attributes:
        dispatcher: Gives the segments to workers.
        options: The options of the call.
        name: The name of the function, for reports; empty: that which torch.compile knows.
        graph_count: The number of graphs that have run.
        compiles_itself: Whether Backhaul compiles the function, so that only one graph runs, and only a proven one.
        is_whole: Whether the call is a micro-batch that is captured in one graph or not at all.
        take: Gets a call of a known program in the place of running it, and returns what stands for its results; None
            to run such calls. See `Graphs.unseen`.
        compiling: The settings that torch.compile has during the call, if it compiles.
    """

    dispatcher: Dispatcher
    options: Options
    name: str = ""
    graph_count: int = 0
    compiles_itself: bool = False
    is_whole: bool = False
    take: Callable[[GraphCall, KnownSegment], Any] | None = None
    compiling: ExitStack = field(default_factory=ExitStack)


class _Present(threading.local):
    """The target of the call that runs in this thread; None outside such a call."""

    target: GraphTarget | None = None


_present = _Present()


class Running:
    """A context in which graphs have this target."""

    def __init__(self, target: GraphTarget) -> None:
        self._target = target

    def __enter__(self) -> None:
        self._before, _present.target = _present.target, self._target

    def __exit__(self, *error: object) -> None:
        _present.target = self._before


class FunctionNeededError(Exception):
    """The function that a graph was captured from has to run in its place.

    Attributes:
        learn: Learns from the call of the function.
    """

    def __init__(self, learn: Learn) -> None:
        super().__init__()
        self.learn = learn


def compile_graph(
    module: fx.GraphModule,
    examples: list[Any],
    default: Callable[[], GraphTarget | None],
    kernels: Kernels = "eager",
) -> Callable[..., Any]:
    """Returns what torch.compile calls in the place of a graph that it has captured.

    Args:
        module: The graph as torch.compile has captured it.
        examples: Examples of the graph's inputs.
        default: Returns the target of a call outside `Graphs.call`; None to run the graph without one.
        kernels: Whose kernels the graph runs.
    """
    plain = compile_for_autograd if kernels == "eager" else compile_for_training
    name = "" if _present.target is None else _present.target.name
    try:
        name = name or name_of_compiled()
        reason = _why_unsuited(module, examples)
        graph = CapturedGraph(
            forward_of_graph(module),
            name,
            arguments_of_graph(module),
            numbers_of_graph(module),
            [position for position, example in enumerate(examples) if is_wrapper(example)],
            holds_functions=holds_functions(module),
        )
        compile_ids = iter([compilation_now()])
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        reason = Refusal.of(error).reason
    if reason and _present.target is not None and (_present.target.compiles_itself or _present.target.is_whole):
        raise UnsuitedError(reason)
    if reason:
        return _keeping(reason, plain(module, examples), name or "compiled graph", default)
    if kernels == "inductor":
        return _compiling_kinds(graph, _plainly(module, examples), default, compile_ids)

    def run(*inputs: Any) -> Any:
        target = _present.target or default()
        if target is None or nesting.active or runs_plainly():
            return graph.run(inputs)
        call = GraphCall(graph, inputs)
        kind = kind_of_call(target.dispatcher, call, target.options)
        learned = kind if isinstance(kind, str) else graph.learned(kind)
        if isinstance(learned, KnownSegment) and (reason := learned.why_not(call.inputs)):
            learned = reason
        if isinstance(learned, KnownSegment) and not (target.compiles_itself and learned.is_due()):  # Rule 6
            target.graph_count += 1
            if target.take is not None:
                return target.take(call, learned)
            return run_known(target.dispatcher, call, learned, target.options)
        _note_compilations(target, graph.name, compile_ids)
        if target.is_whole and (isinstance(kind, str) or isinstance(learned, str)):
            raise Refusal(str(learned))
        expected = learned if isinstance(learned, Program) else None
        needs_function = target.compiles_itself and expected is None  # Rule 5
        if isinstance(kind, str) or isinstance(learned, str):
            learn = noting(str(learned))
        elif needs_function:
            learn = partial(graph.learn_function, kind, call)
        else:
            learn = partial(graph.learn, kind, call, expected)
        if needs_function:
            raise FunctionNeededError(learn)
        target.graph_count += 1
        undo = [] if expected is None else [restoring(generators_in_use())]
        if expected is not None and any(source.is_written for source in expected.sources):
            undo.append(undoing_writes(call.inputs))
        try:
            return run_segment(target.dispatcher, call, tuple(call.arguments), {}, target.options, learn)
        except OtherOpsError:
            for step in undo:
                step()
            target.dispatcher.journal.log(graph.name).repeated()
            raise

    return run


def _note_compilations(target: GraphTarget, name: str, compile_ids: Iterator[str]) -> None:
    """Counts the compilations that have ended since they were noted: at the first call of a graph its own."""
    for compile_id in compile_ids:
        target.dispatcher.journal.log(name).compiled(compilation(compile_id))


def _compiling_kinds(
    graph: CapturedGraph,
    plain: Callable[..., Any],
    default: Callable[[], GraphTarget | None],
    compile_ids: Iterator[str],
) -> Callable[..., Any]:
    """Returns a function that runs a graph with Inductor's kernels: rule 7."""
    lock = threading.Lock()

    def run(*inputs: Any) -> Any:
        target = _present.target or default()
        if target is None or nesting.active or runs_plainly():
            return plain(*inputs)
        target.graph_count += 1
        call = GraphCall(graph, inputs)
        kind = kind_of_call(target.dispatcher, call, target.options)
        learned: Learned | CallKind | None = kind
        if isinstance(kind, CallKind):
            with lock:
                learned = graph.learned(kind)
                if learned is None:
                    _note_compilations(target, graph.name, compile_ids)
                    began_s = monotonic()
                    reason = graph.note(kind, partial(compiled_segment, call, kind))
                    learned = reason or graph.learned(kind)
                    kernels = TorchCompilation(monotonic() - began_s, "")
                    target.dispatcher.journal.log(graph.name).compiled(kernels)
        if isinstance(learned, KnownSegment):
            return run_known(target.dispatcher, call, learned, target.options)
        _keep_activations(target, graph.name, str(learned))
        return plain(*inputs)

    return run


def _plainly(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Returns a function that runs a graph as torch's backend "inductor" does, and compiles it when first needed."""
    if not torch.is_grad_enabled() or any(not isinstance(e, Tensor) or is_symbolic(e) for e in examples):
        return compile_for_training(module, examples)  # later inputs do not show which sizes vary
    made: list[Callable[..., Any]] = []

    def run(*inputs: Any) -> Any:
        if not made:
            made.append(compile_for_training(copy.deepcopy(module), inputs))
        return made[0](*inputs)

    return run


def _keep_activations(target: GraphTarget, name: str, reason: str) -> None:
    """Counts a call whose activations stay on the trainer. Raises NotRemoteError under `strict`."""
    if target.options.strict:
        raise not_remote(name, reason)
    CallLog(target.dispatcher.journal.log(name), target.dispatcher.telemetry).kept(reason)


def _why_unsuited(module: fx.GraphModule, examples: Sequence[Any]) -> str:
    """Returns why a graph must not run as it is; empty if it may."""
    has_exceptions = any(map(is_wrapper, examples)) or holds_functions(module)
    if has_exceptions and any(map(overrides_functions, examples)):  # see `CapturedGraph.run`
        return "it has quantised tensors or flex_attention, and tensors of a class that overrides torch's functions"
    operator = why_no_list_of_calls(module)
    return f"the graph holds {operator}" if operator else ""


def _keeping(
    reason: str, compiled: Callable[..., Any], name: str, default: Callable[[], GraphTarget | None]
) -> Callable[..., Any]:
    """Returns a function that runs a compiled graph and reports why its activations stay on the trainer."""

    def run(*inputs: Any) -> Any:
        target = _present.target or default()
        if target is not None and not nesting.active and not runs_plainly():
            target.graph_count += 1
            _keep_activations(target, name, reason)
        return compiled(*inputs)

    return run


def noting(reason: str) -> Learn:
    """Returns a function that learns nothing from a call but why it was recorded."""
    return lambda *_: reason


def compile_by_inductor(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend of functions that Backhaul compiles with Inductor's kernels."""
    assert _present.target is not None
    _present.target.compiling.enter_context(with_own_settings())
    return compile_graph(module, examples, lambda: None, "inductor")


def compile_here(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend of functions that Backhaul compiles itself."""
    assert _present.target is not None
    if draws_in_python(module):
        raise UnsuitedError("it draws random numbers in Python")  # the call would draw them, and its function again
    _present.target.compiling.enter_context(with_own_settings())
    return compile_graph(module, examples, lambda: None)


def compile_whole(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend of functions whose calls `Graphs.unseen` gives away."""
    if effect := side_effect_of_compiled():
        raise UnsuitedError(f"it changes {effect}, which a call that runs elsewhere cannot do")
    inline_checkpoints(module)
    return compile_here(module, examples)


class UnsuitedError(Exception):
    """A graph that Backhaul does not run in the place of its function."""
