"""Runs compiled functions as segments: each graph that torch.compile captures is one.

NOTE [Graphs]
1. torch.compile decides by its guards which graph a call runs. A graph has no control flow, so its program is recorded
   once for each kind of call, see NOTE [Known programs]. Nothing else relies on the guards.
2. A graph runs the functions of torch that the user's code calls, under autograd, so its gradients have eager's bits.
3. A function that the user has compiled runs as it is. Where its graph breaks, each part is a segment of its own, and
   what runs between the parts is not checkpointed: that is what the user's code says.
4. With graphs="eager" Backhaul compiles the function itself, in one graph or not at all: then it is recorded instead.
   Guards on hooks are on for this, because the reference is eager code, where a hook that is added later runs.
5. torch.compile does not see everything, such as a write through NumPy. So the first two calls of each kind run the
   function itself, and the third one the graph, all recorded. If the graph's program differs, the third call runs the
   function as well, after the generators and what the graph wrote to were restored, and so does each later one. If the
   first two calls run different programs, the kind is refused too: the graph leaves out what a function keeps from one
   call to the next, as `lru_cache` does.
6. The guards do not notice each change, such as one of a class. So one in `CHECKED_CALLS` calls runs the function.
7. With Inductor's kernels the program of each kind is compiled before the first call of the kind runs, so all calls
   have the same kernels. What is no compiled program keeps its activations: other kernels would give other bits.
"""

import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch
from torch import Tensor, fx

from backhaul._backward.checkpointed_call import not_remote
from backhaul._backward.local_recompute import nesting
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.captured_graph import (
    OTHER_OPS,
    CallKind,
    CapturedGraph,
    GraphCall,
    KnownSegment,
    Learned,
    OtherOpsError,
    undoing_writes,
)
from backhaul._forward.checkpoint import (
    CAPTURED,
    Learn,
    is_capturing,
    kind_of_call,
    name_of,
    run_known,
    run_segment,
    runs_plainly,
)
from backhaul._forward.compiled_graph import compiled_segment
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul._torch_api.inlining import inlining
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Program
from backhaul_runtime.torch_internals.captured_graphs import (
    TorchCompilation,
    arguments_of_graph,
    backend_of,
    before_compilation,
    compilation,
    compilation_now,
    compile_for_autograd,
    draws_in_python,
    forward_of_graph,
    holds_functions,
    in_graphs,
    in_one_graph,
    inline_checkpoints,
    keep_out,
    key_of,
    name_of_compiled,
    numbers_of_graph,
    side_effect_of_compiled,
    why_no_list_of_calls,
    why_not_captured,
    with_own_settings,
)
from backhaul_runtime.torch_internals.generators import generators_in_use, restoring
from backhaul_runtime.torch_internals.inductor import compile_for_training, is_symbolic, wait_for_tracing
from backhaul_runtime.torch_internals.private import has_hooks_of_all_modules, without_dynamo
from backhaul_runtime.torch_internals.wrapper_tensors import is_wrapper, overrides_functions

_OWN = (
    *(f"backhaul.{name}" for name in ("_accumulate", "_backward", "_dispatch", "_observe", "_worker_client")),
    *(f"backhaul._forward.{name}" for name in ("awaited_tensor", "graft", "saved_tensor_hooks")),
    "backhaul_runtime",
)
"""What a compiled function may lead into, as by a backward inside of it, and what torch.compile must not trace."""

Kernels = Literal["eager", "inductor"]

NO_GRAPH = "torch.compile has run no graph of it"
"""The reason for a function that is compiled with our backend and has run no graph."""


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


class _Running:
    """A context in which graphs have this target."""

    def __init__(self, target: GraphTarget) -> None:
        self._target = target

    def __enter__(self) -> None:
        self._before, _present.target = _present.target, self._target

    def __exit__(self, *error: object) -> None:
        _present.target = self._before


def keep_own_code_out() -> None:
    """Makes torch.compile run Backhaul's code as it is."""
    keep_out(*_OWN)


class _FunctionNeededError(Exception):
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
        raise _UnsuitedError(reason)
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
            learn = _noting(str(learned))
        elif needs_function:
            learn = partial(graph.learn_function, kind, call)
        else:
            learn = partial(graph.learn, kind, call, expected)
        if needs_function:
            raise _FunctionNeededError(learn)
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


