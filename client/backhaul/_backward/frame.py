"""What the trainer keeps of a segment between forward and backward.

Autograd holds the frame, and nothing else does: a graft's node, or the handles that stand where saved tensors would be.
So a frame lives as long as somebody could need its segment, and its end releases everything remote.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from backhaul._backward import local_recompute
from backhaul._backward.lineage import Lineage
from backhaul._backward.sole_consumers import SoleConsumers
from backhaul._backward.value_check import CheckpointError, Recomputed, check_recomputed, check_uses
from backhaul._observe.report import Decision
from backhaul._observe.telemetry import CallLog
from backhaul._torch_api.options import Options
from backhaul._torch_api.selective import MUTATED, KeptTensor
from backhaul_runtime.errors import (
    BackhaulError,
    NotRemoteError,
    Refusal,
    SavedTensorModifiedError,
    StaleTensorError,
    TransferError,
    UnsupportedTensorError,
    WorkerError,
    WorkerLostError,
)
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import Recording, SavedTensor
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.digest import content_digest, saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of, view_at
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import (
    DisablePythonDispatcher,
    backward_pass,
    is_batched,
    is_plain_backward,
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
            gradients: Of the program's outputs, by position.
            state: Ambient settings that backward runs under.
            summed: Sources whose contributions are wanted as one, their sum in order; the others are None.
            due: The source and the layout of the gradient of each contribution, in order.
            checks_bytes: Digest what comes back on both sides.
        """

    def drifted(self, drift: float) -> None:
        """Hears how far the worker's numbers were from forward's."""

    def recompute(self, wanted: Mapping[int, Layout]) -> "SavedTensorStream":
        """The saved tensors of these positions, which come in this order and with these layouts."""


class SavedTensorStream(Protocol):
    """Saved tensors on their way from a worker. Raises as `RemoteSegment` does."""

    saved: Recomputed

    def take(self, position: int) -> Tensor:
        """One that was asked for, once."""

    def close(self) -> None:
        """Wants no more of them."""


class Handle:
    """Stands in autograd's graph where a saved tensor would.

    Attributes:
        frame: Of the segment.
        index: Counts what autograd saved.
        kept: The tensor, where it stays on the trainer.
    """

    __slots__ = ("__weakref__", "frame", "index", "kept")

    def __init__(self, frame: "Frame", index: int) -> None:
        self.frame = frame
        self.index = index
        self.kept: KeptTensor | None = None


