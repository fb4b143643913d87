"""What the trainer keeps of a segment between forward and backward.

Autograd holds the frame, and nothing else does: a graft's node, or the handles that stand where saved tensors would be.
So a frame lives as long as a backward could need its segment, and its end releases everything on the worker.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from backhaul._backward import local_recompute
from backhaul._backward.handles import CheckpointedCall, Handle, Handles, awaited
from backhaul._backward.lineage import Lineage
from backhaul._backward.sole_consumers import SoleConsumers
from backhaul._backward.value_check import CheckpointError, Recomputed, check_recomputed, check_uses
from backhaul._observe.report import Decision
from backhaul._torch_api.selective import MUTATED
from backhaul_runtime.errors import (
    BackhaulError,
    SavedTensorModifiedError,
    StaleTensorError,
    TransferError,
    UnsupportedTensorError,
    WorkerError,
    WorkerLostError,
)
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.digest import content_digest, saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of, view_at
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import (
    backward_pass,
    is_batched,
    version_of,
)

_RECOVERABLE = (WorkerError, WorkerLostError, CheckpointError, UnsupportedTensorError)
"""What ends a remote attempt and not the training: the trainer does it."""


class RemoteSegment(Protocol):
    """A segment that a worker holds. Each call waits, within bounds, and raises WorkerLostError or WorkerError."""

    def backward(
        self,
        gradients: Mapping[int, Tensor],
        state: ambient_state.State,
        summed: Collection[int],
        due: Sequence[tuple[int, Layout]],
        *,
        checks_bytes: bool,
    ) -> tuple[Recomputed, list[Contribution], Callable[[], None]]:
        """What the replay saved, the contributions, and what to call once these count.

        The worker may have kept some contributions, which are None here. They count once that was called.

        Args:
            gradients: The gradients of the program's outputs, by the output's position.
            state: Ambient settings that backward runs under.
            summed: Sources whose contributions are wanted as one, their sum in order; the others are None.
            due: The source and the layout of the gradient of each contribution, in order.
            checks_bytes: Digest what comes back on both sides.
        """

    def drifted(self, drift: float) -> None:
        """Notes the drift: the largest relative distance between the worker's tensors and those of forward."""

    def recompute(self, wanted: Mapping[int, Layout]) -> "SavedTensorStream":
        """The saved tensors of these positions, which come in this order and with these layouts."""


class SavedTensorStream(Protocol):
    """Saved tensors on their way from a worker. Raises as `RemoteSegment` does."""

    saved: Recomputed

    def take(self, position: int) -> Tensor:
        """One that was asked for, once."""

    def close(self) -> None:
        """Cancels the stream. Call it when no more tensors will be taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Where the graph of a segment takes gradients to, as far as a frame needs to know it.

    Attributes:
        counts: The number of contributions to each source, then to each cast, then to each output.
        layouts: The layouts of the sources, casts and outputs, in the same order.
        is_staged: Whether backward goes through the segment in stages, see `find_stages`.
    """

    counts: Sequence[int] = ()
    layouts: Sequence[Layout] = ()
    is_staged: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSegment:
    """A segment as it was recorded, to be given to a worker.

    Attributes:
        call: The call, with its recording.
        program: What recomputes the segment.
        tensors: The caller's object behind each source.
        uses: Where its graph takes gradients to.
        predecessors: Segments whose outputs are sources of this one: the source, the frame, and the output's position.
    """

    call: CheckpointedCall
    program: Program
    tensors: Sequence[Tensor]
    uses: Uses
    predecessors: "Sequence[tuple[int, Frame, int]]"


