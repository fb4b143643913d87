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
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from backhaul._arguments import Options
from backhaul._frame import Frame, Handle, RemoteSegment
from backhaul._graft import frame_of, graft
from backhaul._held import held_elsewhere
from backhaul._lineage import Copies, Lineage, Recipe
from backhaul._local import Call, nesting
from backhaul._prediction import Beginning
from backhaul._recipes import mark_given, mark_returned, recipe_of
from backhaul._report import Journal
from backhaul._selection import Selection
from backhaul._telemetry import CallLog, Telemetry
from backhaul_runtime.dispatch_mode import DispatchMode
from backhaul_runtime.errors import Refusal
from backhaul_runtime.op_list import allowed_ops
from backhaul_runtime.recorder import Recorder
from backhaul_runtime.replay import Saved
from backhaul_runtime.storages import StorageLedger
from backhaul_runtime.uses import Use, find_uses


class Remote(Protocol):
    """Where segments go. The session is one."""

    journal: Journal
    telemetry: Telemetry | None
    copies: Copies

    def needs_pins(self, device: torch.device) -> bool:
        """Whether a worker would compute other bits than this trainer does on a device, see NOTE [Pinned]."""

    def begin(self, frame: Frame, fn: Callable[..., Any], arguments: list[Tensor]) -> Beginning:
        """Sends what a call that begins now will probably be, if that is known.

        Args:
            frame: With a recording, still empty.
            fn: Will be called.
            arguments: Tensors among its arguments.
        """

    def save(self, frame: Frame, beginning: Beginning, tensors: Sequence[Tensor], forward_s: float) -> RemoteSegment:
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
        from torch import _dynamo

        return _dynamo.disable(_run_segment)(remote, fn, args, kwargs, options)  # type: ignore[no-untyped-call]
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
    call = Call.begin(fn, args, kwargs)
    context, selection = _contexts(frame, call, options)
    if selection is not None:
        options = replace(options, returns="activations")

    arguments = call.tensors()
    pack = _Pack(frame, selection)
    recorder = pack.recorder = Recorder(
        arguments,
        allowed_ops(),
        remote.copies.hold,
        pack,
        traces=options.debug,
        pins=remote.needs_pins(arguments[0].device if arguments else torch.device("cpu")),
    )
    if frame.local_reason:
        recorder.refuse(frame.local_reason)
    frame.recording, frame.so_far = recorder.recording, recorder.so_far
    had_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    returned: list[Any] = []  # a list, so that no name holds what it returns: see `held_elsewhere`
    with remote.begin(frame, fn, arguments) as beginning:
        started = perf_counter()
        nesting.active = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack), recorder, context:
                returned.append(fn(*args, **kwargs))
        finally:
            nesting.active = False
            pack.recorder = pack.selection = frame.so_far = None
            frame.saved_early.clear()
        _check_ended(returned, options, had_cuda)
        frame.watch(arguments)
        frame.is_mutated = selection is not None and selection.is_mutated
        ended = perf_counter()
        kept = _keep(remote, frame, recorder, call, beginning, returned, options, ended - started)
    function_s = ended - started - recorder.own_s
    log.forward(frame, function_s, perf_counter() - began - function_s, pack.packed_bytes - _kept_bytes(frame))
    return kept


def _kept_bytes(frame: Frame) -> int:
    """What the trainer keeps for backward besides leaves, which it has anyway."""
    sources = frame.recording.sources
    return sum(source.layout.span_bytes for source in sources if not source.is_leaf and source.held is not None)


def _contexts(frame: Frame, call: Call, options: Options) -> tuple[AbstractContextManager[Any], Selection | None]:
    """What the call runs under, and the policy among it. Settles where only the trainer can recompute it.

    Raises:
        NotRemoteError: Under `strict`, if only the trainer can.
    """
    context: AbstractContextManager[Any] = nullcontext()
    reason = "debug=True traces it here" if options.debug else ""
    if options.contexts is not None:
        context, again = options.contexts()
        hooks = _top_saved_tensors_default_hooks(True) if options.respects_hooks else None
        if (selection := Selection.of(context, again, hooks)) is not None:
            call.context = DispatchMode()  # the policy has been asked
            return selection, selection
        call.context, reason = again, "it brings a context_fn, which is code"
    if reason:
        frame.stay_here(reason)
    return context, None


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


class _Pack:
    """The hook that autograd calls for each tensor it saves.

    Autograd keeps it as long as the handles, so it lets go of the recorder, and with it of the call's tensors.

    Attributes:
        packed_bytes: What autograd saved so far, each storage once, leaves not.
    """

    def __init__(self, frame: Frame, selection: Selection | None) -> None:
        self._frame = frame
        self.recorder: Recorder | None = None
        self.selection = selection
        self.packed_bytes = 0
        self._packed = StorageLedger()

    def __call__(self, tensor: Tensor) -> Handle:
        recorder = self.recorder
        assert recorder is not None
        recorder.note_saved(tensor)
        saved = recorder.recording.saved[-1]
        is_leaf = saved.source >= 0 and recorder.recording.sources[saved.source].is_leaf
        if not is_leaf and tensor.layout is torch.strided:
            self.packed_bytes += self._packed.add(tensor)
        handle = self._frame.handle()
        if self.selection is not None:
            handle.kept = self.selection.keep(tensor)
        if recorder.has_lost_track:
            self._frame.saved_early[handle.index] = Saved(handle.index, tensor)
        return handle


