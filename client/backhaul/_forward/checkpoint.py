"""Runs a checkpointed call under the recorder, and decides what is kept for backward."""

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from backhaul._backward.frame import Frame, RecordedSegment, Uses
from backhaul._backward.handles import CheckpointedCall, Handles, HandleTable, awaited, not_remote
from backhaul._backward.lineage import Copies, Lineage, Recipe
from backhaul._backward.local_recompute import ReplayOptions, nesting
from backhaul._backward.recipes import mark_given, mark_returned, recipe_of
from backhaul._backward.remote_side import RemoteSegment
from backhaul._dispatch.prediction import PendingCall
from backhaul._forward.graft import graft, origin_of
from backhaul._forward.graph_cut import GraphUses, find_graph_uses, named
from backhaul._forward.reference_counts import has_other_references
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks, unpack
from backhaul._observe.call_log import CallLog
from backhaul._observe.report import Journal
from backhaul._observe.telemetry import Telemetry
from backhaul._torch_api.kept_regions import outside_of_kept_regions
from backhaul._torch_api.options import Options
from backhaul._torch_api.selective import Hooks, Selection
from backhaul_runtime.errors import NotRemoteError, Refusal, log_once
from backhaul_runtime.program.names import JoinedNames
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.durations import Duration, Stopwatch, device_of_work
from backhaul_runtime.tensors.layout import layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import (
    container_node,
    current_transforms_differentiate,
    is_in_forward_mode,
    pytree,
    top_saved_tensor_hooks,
    version_of,
    without_dynamo,
)

_Contexts = tuple[AbstractContextManager[Any], ReplayOptions, Selection | None, str]
CAPTURED = "a CUDA graph is being captured"
"""The reason for calls that run plainly, because a replay of the graph would run no code of ours."""


class Destination(Protocol):
    """The destination of segments: a session's dispatcher. Thread-safe.

    Attributes:
        journal: Counts calls by name.
        telemetry: Reports calls; None if telemetry is off.
        copies: The copies of tensors that the trainer keeps.
    """

    journal: Journal
    telemetry: Telemetry | None
    copies: Copies

    @property
    def fixed(self) -> FixedDigests | None:
        """Digests of parameters, while the calling thread has a block open in which they must not change; else None."""

    def keeps_activations(self, name: str) -> bool:
        """Whether the trainer keeps the activations of the call of this name that begins now."""

    def records_choices(self, device_types: Iterable[str]) -> bool:
        """Whether a worker computes other bits than a device of these types, see NOTE [Recorded choices]."""

    def allows(self) -> JoinedNames:
        """Returns what workers run beside torch's own ops."""

    def begin(self, call: CheckpointedCall, fn: Callable[..., Any], arguments: list[Tensor]) -> PendingCall:
        """Sends the inputs of a call that begins now, if its program can be predicted.

        Args:
            call: The call, whose recording is still empty.
            fn: The function that will be called.
            arguments: The tensors among its arguments.
        """

    def save(self, segment: RecordedSegment, pending: PendingCall, forward: Duration) -> tuple[RemoteSegment, Program]:
        """Starts sending a segment. Raises Refusal if no worker takes it.

        Args:
            segment: The segment as it was recorded in forward.
            pending: What `begin` returned for the call.
            forward: What forward took, which determines the deadline of a recomputation.

        Returns:
            The remote side, and the program to keep: an earlier one if that is equal.
        """


class Graft(NamedTuple):
    """A graft replaces the graph of the segment's inside, and backward requests gradients."""

    uses: GraphUses


class KeepInside(NamedTuple):
    """The graph of the segment's inside stays, and backward requests activations."""

    reason: str


class Local(NamedTuple):
    """The graph of the segment's inside stays, and no worker gets the segment.

    Attributes:
        reason: Why no worker gets the segment.
        keeps_activations: Whether the trainer keeps activations that no program can express.
    """

    reason: str
    keeps_activations: bool


