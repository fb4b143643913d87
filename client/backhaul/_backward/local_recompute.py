"""Recomputation on the trainer, by the program of a segment: where no worker can do it, or none is to."""

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
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import outside_transforms

logger = logging.getLogger("backhaul")

_WHERE = "on the trainer"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a call brings for its recomputation on the trainer.

    Attributes:
        context: Ops run in it.
        again: Gives results of ops that are kept, so that these do not run. If other values than forward's come of
            that, which its rules can't rule out, all ops run.
        trace: A line per op of forward, for the error if recomputation differs; None unless debug=True.
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
        program: What the segment's forward ran.
        recording: What was recorded of that forward.
        values: One tensor per source of the program.
        aids: What the call brought for this.
        keep_saved: Whether to keep the saved tensors, as for `Replay`.
        histories: Tensors whose history the sources get, as for `Replay`.

    Raises:
        StaleTensorError: A captured tensor no longer holds what it held at forward.
        CheckpointError: The replay gave other values than forward.
    """
    try:
        for source in recording.sources:
            _check_unchanged(name, source)
    except UnsupportedTensorError as error:
        raise StaleTensorError(
            f"segment {name}: {error.message}, and no worker holds what it held. Keep parameters allocated until "
            "backward has run",
            segment=name,
        ) from error

    def replayed(context: AbstractContextManager[Any] | None) -> Replay:
        trace: list[str] | None = None if aids.trace is None else []
        replay = Replay(
            program,
            values,
            recording.generator_states,
            keep_saved=keep_saved,
            is_own=True,
            histories=histories,
            context=context,
            trace=trace,
        )
        try:
            check_values(name, _WHERE, recording.saved[: program.saved_count], replay.saved_digests)
        except CheckpointError as error:
            if aids.trace is None or trace is None:
                raise
            raise with_traces(error, aids.trace, trace) from error
        return replay

    if aids.again is not None:
        try:
            return replayed(aids.again)
        except (ReplayError, CheckpointError) as error:
            logger.info("segment %s: all ops run again, as results that its policy kept do not fit: %s", name, error)
    return replayed(aids.context)


def _check_unchanged(name: str, source: RecordedSource) -> None:
    if not source.is_copy and address_of(source.value) != source.address:
        raise StaleTensorError(
            f"segment {name}: a captured tensor of shape {list(source.layout.shape)} changed between forward and "
            "backward, and no worker holds its earlier value. Run backward before optimizer.step() and other "
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
    """The contributions of a segment, computed on the trainer. Called in backward.

    Args:
        name: The name of the segment, for messages.
        program: What the segment's forward ran.
        recording: What was recorded of that forward.
        values: One tensor per source of the program.
        gradients: The gradients of the program's outputs, by the output's position.
        aids: What the call brought for this.
        ways: By source, or by output that others follow from, a tensor through which gradients reach it, for a backward
            that is batched or to be differentiated itself. Its values are not read. See `Contribution.source`.
    """
    state = ambient_state.capture()
    with _ours(values):
        replay = replay_here(name, program, recording, values, aids, histories=ways)
        if ways is None:
            ambient_state.apply(state, ambient_state.capture())
            return replay.backward(gradients)
    return replay.backward(gradients, create_graph=torch.is_grad_enabled())


def saved_here(
    name: str,
    program: Program,
    recording: Recording,
    values: Sequence[Tensor],
    positions: Sequence[int],
    aids: ReplayOptions = _NONE,
) -> dict[int, Callable[[], Tensor]]:
    """Gives saved tensors of a segment, computed on the trainer, by position."""
    with _ours(values):
        replay = replay_here(name, program, recording, values, aids, keep_saved=True)
        return {position: replay.saved(position).unpack for position in positions}


def outputs_here(
    name: str, program: Program, recording: Recording, values: Sequence[Tensor], positions: Iterable[int]
) -> dict[int, Tensor]:
    """Outputs of a segment, computed on the trainer, by position. Detached; nothing else of the replay stays."""
    with _ours(values):
        replay = replay_here(name, program, recording, values)
        return {position: replay.output(position) for position in positions}


def saved_before(name: str, so_far: Program, recording: Recording, position: int) -> Tensor:
    """A saved tensor of a call that still runs, from the program recorded so far."""
    values = [source.value for source in recording.sources]
    with _ours(values):
        replay = Replay(so_far, values, recording.generator_states, keep_saved=True, is_own=True)
        check_digests(name, _WHERE, recording.saved, {position: replay.saved_digests[position]})
        return replay.saved(position).unpack()


@contextmanager
def _ours(values: Sequence[Tensor]) -> Iterator[None]:
    """Isolates a replay from the backward that it runs in: generators, settings and transforms are its own."""
    devices = list(dict.fromkeys(value.device for value in values))
    # In the vmap that batches gradients, torch refuses to draw random numbers, and a replay draws those of forward.
    with outside_transforms(), isolated(devices), torch.enable_grad():
        yield


class Nesting(threading.local):
    """Whether the calling thread is inside a segment: calls within it belong to it."""

    active = False


nesting = Nesting()