class Graphs:
    """Runs the functions of a session as segments, compiled or recorded. Thread-safe.

    Args:
        dispatcher: Gives the segments to workers.
        options: The options of calls outside `call`.
    """

    def __init__(self, dispatcher: Dispatcher, options: Options) -> None:
        self._dispatcher = dispatcher
        self._options = options
        self._refused: dict[Hashable, str] = {}
        self._refused_whole: dict[Hashable, str] = {}  # for `unseen`

    @property
    def target(self) -> GraphTarget:
        """Where a graph becomes a segment that runs outside `call`."""
        return GraphTarget(self._dispatcher, self._options)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        """Runs a function as a segment, with the arguments and errors of `run_segment`.

        Under torch.compile the graph breaks around this call.
        """
        call = without_dynamo(self._call) if torch.compiler.is_compiling() else self._call
        return call(function, args, kwargs, options)

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        if options.may_be_known and not nesting.active and not runs_plainly():
            if is_compiled_for_segments(function):
                name = name_of(getattr(function, "_orig_mod", function))
                call = partial(function, *args, **kwargs)
                return self._compiled(name, call, GraphTarget(self._dispatcher, options))
            if options.graphs == "inductor":
                name = name_of(function)
                call = partial(in_graphs(key_of(function), compile_by_inductor), function, args, kwargs)
                return self._compiled(name, call, GraphTarget(self._dispatcher, options, name))
            if options.graphs == "eager" and key_of(function) not in self._refused:
                if reason := _why_not_now():
                    return run_segment(self._dispatcher, function, args, kwargs, options, _noting(reason))
                return self._compiling(function, args, kwargs, options)
        return run_segment(self._dispatcher, function, args, kwargs, options)

    def unseen(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        take: Callable[[GraphCall, KnownSegment], Any] | None,
    ) -> Any:
        """Lets `take` have a call in the place of running it, if its program is known.

        The first calls of a kind, and one in `CHECKED_CALLS`, run here and are recorded, as Rules 5 and 6 say. Of a
        function that the user has compiled with backend="backhaul" only the first one does, because the graph is what
        counts (Rule 3). Checkpoints inside the function belong to the call.

        Args:
            function: The function to call.
            args: Positional arguments for the function.
            kwargs: Keyword arguments for the function.
            take: Gets the call of the graph. It returns what the function gets in the place of the graph's results.
                None: the call runs here as a segment.

        Raises:
            Refusal: The call cannot be taken and has not run, for this reason.
        """
        if is_compiled := is_compiled_for_segments(function):
            function, backend_options = before_compilation(function)
            if backend_options.get("kernels", "eager") != "eager":
                raise Refusal("it is compiled with Inductor's kernels")
        key = is_compiled, key_of(function)
        if reason := self._refused_whole.get(key) or _why_not_now():
            raise Refusal(reason)
        options = replace(self._options, graphs="eager", compares_outputs=False)
        target = GraphTarget(
            self._dispatcher, options, name_of(function), compiles_itself=not is_compiled, is_whole=True, take=take
        )
        inlining.active = True
        try:
            return self._in_graph(("whole", key), compile_whole, function, args, kwargs, target)
        except _NotCapturedError as error:
            if error.is_final:
                self._refused_whole[key] = error.reason
            raise Refusal(error.reason) from None
        finally:
            inlining.active = False

    def _compiled(self, name: str, call: Callable[[], Any], target: GraphTarget) -> Any:
        """Runs a function that is compiled with our backend."""
        wait_for_tracing()
        with _Running(target), target.compiling:
            returned = call()
        if not target.graph_count:
            CallLog(self._dispatcher.journal.log(name), self._dispatcher.telemetry).kept(NO_GRAPH)
        return returned

    def _compiling(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        """Compiles a function, or runs what was compiled of it before. Records a call that cannot be captured whole."""
        key, target = key_of(function), GraphTarget(self._dispatcher, options, name_of(function), compiles_itself=True)
        try:
            return self._in_graph(key, compile_here, function, args, kwargs, target)
        except _NotCapturedError as error:
            reason = error.reason
            if error.is_final:
                self._refused[key] = reason
        return run_segment(self._dispatcher, function, args, kwargs, options, _noting(reason))

    def _in_graph(
        self,
        key: Hashable,
        backend: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: GraphTarget,
    ) -> Any:
        """Compiles a function, or runs what was compiled of it before. Raises _NotCapturedError before it has run."""
        keep_own_code_out()
        try:
            with _Running(target), target.compiling:
                return in_one_graph(key, backend)(function, args, kwargs)
        except _FunctionNeededError as not_known:
            learn = not_known.learn
        except OtherOpsError:
            learn = _noting(OTHER_OPS)
        except Refusal:
            raise
        except Exception as error:  # torch.compile raises what it finds in the function, and errors of its own
            if target.graph_count:
                raise
            raise _NotCapturedError(*why_not_captured(error)) from None
        return run_segment(self._dispatcher, function, args, kwargs, target.options, learn)


def is_compiled_for_segments(function: Any) -> bool:
    """Whether the user has compiled a function with backend="backhaul"."""
    return bool(getattr(backend_of(function), "makes_segments", False))


def _why_not_now() -> str:
    """Returns why a call cannot be compiled or run as a graph whatever its function is; empty if it can."""
    if is_capturing():
        return CAPTURED
    if has_hooks_of_all_modules():  # the guards do not see these
        return "hooks that run for all modules are registered"
    return ""


def _noting(reason: str) -> Learn:
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
        raise _UnsuitedError("it draws random numbers in Python")  # the call would draw them, and its function again
    _present.target.compiling.enter_context(with_own_settings())
    return compile_graph(module, examples, lambda: None)


def compile_whole(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The backend of functions whose calls `Graphs.unseen` gives away."""
    if effect := side_effect_of_compiled():
        raise _UnsuitedError(f"it changes {effect}, which a call that runs elsewhere cannot do")
    inline_checkpoints(module)
    return compile_here(module, examples)


class _UnsuitedError(Exception):
    """A graph that Backhaul does not run in the place of its function."""


class _NotCapturedError(Exception):
    """A call that has not run, because it cannot be captured.

    Args:
        reason: Why not, in a sentence.
        is_final: Whether other calls of the function would fail as well.
    """

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_final = reason, is_final
