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

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from backhaul._backward.local_recompute import nesting
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.captured_graph import (
    OTHER_OPS,
    GraphCall,
    KnownSegment,
    OtherOpsError,
)
from backhaul._forward.checkpoint import (
    CAPTURED,
    is_capturing,
    name_of,
    run_segment,
    runs_plainly,
)
from backhaul._forward.graph_backend import (
    FunctionNeededError,
    GraphTarget,
    Running,
    compile_by_inductor,
    compile_here,
    compile_whole,
    noting,
)
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul._torch_api.inlining import inlining
from backhaul_runtime.errors import Refusal
from backhaul_runtime.torch_internals.captured_graphs import (
    backend_of,
    before_compilation,
    in_graphs,
    in_one_graph,
    keep_out,
    key_of,
    why_not_captured,
)
from backhaul_runtime.torch_internals.inductor import wait_for_tracing
from backhaul_runtime.torch_internals.private import has_hooks_of_all_modules, without_dynamo

_OWN = (
    *(f"backhaul.{name}" for name in ("_accumulate", "_backward", "_dispatch", "_observe", "_worker_client")),
    *(f"backhaul._forward.{name}" for name in ("awaited_tensor", "graft", "saved_tensor_hooks")),
    "backhaul_runtime",
)
"""What a compiled function may lead into, as by a backward inside of it, and what torch.compile must not trace."""

NO_GRAPH = "torch.compile has run no graph of it"
"""The reason for a function that is compiled with our backend and has run no graph."""


def keep_own_code_out() -> None:
    """Makes torch.compile run Backhaul's code as it is."""
    keep_out(*_OWN)


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
                    return run_segment(self._dispatcher, function, args, kwargs, options, noting(reason))
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
        with Running(target), target.compiling:
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
        return run_segment(self._dispatcher, function, args, kwargs, options, noting(reason))

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
            with Running(target), target.compiling:
                return in_one_graph(key, backend)(function, args, kwargs)
        except FunctionNeededError as not_known:
            learn = not_known.learn
        except OtherOpsError:
            learn = noting(OTHER_OPS)
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


class _NotCapturedError(Exception):
    """A call that has not run, because it cannot be captured.

    Args:
        reason: Why not, in a sentence.
        is_final: Whether other calls of the function would fail as well.
    """

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_final = reason, is_final
