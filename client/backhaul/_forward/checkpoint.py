"""A checkpointed call: the forward, recorded, and what of it is kept for backward."""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from backhaul._backward.frame import Frame, RemoteSegment
from backhaul._backward.lineage import Copies, Lineage, Recipe
from backhaul._backward.local_recompute import ReplayOptions, nesting
from backhaul._backward.recipes import mark_given, mark_returned, recipe_of
from backhaul._dispatch.prediction import PendingCall
from backhaul._forward.graft import graft, origin_of
from backhaul._forward.graph_cut import find_graph_uses, named
from backhaul._forward.reference_counts import has_other_references
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks, unpack
from backhaul._observe.report import Journal
from backhaul._observe.telemetry import CallLog, Telemetry
from backhaul._torch_api.options import Options
from backhaul._torch_api.selective import Hooks, Selection
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.private import (
    container_node,
    current_transforms_differentiate,
    is_in_forward_mode,
    pytree,
    top_saved_tensor_hooks,
    without_dynamo,
)


class Remote(Protocol):
    """Where segments go. The session is one."""

    journal: Journal
    telemetry: Telemetry | None
    copies: Copies

    def records_choices(self, device: torch.device) -> bool:
        """Whether a worker would compute other bits than this trainer does on a device, see NOTE [Pinned]."""

    def begin(self, frame: Frame, fn: Callable[..., Any], arguments: list[Tensor]) -> PendingCall:
        """Sends what a call that begins now will probably be, if that is known.

        Args:
            frame: With a recording, still empty.
            fn: Will be called.
            arguments: Tensors among its arguments.
        """

    def save(self, frame: Frame, beginning: PendingCall, tensors: Sequence[Tensor], forward_s: float) -> RemoteSegment:
        """Starts sending a frame's segment. Raises Refusal where no worker takes it.

        Args:
            frame: With its program and recording.
            beginning: Of the call.
            tensors: The caller's object behind each source.
            forward_s: What forward took, the measure for what recomputation may take.
        """