def run_segment(
    destination: Destination, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Runs `_run_segment`. Under torch.compile the graph breaks around this call."""
    run = without_dynamo(_run_segment) if torch.compiler.is_compiling() else _run_segment
    return run(destination, fn, args, kwargs, options)


def _run_segment(
    destination: Destination, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Calls fn once with the caller's own objects, and keeps what backward needs instead of activations.

    A call inside another one belongs to the outer segment and keeps nothing of its own.

    Raises:
        NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
    """
    # torch's reentrant variant does the same, so code that relies on it sees no difference.
    if options.use_reentrant and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=4)
        with torch.no_grad():
            return fn(*args, **kwargs)
    if nesting.active or _runs_plainly():
        return fn(*args, **kwargs)
    began = perf_counter()
    name = name_of(fn)
    # A checkpoint of torch around this call would run it again, perhaps outside the trainer's share.
    if options.contexts is None and top_saved_tensor_hooks(True) is None and destination.keeps_activations(name):
        return fn(*args, **kwargs)
    log = CallLog(destination.journal.log(name), destination.telemetry)
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        _note_capture(log, name, options)
        with nullcontext() if options.contexts is None else options.contexts()[0]:
            return fn(*args, **kwargs)
    contexts = None if options.contexts is None else options.contexts()
    begun = _begun(destination, log, (args, kwargs), options, contexts)
    if begun is None:
        with nullcontext() if contexts is None else contexts[0]:
            return fn(*args, **kwargs)
    arguments, recorder, pack, (context, replay_options, selection, local_reason) = begun
    inside_reason = 'returns="activations" was requested' if options.returns == "activations" else ""
    if selection is not None:
        inside_reason = "its policy chooses what the trainer keeps"
    device = device_of_work(arguments)
    call = CheckpointedCall(name, log, options, recorder.recording, local_reason, inside_reason, device)
    if local_reason:
        call.check_strict(local_reason)
        log.on_trainer(local_reason)
    table = HandleTable(call, recorder.so_far)
    pack.begin(recorder, table)
    had_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    returned: list[Any] = []  # a list, so that no variable refers to the return value, see `has_other_references`
    pending = recorder.recording.guarded(destination.begin, call, fn, arguments)
    with pending or nullcontext():
        stopwatch, started = Stopwatch(device), perf_counter()
        nesting.active = True
        try:
            with outside_of_kept_regions(), torch.autograd.graph.saved_tensors_hooks(pack, unpack), recorder, context:
                returned.append(fn(*args, **kwargs))
        finally:
            nesting.active = False
            pack.release()
            table.end_call()
        _check_ended(returned, options, had_cuda)
        forward, ended = stopwatch.stop(), perf_counter()
        if pack.has_kept_region:
            call = replace(call, inside_reason="regions of it keep their activations")
        build = partial(
            Frame,
            call,
            table.handles,
            replay_options=replace(replay_options, trace=recorder.trace),
            arguments=[(weakref.ref(one), version_of(one)) for one in arguments if not _is_copied(one)],
            is_mutated=selection is not None and selection.is_mutated,
        )
        frame, kept = _kept(destination, call, recorder, pending, returned, table.handles, build, forward)
        table.unpack_by(frame.unpack)
    overhead_s = perf_counter() - began - (ended - started - recorder.own_s)
    _report(log, frame, forward, recorder.own_s, overhead_s, pack.packed_bytes - _kept_bytes(call))
    return kept


def _report(
    log: CallLog, frame: Frame, forward: Duration, recorded_s: float, overhead_s: float, saved_bytes: int
) -> None:
    # On an accelerator the recorder delays only the host, unless the device has nothing left to do.
    function = forward - recorded_s if isinstance(forward, float) else forward
    try:
        log.forward(frame, function, overhead_s, saved_bytes)
    except Exception as error:  # telemetry must not end a forward
        log_once(error)


def _begun(
    destination: Destination, log: CallLog, arguments_of_call: Any, options: Options, contexts: Any
) -> tuple[list[Tensor], Recorder, SavedTensorHooks, _Contexts] | None:
    """Returns the result of `_begin`; None after an unexpected error, for a call that keeps its activations."""
    try:
        return _begin(destination, arguments_of_call, options, contexts)
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        refusal = Refusal.of(error)
    if options.strict:
        raise not_remote(log.name, refusal.reason) from refusal.cause
    log.kept(refusal.reason)
    return None