@dataclass(eq=False)
class Frame:
    """A segment between forward and backward.

    Attributes:
        name: What was called, for people.
        log: Where what happens to it is counted.
        options: Of the call.
        recording: From forward.
        program: What recomputes the segment: all of it, or what came before something that no program can carry. None
            where nothing needs to be recomputed.
        use_counts: Contributions that each source gets, then each cast, then each output.
        used_layouts: The layouts of the sources, casts and outputs, in the order of `use_counts`.
        lineage: What the trainer recomputes it from.
        aids: For recomputation here.
        remote: The worker's side, None where no worker has it.
        local_reason: Why the trainer recomputes it, where that is settled.
        predecessors: Other segments whose outputs are sources of this, while it is saved: source, frame, output.
        unshared: Which of these outputs nobody else can have used after this.
        so_far: Gives the program recorded so far, while the call runs.
        is_staged: Backward goes through it stage by stage, see `find_stages`.
        is_mutated: The call wrote to what a policy of its own keeps.
    """

    name: str
    log: CallLog
    options: Options
    recording: Recording = field(default_factory=Recording)
    program: Program | None = None
    use_counts: list[int] = field(default_factory=list)
    used_layouts: list[Layout] = field(default_factory=list)
    lineage: Lineage | None = None
    aids: local_recompute.ReplayOptions = field(default_factory=local_recompute.ReplayOptions)
    remote: RemoteSegment | None = None
    local_reason: str = ""
    predecessors: "list[tuple[int, Frame, int]]" = field(default_factory=list)
    unshared: SoleConsumers = field(default_factory=SoleConsumers)
    so_far: Callable[[], Program] | None = None
    is_staged: bool = False
    is_mutated: bool = False
    _arguments: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    _handles: dict[int, weakref.ref[Handle]] = field(default_factory=dict)
    _here: dict[int, Callable[[], Tensor]] = field(default_factory=dict)
    _incoming: SavedTensorStream | None = None
    _wanted: set[int] = field(default_factory=set)
    _task: object = -1
    _lock: threading.RLock = field(default_factory=threading.RLock)  # threads may run backward over one graph

    def handle(self, index: int) -> Handle:
        """A handle for a tensor that autograd saves. It takes the place of one for an op that failed."""
        handle = Handle(self, index)
        self._handles[index] = weakref.ref(handle)
        return handle

    def _awaited(self) -> list[int]:
        """What backward can ask for that has to be recomputed, in the order in which it was saved."""
        handles = [reference() for reference in self._handles.values()]
        return [handle.index for handle in handles if handle is not None and handle.kept is None]

    @property
    def is_awaited(self) -> bool:
        """Whether backward can ask for anything that has to be recomputed."""
        return bool(self._awaited())

    def gradients(self, gradients: Mapping[int, Tensor], ways: Mapping[int, Tensor]) -> list[Contribution]:
        """The segment's backward or a stage of it, on a worker if one can do it.

        Called by autograd, in the thread that runs backward.

        Args:
            gradients: Of the program's outputs, by position. Not kept.
            ways: Tensors through which contributions go on, by place among what is returned.

        Returns:
            One contribution per use of sources, casts and outputs: see `Replay.backward`.
        """
        assert self.program is not None
        assert self.lineage is not None
        self._check_backward()
        needs_graph = _needs_graph(gradients)
        if needs_graph:
            self._check_strict(needs_graph)
            self.log.on_trainer(needs_graph)
        remote = self.remote
        if remote is not None and not needs_graph:
            state = ambient_state.capture()
            started = perf_counter()
            try:
                saved, contributions, commit = remote.backward(
                    gradients, state, self.unshared.sources, self._due(), checks_bytes=self.options.checks_bytes
                )
                self._check(remote, saved)
            except _RECOVERABLE as error:
                self._lost(error)
            else:
                commit()
                self.log.add(Decision.GRADIENTS, perf_counter() - started)
                return contributions
        if not needs_graph:
            self._check_strict(self.local_reason)
        started = perf_counter()
        values = self.lineage.values()
        contributions = local_recompute.gradients_here(
            self.name,
            self.program,
            self.recording,
            values,
            gradients,
            self.aids,
            ways=self._ways_by_number(ways) if needs_graph else None,
        )
        check_uses(self.name, "on the trainer", self.use_counts, contributions)
        self.log.add(Decision.TRAINER, perf_counter() - started)
        return contributions

    def _ways_by_number(self, ways: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """By source or output, a tensor through which a gradient goes on to it. See `Contribution.source`."""
        assert self.program is not None
        numbers = [number for number, count in enumerate(self.use_counts) for _ in range(count)]
        ends = [*range(len(self.use_counts))]
        ends[len(self.program.sources) : len(self.program.sources) + len(self.program.casts)] = self.program.casts
        return {ends[numbers[place]]: way for place, way in ways.items()}

    def _due(self) -> list[tuple[int, Layout]]:
        """The source and the layout of the gradient of each contribution that a backward gives, in order."""
        used = enumerate(zip(self.use_counts, self.used_layouts, strict=True))
        return [(index, layout) for index, (count, layout) in used for _ in range(count)]

    def unpack(self, handle: Handle) -> Tensor:
        """A tensor that autograd saved. The first of a backward begins the segment's recomputation."""
        index = handle.index
        with self._lock:
            if handle.kept is not None:
                self._check_backward()
                return self._checked(index, handle.kept)
            if self.so_far is not None:
                return self._unpack_early(self.so_far(), index)
            group, task = backward_pass()
            if task != self._task or (index not in self._wanted and group is None):
                self._task = None  # until it has begun: what an error ends begins anew
                self._begin()
                self._task = task
            elif index not in self._wanted:
                raise CheckpointError(
                    f"segment {self.name}: saved tensor {index} was already unpacked once in this GraphExecGroup. "
                    "Performing two backward calls that overlap (i.e. require the same saved activation in order to "
                    "compute gradients) is not allowed there: leave the group, or make it two",
                    segment=self.name,
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
                    f"segment {self.name}: the memory of saved tensor {index} is written to while backward runs",
                    segment=self.name,
                )
            return tensor

    def watch(self, arguments: Iterable[Tensor]) -> None:
        """Remembers what the call was given, which nobody may write to before backward. Holds none of it."""
        self._arguments = [(weakref.ref(argument), version_of(argument)) for argument in arguments]

    def _check_backward(self) -> None:
        """Raises RuntimeError for a backward that torch's checkpoint refuses too."""
        if self.options.use_reentrant and not is_plain_backward():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False, or call "
                ".backward() without passing the `inputs` argument."
            )
        if self.is_mutated:
            raise RuntimeError(MUTATED)
        for reference, version in self._arguments:
            argument = reference()
            if argument is not None and version_of(argument) != version:
                raise SavedTensorModifiedError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an argument of segment {self.name}, of shape {list(argument.shape)}, is at version "
                    f"{version_of(argument)}, it was at {version} when the call ended. Run backward first, or write "
                    "to a copy",
                    segment=self.name,
                )

    def _checked(self, index: int, kept: KeptTensor) -> Tensor:
        """What was kept, which must be what autograd saved."""
        tensor = kept()
        if not kept.is_intact(tensor):
            raise CheckpointError(
                f"segment {self.name}: saved tensor {index}, which was kept here, was written to between forward and "
                "backward in a way that autograd does not see (NumPy, .data)",
                segment=self.name,
            )
        return tensor

    def _unpack_early(self, so_far: Program, index: int) -> Tensor:
        """A tensor that a backward inside the call needs."""
        with DisablePythonDispatcher():  # else the recorder would note the replay
            return local_recompute.saved_before(self.name, so_far, self.recording, index)

    def _begin(self) -> None:
        self._check_backward()
        wanted = self._awaited()
        self._stop_incoming()
        self._wanted = set(wanted)
        self._here = {}
        if self.remote is not None:
            self._here = {i: here for i in wanted if (here := self._present(self.recording.saved[i])) is not None}
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
                    {index: self.recording.saved[index].layout for index in positions}
                )
                self._check(self.remote, self._incoming.saved)
            except _RECOVERABLE as error:
                self._lost(error)
            else:
                self.log.add(Decision.ACTIVATIONS, perf_counter() - started)
                return
        self._recompute_here({*positions, *self._wanted})

    def _next(self, index: int) -> Tensor | None:
        """A tensor that was recomputed, or None where it lies in memory that somebody has written to since."""
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
        return tensor if self._is_as_saved(self.recording.saved[index], tensor) else None

    def _take(self, incoming: SavedTensorStream, index: int) -> Tensor:
        started = perf_counter()
        tensor = incoming.take(index)
        if self.options.checks_bytes and not self.recording.saved[index].is_undefined:
            layout = layout_of(tensor)
            if saved_digest(layout, content_digest(tensor, layout)) != incoming.saved.digests[index]:
                raise TransferError(f"saved tensor {index} is not what the worker computed: damaged on the way")
        if self._wanted <= self._here.keys():
            self._stop_incoming()
        self.log.wait(perf_counter() - started)
        return tensor

    def _check(self, remote: RemoteSegment, saved: Recomputed) -> None:
        found = check_recomputed(self.name, self.recording.saved, saved)
        if found:
            self.log.drift(found)
            remote.drifted(found)

    def _stop_incoming(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()

    def _recompute_here(self, wanted: Set[int]) -> None:
        assert self.program is not None
        assert self.lineage is not None
        self._check_strict(self.local_reason)
        started = perf_counter()
        values = self.lineage.values()
        self._here = local_recompute.saved_here(
            self.name, self.program, self.recording, values, sorted(wanted), self.aids
        )
        self.log.add(Decision.TRAINER, perf_counter() - started)

    def _present(self, saved: SavedTensor) -> Callable[[], Tensor] | None:
        """Gives a saved tensor that lies in a parameter or in an argument that is kept: it need not travel."""
        if saved.source < 0 or saved.is_undefined:
            return None
        source = self.recording.sources[saved.source]
        start = (saved.offset - source.offset) * saved.layout.dtype.itemsize
        if (
            source.held is None
            or source.is_written
            or start < 0
            or start + saved.layout.span_bytes > source.layout.span_bytes
        ):
            return None
        return partial(view_at, source.held, start, saved.layout)

    def _is_as_saved(self, saved: SavedTensor, tensor: Tensor) -> bool:
        """Whether a tensor holds what was saved: one never recomputed, or in memory that others may write to.

        Version counters miss `.data`.
        """
        is_private = saved.source < 0 or self.recording.sources[saved.source].is_copy
        return (self.remote is None and is_private) or saved.is_undefined or _is_equal(saved, tensor)

    def _lost(self, error: BackhaulError) -> None:
        error.__traceback__ = None  # leads to the segment, and the future that the segment waited for keeps the error
        self._stop_incoming()
        if self.lineage is not None:
            self.lineage.take_back()
        self.remote = None
        self.local_reason = error.message.splitlines()[0]
        self.log.mismatches += isinstance(error, CheckpointError)
        # A lost worker is the link's to say, once for all segments.
        self.log.fallback(self.local_reason, is_said=isinstance(error, WorkerLostError))

    def stay_here(self, reason: str) -> None:
        """Settles that the trainer recomputes the call. Raises NotRemoteError under `strict`."""
        self.local_reason = reason
        self._check_strict(reason)
        self.log.on_trainer(reason)

    def keep_here(self, reason: str) -> None:
        """Settles that activations that no program carries stay here. Raises NotRemoteError under `strict`."""
        self.local_reason = reason
        self._check_strict(reason)
        self.log.kept(reason)

    def not_taken(self, refusal: Refusal) -> None:
        """Settles in forward that no worker takes the segment. Raises NotRemoteError under `strict`."""
        self.local_reason = refusal.reason
        self._check_strict(refusal.reason)
        self.log.fallback(refusal.reason, is_said=refusal.is_said)

    def _check_strict(self, reason: str) -> None:
        if self.options.strict:
            raise NotRemoteError(
                f"segment {self.name} would not be recomputed on a worker: {reason}. Remove the cause, or drop "
                "strict=True to let the trainer do it",
                segment=self.name,
                reason=reason,
            )


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