def run_segment(
    remote: Remote, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """See `_run_segment`. For torch.compile it is where the graph around it breaks."""
    if torch.compiler.is_compiling():
        return without_dynamo(_run_segment)(remote, fn, args, kwargs, options)
    return _run_segment(remote, fn, args, kwargs, options)


def _run_segment(
    remote: Remote, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Calls fn once, on the caller's own objects, and keeps what backward needs instead of activations.

    A call inside another belongs to the outer one: it is recorded with it and keeps nothing of its own.

    Raises:
        NotRemoteError: Under `strict`, if the segment would be recomputed on the trainer.
    """
    if options.use_reentrant and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=4)
        with torch.no_grad():
            return fn(*args, **kwargs)
    if nesting.active or _runs_plainly():
        return fn(*args, **kwargs)
    name = name_of(fn)
    began = perf_counter()
    log = CallLog(remote.journal.log(name), remote.telemetry)
    frame = Frame(name, log, options)
    arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    hooks = top_saved_tensor_hooks(True) if options.respects_hooks else None
    context, frame.aids, selection = _contexts(frame, options, hooks)
    inside = 'returns="activations" was asked for' if options.returns == "activations" else ""
    if selection is not None:
        inside = "its policy chooses what the trainer keeps"
    elif frame.local_reason:
        inside = frame.local_reason
    pack = SavedTensorHooks(frame, remote.copies.hold, selection, hooks)
    recorder = pack.recorder = Recorder(
        arguments,
        allowed_ops(),
        remote.copies.hold,
        pack,
        pack.op_ended,
        traces=options.debug,
        pins=remote.records_choices(arguments[0].device if arguments else torch.device("cpu")),
    )
    frame.aids = replace(frame.aids, trace=recorder.trace)
    frame.recording, frame.so_far = recorder.recording, recorder.so_far
    had_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    returned: list[Any] = []  # a list, so that no name holds what it returns: see `has_other_references`
    with remote.begin(frame, fn, arguments) as beginning:
        started = perf_counter()
        nesting.active = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), recorder, context:
                returned.append(fn(*args, **kwargs))
        finally:
            nesting.active = False
            pack.let_go()
            frame.so_far = None
        _check_ended(returned, options, had_cuda)
        frame.watch(arguments)
        frame.is_mutated = selection is not None and selection.is_mutated
        ended = perf_counter()
        kept = _keep(remote, frame, recorder, beginning, returned, inside, ended - started)
    function_s = ended - started - recorder.own_s
    log.forward(frame, function_s, perf_counter() - began - function_s, pack.packed_bytes - _kept_bytes(frame))
    return kept


def _kept_bytes(frame: Frame) -> int:
    """What the trainer keeps for backward besides leaves, which it has anyway."""
    sources = frame.recording.sources
    return sum(source.layout.span_bytes for source in sources if not source.is_leaf and source.held is not None)


def _contexts(
    frame: Frame, options: Options, hooks: Hooks | None
) -> tuple[AbstractContextManager[Any], ReplayOptions, Selection | None]:
    """What the call runs in, what its recomputation runs with, and the policy among them.

    Settles it where only the trainer can recompute the call.

    Raises:
        NotRemoteError: Under `strict`, if only the trainer can recompute it.
    """
    if options.contexts is not None:
        context, again = options.contexts()
        if (selection := Selection.of(context, again, hooks)) is not None:
            return selection, ReplayOptions(again=selection.again), selection
        frame.stay_here("it brings a context_fn, which is code")
        return context, ReplayOptions(again), None
    if options.debug:
        frame.stay_here("debug=True traces its recomputation")
    return nullcontext(), ReplayOptions(), None


def _check_ended(returned: list[Any], options: Options, had_cuda: bool) -> None:
    """Raises RuntimeError for calls that torch refuses only once they have ended, in torch's words."""
    if not returned:
        raise RuntimeError(
            "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised during "
            "the checkpointed forward. This is not supported because checkpoint cannot return a value for a failed "
            "forward."
        )
    if options.preserve_rng_state and torch.cuda.is_initialized() and not had_cuda:  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "PyTorch's device state was initialized in the forward pass of a Checkpoint, which is not allowed. Use the "
            "device once before, or pass preserve_rng_state=False"
        )


def _keep(
    remote: Remote,
    frame: Frame,
    recorder: Recorder,
    beginning: PendingCall,
    returned: list[Any],
    needs_inside: str,
    forward_s: float,
) -> Any:
    """Decides who will recompute the segment, and gives the caller outputs that lead to it.

    Args:
        remote: Where segments go.
        frame: What stands for the segment until backward. The call has ended.
        recorder: Recorded the call.
        beginning: What was sent when the call began.
        returned: What it returned, as the only item.
        needs_inside: Why the trainer needs the graph of its inside, if that is settled.
        forward_s: What the call took.
    """

    def is_output(tensor: Tensor) -> bool:
        return tensor.requires_grad and not recorder.passes_through(tensor)

    is_held = has_other_references(returned, is_output)
    tensors = list({id(leaf): leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, Tensor)}.values())
    outputs = [tensor for tensor in tensors if is_output(tensor)]
    edges = recorder.sources.edges()
    used = None
    try:
        if not needs_inside:
            used = find_graph_uses(recorder, edges, outputs, tensors, is_held=is_held)
    except Refusal as refusal:
        needs_inside = refusal.reason
    if used is not None:
        frame.program = recorder.finish(outputs, used.casts)
        frame.use_counts, frame.is_staged = [len(found) for found in used.uses], len(used.stages) > 1
        sources = frame.recording.sources
        made = (*used.tensors[len(sources) :], *outputs)
        frame.used_layouts = [*[source.layout for source in sources], *map(layout_of, made)]
    else:
        program = recorder.finish(early_stop=frame.options.early_stop)
        if frame.recording.refusal is not None:
            frame.keep_here(named(frame.recording.refusal, outputs, recorder.first_sequence))
        if not (program.saved_count and frame.is_awaited):
            return returned[0]
        frame.program = program
        del edges[len(frame.recording.sources) :]  # of what came after a refusal
    _hand_over(remote, frame, recorder, edges, beginning, forward_s, needs_inside)
    chained, frame.predecessors = [source for source, *_ in frame.predecessors], []
    assert frame.lineage is not None
    if used is None:
        whole = None if frame.recording.refusal is not None else recorder.whole(frame.lineage.program, outputs)
        if whole is not None:
            frame.lineage.program = whole
            mark_returned(frame.lineage, outputs)
        return returned[0]
    grafted = graft(frame, outputs, used.tensors, used.uses, used.stages)
    mark_returned(frame.lineage, grafted)
    frame.unshared.watch((source, recorder.sources.tensors[source]) for source in chained)
    return _replaced(returned[0], dict(zip(map(id, outputs), grafted, strict=True)))