@dataclass(eq=False)
class Frame:
    """A segment between forward and backward. Built once, when the call has ended.

    Only the remote side, the reason to stay here and the state of the present recomputation change afterwards, by the
    methods of the frame itself.

    Attributes:
        call: The call that the segment was recorded from.
        handles: The handles of the call's saved tensors.
        program: What recomputes the segment: all of it, or the part before something that no program can carry. None if
            nothing needs to be recomputed.
        lineage: What the trainer recomputes the segment from; None if nothing needs to be recomputed.
        uses: Where its graph takes gradients to.
        replay_options: What the call brought for recomputation on the trainer.
        consumers: The sources that are outputs of other segments and that nothing can have used after this segment.
        arguments: The tensors that the call was given, with their versions. Nobody may write to them before backward.
        is_mutated: Whether the call wrote to something that its own policy keeps.
        remote: The worker's side; None if no worker has the segment.
        local_reason: Why the trainer recomputes the segment, if that is settled.
    """

    call: CheckpointedCall
    handles: Handles
    program: Program | None = None
    lineage: Lineage | None = None
    uses: Uses = field(default_factory=Uses)
    replay_options: local_recompute.ReplayOptions = field(default_factory=local_recompute.ReplayOptions)
    consumers: SoleConsumers = field(default_factory=SoleConsumers)
    arguments: Sequence[tuple[weakref.ref[Tensor], int]] = ()
    is_mutated: bool = False
    remote: RemoteSegment | None = None
    local_reason: str = ""
    _here: dict[int, Callable[[], Tensor]] = field(default_factory=dict, init=False)
    _incoming: SavedTensorStream | None = field(default=None, init=False)
    _wanted: set[int] = field(default_factory=set, init=False)
    _task: object = field(default=-1, init=False)
    # Guards all fields with an underscore: threads may run backward over one graph.
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def gradients(self, gradients: Mapping[int, Tensor], ways: Mapping[int, Tensor]) -> list[Contribution]:
        """The segment's backward or a stage of it, on a worker if one can do it.

        Called by autograd, in the thread that runs backward.

        Args:
            gradients: The gradients of the program's outputs, by the output's position. They are not kept.
            ways: Tensors through which contributions go on, by place among what is returned.

        Returns:
            One contribution per use of sources, casts and outputs: see `Replay.backward`.
        """
        assert self.program is not None
        assert self.lineage is not None
        self._check_backward()
        needs_graph = _needs_graph(gradients)
        if needs_graph:
            self.call.check_strict(needs_graph)
            self.call.log.on_trainer(needs_graph)
        remote = self.remote
        if remote is not None and not needs_graph:
            state = ambient_state.capture()
            started = perf_counter()
            try:
                saved, contributions, commit = remote.backward(
                    gradients, state, self.consumers.sources, self._due(), checks_bytes=self.call.options.checks_bytes
                )
                self._check(remote, saved)
            except _RECOVERABLE as error:
                self._lost(error)
            else:
                commit()
                self.call.log.add(Decision.GRADIENTS, perf_counter() - started)
                return contributions
        if not needs_graph:
            self.call.check_strict(self.local_reason)
        started = perf_counter()
        values = self.lineage.values()
        contributions = local_recompute.gradients_here(
            self.call.name,
            self.program,
            self.call.recording,
            values,
            gradients,
            self.replay_options,
            ways=self._ways_by_number(ways) if needs_graph else None,
        )
        check_uses(self.call.name, "on the trainer", self.uses.counts, contributions)
        self.call.log.add(Decision.TRAINER, perf_counter() - started)
        return contributions

    def _ways_by_number(self, ways: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """By source or output, a tensor through which a gradient goes on to it. See `Contribution.source`."""
        assert self.program is not None
        numbers = [number for number, count in enumerate(self.uses.counts) for _ in range(count)]
        ends = [*range(len(self.uses.counts))]
        ends[len(self.program.sources) : len(self.program.sources) + len(self.program.casts)] = self.program.casts
        return {ends[numbers[position]]: way for position, way in ways.items()}

    def _due(self) -> list[tuple[int, Layout]]:
        """The source and the layout of the gradient of each contribution that a backward gives, in order."""
        used = enumerate(zip(self.uses.counts, self.uses.layouts, strict=True))
        return [(index, layout) for index, (count, layout) in used for _ in range(count)]

    def unpack(self, handle: Handle) -> Tensor:
        """A tensor that autograd saved. The first of a backward begins the segment's recomputation."""
        index = handle.index
        with self._lock:
            if handle.kept is not None:
                self._check_backward()
                return self.call.check_kept(handle)
            group, task = backward_pass()
            if task != self._task or (index not in self._wanted and group is None):
                self._task = None  # until it has begun: what an error ends begins anew
                self._begin()
                self._task = task
            elif index not in self._wanted:
                raise CheckpointError(
                    f"segment {self.call.name}: saved tensor {index} was already unpacked once in this GraphExecGroup. "
                    "Performing two backward calls that overlap (i.e. require the same saved activation in order to "
                    "compute gradients) is not allowed there: leave the group, or make it two",
                    segment=self.call.name,
                )
            self._wanted.discard(index)
            tensor = self._next(index)
            if tensor is None:
                self._stop_incoming()
                self._here = {}
                self._recompute([index, *sorted(self._wanted, reverse=True)])
                tensor = self._next(index)
            if tensor is None:
                raise StaleTensorError(
                    f"segment {self.call.name}: the memory of saved tensor {index} is written to while backward runs",
                    segment=self.call.name,
                )
            return tensor

    def _check_backward(self) -> None:
        """Raises RuntimeError for a backward that torch's checkpoint refuses too."""
        self.call.check_backward()
        if self.is_mutated:
            raise RuntimeError(MUTATED)
        for reference, version in self.arguments:
            argument = reference()
            if argument is not None and version_of(argument) != version:
                raise SavedTensorModifiedError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an argument of segment {self.call.name}, of shape {list(argument.shape)}, is at version "
                    f"{version_of(argument)}, it was at {version} when the call ended. Run backward first, or write "
                    "to a copy",
                    segment=self.call.name,
                )

    def _begin(self) -> None:
        self._check_backward()
        wanted = awaited(self.handles)
        self._stop_incoming()
        self._wanted = set(wanted)
        self._here = {}
        if self.remote is not None:
            self._here = {i: here for i in wanted if (here := self._present(self.call.recording.saved[i])) is not None}
        # Backward unpacks what was saved last first.
        missing = [index for index in reversed(wanted) if index not in self._here]
        if missing:
            self._recompute(missing)

    def _recompute(self, positions: Sequence[int]) -> None:
        """Asks a worker for saved tensors; without one makes all that are wanted here."""
        if self.remote is not None:
            started = perf_counter()
            try:
                self._incoming = self.remote.recompute(
                    {index: self.call.recording.saved[index].layout for index in positions}
                )
                self._check(self.remote, self._incoming.saved)
            except _RECOVERABLE as error:
                self._lost(error)
            else:
                self.call.log.add(Decision.ACTIVATIONS, perf_counter() - started)
                return
        self._recompute_here({*positions, *self._wanted})

    def _next(self, index: int) -> Tensor | None:
        """A recomputed tensor; None if it lies in memory that was written to since."""
        if index not in self._here and self._incoming is not None:
            try:
                return self._take(self._incoming, index)
            except _RECOVERABLE as error:
                self._lost(error)
                self._recompute_here({index, *self._wanted})
        try:
            tensor = self._here.pop(index)()
        except UnsupportedTensorError:  # the memory of a parameter was freed
            return None
        return tensor if self._is_as_saved(self.call.recording.saved[index], tensor) else None

    def _take(self, incoming: SavedTensorStream, index: int) -> Tensor:
        started = perf_counter()
        tensor = incoming.take(index)
        if self.call.options.checks_bytes and not self.call.recording.saved[index].is_undefined:
            layout = layout_of(tensor)
            if saved_digest(layout, content_digest(tensor, layout)) != incoming.saved.digests[index]:
                raise TransferError(f"saved tensor {index} is not what the worker computed: damaged on the way")
        if self._wanted <= self._here.keys():
            self._stop_incoming()
        self.call.log.wait(perf_counter() - started)
        return tensor

    def _check(self, remote: RemoteSegment, saved: Recomputed) -> None:
        drift = check_recomputed(self.call.name, self.call.recording.saved, saved)
        if drift:
            self.call.log.drift(drift)
            remote.drifted(drift)

    def _stop_incoming(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()

    def _recompute_here(self, wanted: Set[int]) -> None:
        assert self.program is not None
        assert self.lineage is not None
        self.call.check_strict(self.local_reason)
        started = perf_counter()
        values = self.lineage.values()
        self._here = local_recompute.saved_here(
            self.call.name, self.program, self.call.recording, values, sorted(wanted), self.replay_options
        )
        self.call.log.add(Decision.TRAINER, perf_counter() - started)

    def _present(self, saved: SavedTensor) -> Callable[[], Tensor] | None:
        """Gives a saved tensor that lies in a parameter or in an argument that is kept: it need not travel."""
        if saved.source < 0 or saved.is_undefined:
            return None
        source = self.call.recording.sources[saved.source]
        start = (saved.offset - source.offset) * saved.layout.dtype.itemsize
        if (
            source.kept_value is None
            or source.is_written
            or start < 0
            or start + saved.layout.span_bytes > source.layout.span_bytes
        ):
            return None
        return partial(view_at, source.kept_value, start, saved.layout)

    def _is_as_saved(self, saved: SavedTensor, tensor: Tensor) -> bool:
        """Whether a tensor holds what was saved: one never recomputed, or in memory that others may write to.

        Version counters miss `.data`.
        """
        is_private = saved.source < 0 or self.call.recording.sources[saved.source].is_copy
        return (self.remote is None and is_private) or saved.is_undefined or _is_equal(saved, tensor)

    def _lost(self, error: BackhaulError) -> None:
        error.__traceback__ = None  # leads to the segment, and the future that the segment waited for keeps the error
        self._stop_incoming()
        if self.lineage is not None:
            self.lineage.take_back()
        self.remote = None
        self.local_reason = error.message.splitlines()[0]
        self.call.log.mismatches += isinstance(error, CheckpointError)
        # A lost worker is the link's to say, once for all segments.
        self.call.log.fallback(self.local_reason, is_said=isinstance(error, WorkerLostError))


def _needs_graph(gradients: Mapping[int, Tensor]) -> str:
    """Why a backward needs the graph of the segment's inside, which no worker returns; empty where it does not."""
    if torch.is_grad_enabled():
        return "create_graph=True needs the graph of its inside"
    if any(is_batched(gradient) for gradient in gradients.values()):
        return "is_grads_batched=True needs the graph of its inside"
    return ""


def _is_equal(saved: SavedTensor, tensor: Tensor) -> bool:
    """Whether a tensor is equal to what was saved, bit by bit."""
    layout = layout_of(tensor)
    return saved_digest(layout, content_digest(tensor, layout)) == saved.digest
