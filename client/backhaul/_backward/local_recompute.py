"""Recomputation on the trainer, by running the program of a segment."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backhaul._backward.value_check import CheckpointError, check_digests, check_values, with_traces
from backhaul_runtime.errors import ReplayError, StaleTensorError, UnsupportedTensorError
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import RecordedSource, Recording
from backhaul_runtime.replay.replay import Contribution, Replay, isolated
from backhaul_runtime.tensors.deferred_digest import ContentDigests, KnownDigests, read
from backhaul_runtime.tensors.digest import tensor_address
from backhaul_runtime.tensors.layout import copy_exact, layout_of
from backhaul_runtime.tensors.random_projection import TOLERANCES
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import outside_transforms, version_of

logger = logging.getLogger("backhaul")

_WHERE = "on the trainer"
_SHAKEN = {*TOLERANCES, *(dtype.to_complex() for dtype in TOLERANCES)} - {torch.complex32}


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a call for its recomputation on the trainer.

    Attributes:
        context: The context in which ops run; None for none.
        again: Provides the results of ops that a policy has kept, so that these ops do not run again. If the values
            then differ from forward's, which the policy cannot rule out, all ops run.
        trace: One line for each op of forward, for the message of a mismatch; None unless debug=True.
    """

    context: AbstractContextManager[Any] | None = None
    again: AbstractContextManager[Any] | None = None
    trace: Sequence[str] | None = None


_NONE = ReplayOptions()


def replay_here(
    name: str,
    program: Program,
    recording: Recording,
    values: Sequence[Tensor],
    aids: ReplayOptions = _NONE,
    *,
    keep_saved: bool = False,
    histories: Mapping[int, Tensor] | None = None,
) -> Replay:
    """Replays a segment on the trainer's own devices and checks its values.

    Args:
        name: The name of the segment, for messages.
        program: The program of the segment.
        recording: The recording of its forward.
        values: One tensor for each source of the program.
        aids: The options of the call.
        keep_saved: Whether to keep the saved tensors, as for `Replay`.
        histories: Tensors whose autograd history the sources get, as for `Replay`.

    Raises:
        StaleTensorError: A captured tensor no longer has its value from forward.
        CheckpointError: The replay gave other values than forward.
    """
    known = KnownDigests()  # so that the replay does not compute them once more
    versions = list(map(version_of, values))
    try:
        contents = ContentDigests()  # all are queued before the first is read, so a device is waited for once
        taken = [
            (source, value, layout := layout_of(source.value), contents.take(source.value, layout))
            for source, value in zip(recording.sources, values, strict=True)
            if not source.is_copy
        ]
        for source, value, layout, content in taken:
            if tensor_address(layout, read(content)) != source.address:
                raise _stale(name, source)
            known.note(value, content)
    except UnsupportedTensorError as error:
        raise StaleTensorError(
            f"segment {name}: {error.message}, and no worker stores its earlier value. Keep parameters allocated until "
            "backward has run",
            segment=name,
        ) from error

    def replayed(context: AbstractContextManager[Any] | None) -> Replay:
        trace: list[str] | None = None if aids.trace is None else []
        # Code of the user's own may write to anything while it runs.
        reused = None if program.functions or program.types or context is not None else known
        replay = Replay(
            program,
            values,
            recording.generator_states,
            keep_saved=keep_saved,
            is_own=True,
            histories=histories,
            context=context,
            trace=trace,
            known=reused,
            compares_outputs=recording.returned is not None,
        )
        for source, value, version in zip(recording.sources, values, versions, strict=True):
            if reused is not None and not source.is_copy and version_of(value) != version:  # by another thread
                raise _stale(name, source)
        try:
            if not recording.is_unseen:
                check_values(name, _WHERE, recording.compared(program), replay.digests)
        except CheckpointError as error:
            if aids.trace is None or trace is None:
                raise
            raise with_traces(error, aids.trace, trace) from error
        return replay

    if aids.again is not None:
        try:
            return replayed(aids.again)
        except (ReplayError, CheckpointError) as error:
            logger.info(
                "Segment %s: all ops run again, because the results that its policy has kept do not fit: %s",
                name,
                error,
            )
    return replayed(aids.context)


def _stale(name: str, source: RecordedSource) -> StaleTensorError:
    return StaleTensorError(
        f"segment {name}: a captured tensor of shape {list(source.layout.shape)} changed between forward and "
        "backward, and no worker stores its earlier value. Run backward before optimizer.step() and other "
        "writes to parameters",
        segment=name,
    )