def _unpack(handle: Handle) -> Tensor:
    return handle.frame.unpack(handle)


def _keep(
    remote: Remote,
    frame: Frame,
    recorder: Recorder,
    call: Call,
    beginning: Beginning,
    returned: list[Any],
    options: Options,
    forward_s: float,
) -> Any:
    """Decides who will recompute the segment, and gives the caller outputs that lead to it."""

    def is_output(tensor: Tensor) -> bool:
        return tensor.requires_grad and not recorder.passes_through(tensor)

    is_held = held_elsewhere(returned, is_output)
    tensors = list({id(leaf): leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, Tensor)}.values())
    outputs = [tensor for tensor in tensors if is_output(tensor)]
    edges = recorder.sources.edges()
    uses = _uses(recorder, edges, outputs)
    saves = bool(frame.recording.saved)  # else the graph keeps nothing, and there is nothing to recompute
    if options.returns == "activations":
        needs_inside = "activations were asked for"
    elif not saves or not any(uses) or any(output.grad_fn is None for output in outputs):
        needs_inside = "no gradient leaves it"
    elif recorder.sources.rewrites_autograd():
        needs_inside = "it changes what tensors from outside depend on"
    elif recorder.shares_storage(outputs, tensors):
        needs_inside = "an output shares memory with an input, a captured tensor or another output"
    elif is_held or recorder.outlived(outputs):
        needs_inside = "a tensor of its inside is held elsewhere"
    else:
        needs_inside = ""
    grafts = not needs_inside
    frame.program = recorder.finish(outputs) if grafts else recorder.finish((), early_stop=options.early_stop)
    frame.use_counts = [len(found) for found in uses]
    if frame.program is None:
        call.keep(recorder.sources.tensors, frame.recording)
        call.trace = recorder.trace
        frame.call = call
        frame.cannot_travel(frame.recording.refusal or "")
    elif outputs and saves:
        _hand_over(remote, frame, recorder, edges, beginning, forward_s, needs_inside)
    chained, frame.predecessors = [source for source, *_ in frame.predecessors], []
    if frame.lineage is None:
        return returned[0]
    if not grafts:
        whole = recorder.whole(frame.lineage.program, outputs)
        if whole is not None:
            frame.lineage.program = whole
            mark_returned(frame.lineage, outputs)
        return returned[0]
    grafted = graft(
        frame, outputs, [recorder.sources.tensors[index] for index, found in enumerate(uses) for _ in found]
    )
    mark_returned(frame.lineage, grafted)
    frame.unshared.watch((source, recorder.sources.tensors[source]) for source in chained)
    return _replaced(returned[0], dict(zip(map(id, outputs), grafted, strict=True)))


def _hand_over(
    remote: Remote,
    frame: Frame,
    recorder: Recorder,
    edges: Sequence[GradientEdge | None],
    beginning: Beginning,
    forward_s: float,
    needs_inside: str,
) -> None:
    """Gives a segment to a worker if one takes it, and lets go of what need not stay here then."""
    if not needs_inside:
        frame.predecessors = [
            (index, before, edge.output_nr)
            for index, edge in enumerate(edges)
            if edge is not None and (before := frame_of(edge.node)) is not None
        ]

    def recipe(index: int) -> Recipe | None:
        edge, source = edges[index], frame.recording.sources[index]
        return None if edge is None else recipe_of(recorder.sources.tensors[index], source, edge)

    try:
        frame.remote = remote.save(frame, beginning, recorder.sources.tensors, forward_s)
        frame.log.reason = needs_inside or "only its gradients are needed"
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


_INTERNAL = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))


def _replaced(value: Any, grafted: Mapping[int, Tensor]) -> Any:
    """What the call returned, with other tensors in it; containers without any stay the same objects."""
    if pytree.tree_is_leaf(value):
        return grafted.get(id(value), value)
    node = pytree.SUPPORTED_NODES[pytree._get_node_type(value)]
    children, context = node.flatten_fn(value)
    replaced = [_replaced(child, grafted) for child in children]
    if all(new is old for new, old in zip(replaced, children, strict=True)):
        return value
    return node.unflatten_fn(replaced, context)


def _uses(recorder: Recorder, edges: Sequence[GradientEdge | None], outputs: list[Tensor]) -> list[list[Use]]:
    targets = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges) if edge is not None}
    try:
        return find_uses(outputs, targets, recorder.first_sequence, len(recorder.sources.tensors))
    except Refusal as refusal:
        recorder.refuse(refusal.reason)
        return []


def _runs_plainly() -> bool:
    """Whether nothing is saved for backward here, or transforms of torch.func and forward AD do their own."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return forward_ad._current_level >= 0
    # torch.func.grad refuses saved-tensor hooks by an error of its own, which is torch's answer to checkpoint too.
    return all(level.key() != torch._C._functorch.TransformType.Grad for level in stack)


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