def _begin(
    destination: Destination, arguments_of_call: Any, options: Options, contexts: Any
) -> tuple[list[Tensor], Recorder, SavedTensorHooks, _Contexts]:
    """Returns the tensors among the arguments of a call, and what records it."""
    arguments = [leaf for leaf in pytree.tree_leaves(arguments_of_call) if isinstance(leaf, Tensor)]
    hooks = top_saved_tensor_hooks(True) if options.respects_hooks else None
    in_context = _contexts(options, contexts, hooks)
    pack = SavedTensorHooks(destination.copies.hold, in_context[2], hooks)
    recorder = Recorder(
        arguments,
        allowed_ops(),
        destination.copies.hold,
        pack,
        pack.op_ended,
        traces=options.debug,
        pins=destination.records_choices(_device_types(arguments)),
        fixed=destination.fixed,
        allows=destination.allows(),
    )
    return arguments, recorder, pack, in_context


def _is_copied(argument: Tensor) -> bool:
    """Whether backward takes an argument's value from a copy, so that the caller may write to it, as into a cache.

    A write to an argument that takes a gradient is an error in torch, whatever backward would compute.
    """
    return not argument.requires_grad and unsupported_reason(argument) is None


def _note_capture(log: CallLog, name: str, options: Options) -> None:
    """Counts a call that runs plainly while its stream is captured: a replay of the graph would run no code of ours."""
    if options.strict:
        raise not_remote(name, CAPTURED)
    log.kept(CAPTURED)