def _hand_over(
    remote: Remote,
    frame: Frame,
    recorder: Recorder,
    edges: Sequence[GradientEdge | None],
    beginning: PendingCall,
    forward_s: float,
    needs_inside: str,
) -> None:
    """Gives a segment to a worker if one takes it, and lets go of what need not stay here then."""
    if not needs_inside and not frame.is_staged:
        frame.predecessors = [
            (index, *before)
            for index, edge in enumerate(edges)
            if edge is not None and (before := origin_of(edge)) is not None
        ]

    def recipe(index: int) -> Recipe | None:
        edge, source = edges[index], frame.recording.sources[index]
        return None if edge is None else recipe_of(recorder.sources.tensors[index], source, edge)

    if not frame.local_reason:
        try:
            frame.remote = remote.save(frame, beginning, recorder.sources.tensors, forward_s)
            frame.log.taken(needs_inside)
        except Refusal as refusal:
            frame.not_taken(refusal)
    assert frame.program is not None
    frame.lineage = Lineage(
        frame.name,
        remote.journal.session,
        _call_site(),
        frame.program,
        frame.recording,
        remote.copies,
        frame.options.durability,
    )
    if frame.remote is not None:
        frame.lineage.let_go(recipe)
    mark_given(frame.lineage, recorder.sources.tensors, edges)


def _call_site() -> str:
    """File and line of the innermost code that is neither ours nor torch's."""
    at = sys._getframe()
    while at.f_back is not None and at.f_code.co_filename.startswith(_INTERNAL):
        at = at.f_back
    return f"{at.f_code.co_filename}:{at.f_lineno}"


_INTERNAL = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _replaced(value: Any, grafted: Mapping[int, Tensor]) -> Any:
    """What the call returned, with other tensors in it; containers without any stay the same objects."""
    if pytree.tree_is_leaf(value):
        return grafted.get(id(value), value)
    node = container_node(value)
    children, context = node.flatten_fn(value)
    replaced = [_replaced(child, grafted) for child in children]
    if all(new is old for new, old in zip(replaced, children, strict=True)):
        return value
    return node.unflatten_fn(replaced, context)


def _runs_plainly() -> bool:
    """Whether nothing is saved for backward here, or transforms of torch.func and forward AD do their own."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    differentiate = current_transforms_differentiate()
    if differentiate is None:
        return is_in_forward_mode()
    # torch.func.grad refuses saved-tensor hooks by an error of its own, which is torch's answer to checkpoint too.
    return not differentiate


def name_of(fn: Callable[..., Any]) -> str:
    """What people call this function: a module's class, a function's qualified name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    name = "__name__" if inspect.isbuiltin(fn) else "__qualname__"
    return str(getattr(fn, name, type(fn).__name__)).replace("<locals>.", "")
