"""Runs a checkpointed call under the recorder. `keep` then decides what is kept of it for backward."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from backhaul._backward.checkpointed_call import CheckpointedCall, not_remote
from backhaul._backward.handles import HandleTable
from backhaul._backward.local_recompute import ReplayOptions, nesting
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.captured_graph import CallKind, GraphCall, KnownSegment
from backhaul._forward.keep import BegunCall, EndedCall, keep
from backhaul._forward.known_call import BegunKnownCall
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks, unpack
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul._torch_api.kept_regions import outside_of_kept_regions
from backhaul._torch_api.selective import Hooks, Selection
from backhaul_runtime.errors import NotRemoteError, Refusal
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.known_program import CHOICES_SENT
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.stopwatch import Stopwatch, device_of_work
from backhaul_runtime.torch_internals.private import (
    current_transforms_differentiate,
    is_in_forward_mode,
    pytree,
    top_saved_tensor_hooks,
)
from backhaul_runtime.torch_internals.wrapper_tensors import tensors_inside

T = TypeVar("T")
_Contexts = tuple[AbstractContextManager[Any], ReplayOptions, Selection | None, str]
CAPTURED = "a CUDA graph is being captured"
"""The reason for calls that run plainly, because a replay of the graph would run no code of ours."""


Learn = Callable[[EndedCall, int], str]
"""Learns from a recorded call, given with the bytes that autograd saved and that are not kept. Returns why a later call
has to be recorded all the same; empty if it need not be."""


def run_segment(
    dispatcher: Dispatcher,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    learn: Learn | None = None,
) -> Any:
    """Calls fn once with the caller's own objects, and keeps what backward needs instead of activations.

    A call inside another one belongs to the outer segment and keeps nothing of its own.

    Args:
        dispatcher: Gives the segment to a worker.
        fn: The function to call.
        args: Positional arguments for the function.
        kwargs: Keyword arguments for the function.
        options: The options of the call.
        learn: Called when it is decided what is kept of the call.

    Raises:
        NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
    """
    # torch's reentrant variant does the same, so code that relies on it sees no difference.
    if options.use_reentrant and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=4)
        with torch.no_grad():
            return fn(*args, **kwargs)
    if nesting.active or runs_plainly():
        return fn(*args, **kwargs)
    began = perf_counter()
    contexts = None if options.contexts is None else options.contexts()
    begun = _begun(
        dispatcher, fn, options, contexts, lambda log: _begin(dispatcher, fn, (args, kwargs), options, contexts, log)
    )
    if begun is None:
        with nullcontext() if contexts is None else contexts[0]:
            return fn(*args, **kwargs)
    call, recorder, pack = begun.call, begun.recorder, begun.pack
    had_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    returned: list[Any] = []  # a list, so that no variable refers to the return value, see `has_other_references`
    with begun.pending or nullcontext():
        stopwatch, started = recorder.recording.guarded(Stopwatch, call.device), perf_counter()
        nesting.active = True
        try:
            with (
                outside_of_kept_regions(),
                torch.autograd.graph.saved_tensors_hooks(pack, unpack),
                recorder,
                begun.context,
            ):
                returned.append(fn(*args, **kwargs))
            recorder.recording.guarded(pack.find_overwritten, returned)
        finally:
            nesting.active = False
            pack.release()
            begun.table.end_call()
        _check_ended(returned, options, had_cuda)
        forward = 0.0 if stopwatch is None else recorder.recording.guarded(stopwatch.stop) or 0.0
        ended = perf_counter()
        ended_call = EndedCall(dispatcher, begun, returned, forward)
        frame, result = keep(ended_call)
        begun.table.unpack_by(frame.unpack)
        if learn is not None:
            call.log.recorded(learn(ended_call, pack.packed_bytes))
    overhead_s = perf_counter() - began - (ended - started - recorder.own_s)
    # On an accelerator the recorder delays only the host, unless the device has nothing left to do.
    function = forward - recorder.own_s if isinstance(forward, float) else forward
    call.log.forward(frame, call.recording, function, overhead_s, pack.packed_bytes)
    return result


def kind_of_call(dispatcher: Dispatcher, fn: GraphCall, options: Options) -> CallKind | str:
    """Returns the kind of a call of a captured graph, or why it has to be recorded whatever is known."""
    if not options.may_be_known:
        return "its options need each op"
    if is_capturing():
        return CAPTURED
    if top_saved_tensor_hooks(True) is not None:
        return "saved-tensor hooks are around it, which see what it saves"
    try:
        if dispatcher.records_choices(_device_types([one for one in fn.arguments if isinstance(one, Tensor)])):
            return CHOICES_SENT
        return fn.graph.kind_of(fn.inputs)
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        return Refusal.of(error).reason


def run_known(dispatcher: Dispatcher, fn: GraphCall, known: KnownSegment, options: Options) -> Any:
    """Runs a call of a known program, as `run_segment` runs others."""
    began = perf_counter()
    begun = _begun(dispatcher, fn, options, None, lambda log: BegunKnownCall(dispatcher, fn, known, options, log))
    if begun is None:
        return fn.run(known)
    call = begun.call
    call.log.known()
    stopwatch, started = call.recording.guarded(Stopwatch, call.device), perf_counter()
    nesting.active = True
    try:
        with torch.autograd.graph.saved_tensors_hooks(begun.pack, begun.table.unpack_packed):
            returned = fn.run(known)
    finally:
        nesting.active = False
        call.recording.guarded(begun.end)  # else its error would hide one of the function
    forward = 0.0 if stopwatch is None else call.recording.guarded(stopwatch.stop) or 0.0
    ended = perf_counter()
    frame, result = begun.keep(returned, forward)
    begun.table.unpack_by(frame.unpack)
    overhead_s = perf_counter() - began - (ended - started)
    call.log.forward(frame, call.recording, forward, overhead_s, known.packed_bytes)
    return result


def _begun(
    dispatcher: Dispatcher,
    fn: Callable[..., Any],
    options: Options,
    contexts: Any,
    begin: Callable[[CallLog], T],
) -> T | None:
    """Begins a call by `begin`. Returns None for one that keeps its activations, also after an unexpected error.

    Raises:
        NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
    """
    name, log = type(fn).__name__, None
    try:
        name = name_of(fn)
        # A checkpoint of torch around this call would run it again, perhaps outside the trainer's share.
        if contexts is None and top_saved_tensor_hooks(True) is None and dispatcher.keeps_activations(name):
            return None
        log = CallLog(dispatcher.journal.log(name), dispatcher.telemetry)
        return begin(log)
    except NotRemoteError:
        raise
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        refusal = Refusal.of(error)
    if options.strict:
        raise not_remote(name, refusal.reason) from refusal.cause
    if log is None:
        log = CallLog(dispatcher.journal.log(name), dispatcher.telemetry)
    log.kept(refusal.reason)
    return None


def _begin(
    dispatcher: Dispatcher,
    fn: Callable[..., Any],
    arguments_of_call: Any,
    options: Options,
    contexts: Any,
    log: CallLog,
) -> BegunCall:
    """Does what `_begun` says for a call that does not keep its activations, and lets unexpected errors pass."""
    if is_capturing():
        raise Refusal(CAPTURED)
    arguments = tensors_inside(pytree.tree_leaves(arguments_of_call))
    hooks = top_saved_tensor_hooks(True) if options.respects_hooks else None
    context, replay_options, selection, local_reason = _contexts(options, contexts, hooks)
    pack = SavedTensorHooks(dispatcher.copies.copy_of, selection, hooks)
    recorder = Recorder(
        arguments,
        allowed_ops(),
        dispatcher.copies.copy_of,
        pack,
        pack.op_ended,
        pack.overwritten,
        traces=options.debug,
        records_choices=dispatcher.records_choices(_device_types(arguments)),
        fixed=dispatcher.fixed,
        allows=dispatcher.allows(),
    )
    inside_reason = 'returns="activations" was requested' if options.returns == "activations" else ""
    if selection is not None:
        inside_reason = "its policy chooses what the trainer keeps"
    call = CheckpointedCall(
        log.name, log, options, recorder.recording, local_reason, inside_reason, device_of_work(arguments)
    )
    if local_reason:
        call.check_strict(local_reason)
        log.on_trainer(local_reason)
    table = HandleTable(call, recorder.call.builder.program)
    pack.begin(recorder, table)
    pending = recorder.recording.guarded(dispatcher.begin, call, fn, arguments)
    return BegunCall(call, arguments, recorder, pack, table, context, replay_options, selection, pending)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def _device_types(arguments: Sequence[Tensor]) -> set[str]:
    """Returns the types of devices that a call may compute on. Its parameters may be elsewhere than its arguments."""
    used = {"cuda"} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    return used | ({argument.device.type for argument in arguments} or {"cpu"})


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


def runs_plainly() -> bool:
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