def _device_types(arguments: Sequence[Tensor]) -> set[str]:
    """Returns the types of devices that a call may compute on. Its parameters may be elsewhere than its arguments."""
    used = {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    return used | ({argument.device.type for argument in arguments} or {"cpu"})


def _kept_bytes(call: CheckpointedCall) -> int:
    """Returns the bytes that the trainer keeps for backward, without leaves, which it has anyway."""
    sources = call.recording.sources
    return sum(source.layout.span_bytes for source in sources if not source.is_leaf and source.kept_value is not None)


def _contexts(options: Options, contexts: Any, hooks: Hooks | None) -> _Contexts:
    """Returns the call's context, replay options and policy, and why only the trainer can recompute it."""
    if contexts is not None:
        context, again = contexts
        if (selection := Selection.of(context, again, hooks)) is not None:
            return selection, ReplayOptions(again=selection.again), selection, ""
        return context, ReplayOptions(again), None, "it has a context_fn, which is code"
    reason = "debug=True traces its recomputation" if options.debug else ""
    return nullcontext(), ReplayOptions(), None, reason


def _check_ended(returned: list[Any], options: Options, had_cuda: bool) -> None:
    """Raises RuntimeError, with torch's message, for a call that torch rejects after it has ended."""
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


def decide(
    recorder: Recorder,
    call: CheckpointedCall,
    edges: Sequence[GradientEdge | None],
    outputs: list[Tensor],
    tensors: list[Tensor],
    *,
    is_held: bool,
) -> Graft | KeepInside | Local:
    """Decides where a segment is recomputed and what stays of its graph. A pure function.

    Args:
        recorder: The recorder of the call, which has ended.
        call: The call that was recorded.
        edges: The graph edge of each source; None for a source without gradient.
        outputs: The tensors that the call created and returned and that require gradients.
        tensors: All tensors that the call returned.
        is_held: Whether something besides the return value refers to an output.
    """
    if call.recording.refusal is not None:
        return Local(named(call.recording.refusal, outputs, recorder.first_sequence), keeps_activations=True)
    if call.local_reason:
        return Local(call.local_reason, keeps_activations=False)
    if call.inside_reason:
        return KeepInside(call.inside_reason)
    if recorder.changeable_argument:  # the graph's own node sees such a change in backward, a worker's would not
        return KeepInside(f"a custom function takes a {recorder.changeable_argument}, which may change before backward")
    try:
        return Graft(find_graph_uses(recorder, edges, outputs, tensors, is_held=is_held))
    except Refusal as refusal:
        return KeepInside(refusal.reason)


def _kept(
    destination: Destination,
    call: CheckpointedCall,
    recorder: Recorder,
    pending: PendingCall | None,
    returned: list[Any],
    handles: Handles,
    build: Callable[..., Frame],
    forward: Duration,
) -> tuple[Frame, Any]:
    """Returns the result of `_keep`. After an unexpected error, the trainer recomputes the segment.

    Takes and returns what `_keep` does.
    """
    try:
        return _keep(destination, call, recorder, pending, returned, handles, build, forward)
    except NotRemoteError:
        raise
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        return _kept_here(destination, call, recorder, build, Refusal.of(error)), returned[0]


def _kept_here(
    destination: Destination, call: CheckpointedCall, recorder: Recorder, build: Callable[..., Frame], refusal: Refusal
) -> Frame:
    call.check_strict(refusal.reason, refusal.cause)
    call.log.fallback(refusal.reason)
    lineage = _lineage(destination, call, recorder.so_far())
    return build(program=lineage.program, lineage=lineage, local_reason=refusal.reason)


def _lineage(destination: Destination, call: CheckpointedCall, program: Program) -> Lineage:
    return Lineage(
        call.name,
        destination.journal.session,
        _call_site(),
        program,
        call.recording,
        destination.copies,
        call.options.durability,
    )


def _keep(
    destination: Destination,
    call: CheckpointedCall,
    recorder: Recorder,
    pending: PendingCall | None,
    returned: list[Any],
    handles: Handles,
    build: Callable[..., Frame],
    forward: Duration,
) -> tuple[Frame, Any]:
    """Decides where the segment will be recomputed, and builds its frame.

    Args:
        destination: The dispatcher that segments go to.
        call: The call, which has ended.
        recorder: The recorder of the call.
        pending: The object that `Destination.begin` returned for the call; None if `begin` failed.
        returned: A list with the return value of the call as its only item.
        handles: The handles of the call's saved tensors.
        build: Constructs the frame from what is decided here.
        forward: What the call took.

    Returns:
        The frame, and the value for the caller, whose outputs lead to the frame.
    """

    def is_output(tensor: Tensor) -> bool:
        return tensor.requires_grad and not recorder.passes_through(tensor)

    is_held = has_other_references(returned, is_output)  # first, while no other variable refers to an output
    tensors = list({id(leaf): leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, Tensor)}.values())
    outputs = [tensor for tensor in tensors if is_output(tensor)]
    edges = recorder.sources.edges()
    sources = recorder.sources.tensors
    decision = decide(recorder, call, edges, outputs, tensors, is_held=is_held)
    if isinstance(decision, Graft):
        graph_uses = decision.uses
        program = recorder.finish(outputs, graph_uses.casts)
        made = (*graph_uses.tensors[len(call.recording.sources) :], *outputs)
        layouts = [*[source.layout for source in call.recording.sources], *map(layout_of, made)]
        uses = Uses([len(of_one) for of_one in graph_uses.uses], layouts, len(graph_uses.stages) > 1)
    else:
        uses = Uses()
        program = recorder.finish(early_stop=call.options.early_stop)
        if isinstance(decision, Local) and decision.keeps_activations:
            call.check_strict(decision.reason, call.recording.failure)
            call.log.kept(decision.reason)
        # Backward can ask for nothing: all that autograd saved is kept by the caller, or has died with its graph.
        if not (program.saved_count and awaited(handles)):
            return build(local_reason=_local_reason(decision)), returned[0]
        del edges[len(call.recording.sources) :]  # drops what was recorded after the refusal
    # Each stage of a staged segment returns a part of a boundary's gradient, so none of them shows it complete.
    predecessors = []
    if isinstance(decision, Graft) and not uses.is_staged:
        predecessors = [
            (index, *before)
            for index, edge in enumerate(edges)
            if edge is not None and (before := origin_of(edge)) is not None
        ]
    remote, local_reason = None, _local_reason(decision)
    if not local_reason:
        assert pending is not None
        segment = RecordedSegment(call, program, sources, uses, predecessors)
        remote, program, local_reason = _offer(destination, segment, pending, forward)
    if remote is not None:
        call.log.taken(decision.reason if isinstance(decision, KeepInside) else "")
    lineage = _lineage(destination, call, program)
    if remote is not None:
        lineage.find_recipes(partial(_recipe, call, sources, edges))
    mark_given(lineage, sources, edges)
    frame = build(program=program, lineage=lineage, uses=uses, remote=remote, local_reason=local_reason)
    if not isinstance(decision, Graft):
        whole = None if call.recording.refusal is not None else recorder.whole(program, outputs)
        if whole is not None:
            lineage.program = whole
            mark_returned(lineage, outputs)
        value = returned[0]
    else:
        grafted = graft(frame, outputs, graph_uses.tensors, graph_uses.uses, graph_uses.stages)
        mark_returned(lineage, grafted)
        frame.consumers.watch((source, sources[source]) for source, *_ in predecessors)
        value = _replaced(returned[0], dict(zip(map(id, outputs), grafted, strict=True)))
    if remote is not None:  # last, because after an error the trainer recomputes from the copies that this drops
        lineage.release()
    return frame, value