def gradients_here(
    name: str,
    program: Program,
    recording: Recording,
    values: Sequence[Tensor],
    gradients: Mapping[int, Tensor],
    aids: ReplayOptions = _NONE,
    *,
    ways: Mapping[int, Tensor] | None = None,
) -> list[Contribution]:
    """Computes the contributions of a segment on the trainer. Called in backward.

    Args:
        name: The name of the segment, for messages.
        program: The program of the segment.
        recording: The recording of its forward.
        values: One tensor for each source of the program.
        gradients: The gradients of the program's outputs, by the output's position.
        aids: The options of the call.
        ways: For a backward that is batched or is differentiated itself: for each source, or output that other outputs
            follow from, a tensor through which gradients reach it. Its values are not read. See `Contribution.source`.
    """
    state = ambient_state.capture()
    histories = ways if torch.is_grad_enabled() else None  # what is only batched needs none
    with _ours(recording):
        replay = replay_here(name, program, recording, values, aids, histories=histories)
        # The backward of a custom function may draw random numbers, and then draws them from the trainer's generators.
        if ways is None and not program.functions:
            ambient_state.apply(state, ambient_state.capture())
            return replay.backward(gradients)
    contributions = replay.backward(gradients, create_graph=torch.is_grad_enabled())
    _check_written(name, recording, replay)
    return contributions


def shaken_gradients_here(
    program: Program,
    recording: Recording,
    values: Sequence[Tensor],
    gradients: Mapping[int, Tensor],
    aids: ReplayOptions = _NONE,
) -> list[Contribution]:
    """Computes the contributions of a segment from inputs that are all moved by one rounding, up or down.

    How far they move from those of `gradients_here` shows how far rounding carries. Checks no values. The arguments are
    those of `gradients_here`.
    """
    state = ambient_state.capture()
    with _ours(recording):
        replay = Replay(
            program, list(map(_shaken, values)), recording.generator_states, is_own=True, context=aids.context
        )
        ambient_state.apply(state, ambient_state.capture())
        return replay.backward({position: _shaken(gradient) for position, gradient in gradients.items()})


def _shaken(tensor: Tensor) -> Tensor:
    """Returns a tensor whose elements are moved by one rounding, each in a direction of its own."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in _SHAKEN:
        return tensor
    layout = layout_of(tensor)
    if any(not stride and length > 1 for stride, length in zip(layout.strides, layout.shape, strict=True)):
        return tensor  # one element in memory can't move in two directions
    generator = torch.Generator().manual_seed(0)  # not the training's own
    signs = 2 * torch.randint(2, tensor.shape, generator=generator, device="cpu").to(tensor) - 1
    with torch.no_grad():
        return copy_exact(tensor, layout).addcmul_(tensor, signs, value=torch.finfo(tensor.dtype).eps)


def _check_written(name: str, recording: Recording, replay: Replay) -> None:
    """Raises ReplayError if a custom backward has written to a copy: the trainer's own tensor stays as it was."""
    for number, functions in replay.written.items():
        if number >= len(recording.sources):
            raise lost_write(name, functions, "an output of the segment")
        if recording.sources[number].is_copy:
            raise lost_write(name, functions, "an input of the segment")


def lost_write(name: str, functions: Sequence[str], what: str) -> ReplayError:
    """Returns the error for a segment whose backward has written to what others use too.

    Args:
        name: The name of the segment.
        functions: The custom functions that may have written.
        what: The thing that they have written to, with its article.
    """
    return ReplayError(
        f"segment {name}: the backward of {' or '.join(functions)} has written to {what}, and a recomputation "
        "has a copy of it, so the write would be lost. From the next forward on the function stays on the trainer: run "
        "forward again, or start the worker without allowing the function"
    )


def saved_here(
    name: str,
    program: Program,
    recording: Recording,
    values: Sequence[Tensor],
    positions: Sequence[int],
    aids: ReplayOptions = _NONE,
) -> dict[int, Callable[[], Tensor]]:
    """Computes saved tensors of a segment on the trainer. Returns access to them by position."""
    with _ours(recording):
        replay = replay_here(name, program, recording, values, aids, keep_saved=True)
        return {position: replay.saved(position).unpack for position in positions}


def outputs_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], positions: Iterable[int]
) -> dict[int, Tensor]:
    """Computes the outputs of a segment on the trainer, detached, by position. Keeps nothing else of the replay."""
    with _ours(recording):
        replay = replay_here(name, program, recording, values)
        return {position: replay.output(position) for position in positions}


def saved_before(name: str, so_far: Program, recording: Recording, position: int) -> Tensor:
    """Returns a saved tensor of a call in progress, from the program recorded so far."""
    values = [source.value for source in recording.sources]
    with _ours(recording):
        replay = Replay(so_far, values, recording.generator_states, keep_saved=True, is_own=True)
        if recording.returned is None:  # else forward has not returned yet, so there is nothing to compare
            check_digests(name, _WHERE, recording.saved, {position: replay.digests[position]})
        return replay.saved(position).unpack()


@contextmanager
def _ours(recording: Recording) -> Iterator[None]:
    """Isolates a replay from the backward that it runs in: its generators, settings and transforms are its own."""
    # Inside the vmap of a batched backward torch refuses to draw random numbers, and a replay draws those of forward.
    with outside_transforms(), isolated(list(recording.accelerators)), torch.enable_grad():
        yield


class Nesting(threading.local):
    """Whether the calling thread is inside a segment. Calls inside a segment belong to it."""

    active = False


nesting = Nesting()
