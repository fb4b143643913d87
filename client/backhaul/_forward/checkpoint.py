"""Runs a checkpointed call under the recorder. `keep` then decides what is kept of it for backward."""

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from backhaul._backward.frame import Frame
from backhaul._backward.handles import CheckpointedCall, HandleTable, not_remote
from backhaul._backward.local_recompute import ReplayOptions, nesting
from backhaul._forward.destination import Destination
from backhaul._forward.keep import EndedCall, keep
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks, unpack
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.kept_regions import outside_of_kept_regions
from backhaul._torch_api.options import Options
from backhaul._torch_api.selective import Hooks, Selection
from backhaul_runtime.errors import Refusal, log_once
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.tensors.stopwatch import Stopwatch, device_of_work
from backhaul_runtime.torch_internals.private import (
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
        frame, kept = keep(EndedCall(destination, call, recorder, pending, returned, table.handles, build, forward))
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