def _offer(
    destination: Destination, segment: RecordedSegment, pending: PendingCall, forward: Duration
) -> tuple[RemoteSegment | None, Program, str]:
    """Offers a segment to a worker. Returns its remote side, its program, and why no worker takes it, if none does."""
    try:
        return *destination.save(segment, pending, forward), ""
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        return None, segment.program, _not_taken(segment.call, Refusal.of(error))


def _not_taken(call: CheckpointedCall, refusal: Refusal) -> str:
    call.check_strict(refusal.reason, refusal.cause)
    note = call.log.on_trainer if refusal.is_chosen else call.log.fallback
    note(refusal.reason, is_said=refusal.is_said)
    return refusal.reason


def _local_reason(decision: Graft | KeepInside | Local) -> str:
    return decision.reason if isinstance(decision, Local) else ""


def _recipe(
    call: CheckpointedCall, sources: Sequence[Tensor], edges: Sequence[GradientEdge | None], index: int
) -> Recipe | None:
    """Returns how a source follows from earlier segments; None if autograd's graph does not show it."""
    edge = edges[index]
    return None if edge is None else recipe_of(sources[index], call.recording.sources[index], edge)


def _call_site() -> str:
    """Returns the file and line of the innermost code that is neither ours nor torch's."""
    at = sys._getframe()
    while at.f_back is not None and at.f_code.co_filename.startswith(_INTERNAL):
        at = at.f_back
    return f"{at.f_code.co_filename}:{at.f_lineno}"


_INTERNAL = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _replaced(value: Any, grafted: Mapping[int, Tensor]) -> Any:
    """Replaces tensors in a return value. Containers without such tensors stay the same objects."""
    if pytree.tree_is_leaf(value):
        return grafted.get(id(value), value)
    node = container_node(value)
    children, context = node.flatten_fn(value)
    replaced = [_replaced(child, grafted) for child in children]
    if all(new is old for new, old in zip(replaced, children, strict=True)):
        return value
    return node.unflatten_fn(replaced, context)


def _runs_plainly() -> bool:
    """Whether autograd saves nothing here, or a transform of torch.func or forward AD is in force."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    differentiate = current_transforms_differentiate()
    if differentiate is None:
        return is_in_forward_mode()
    # torch.func.grad rejects saved-tensor hooks with its own error, which users of torch's checkpoint see too.
    return not differentiate


def name_of(fn: Callable[..., Any]) -> str:
    """Returns a name of the function for people: the class of a module, or the qualified name of a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    name = "__name__" if inspect.isbuiltin(fn) else "__qualname__"
    return str(getattr(fn, name, type(fn).__name__)).replace("<locals>.", "")
