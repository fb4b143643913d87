"""What the trainer keeps of a segment between forward and backward.

Only autograd holds the frame: through a graft's node, or through the handles in the place of saved tensors. So a frame
lives as long as a backward could need its segment, and its death releases everything on the worker.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from backhaul._backward import local_recompute
from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.handles import Handle, Handles, awaited
from backhaul._backward.lineage import Lineage
from backhaul._backward.local_backward import LocalBackward, check_arrived
from backhaul._backward.remote_side import RemoteSegment, SavedTensorStream, StoredGradient
from backhaul._backward.sole_consumers import SoleConsumers
from backhaul._backward.value_check import CheckpointError, Recomputed, check_recomputed
from backhaul._evidence.evidence import CallEvidence
from backhaul._observe.report import Decision
from backhaul._torch_api.selective import MUTATED
from backhaul_runtime.errors import (
    BackhaulError,
    BudgetError,
    CompilingError,
    DrainingError,
    LimitError,
    ReplayError,
    SavedTensorModifiedError,
    StaleTensorError,
    TransferError,
    UnsupportedTensorError,
    WorkerError,
    WorkerLostError,
    log_once,
)
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.replay.custom.backward_watch import CHANGES
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of, read
from backhaul_runtime.tensors.digest import digest_of_tensor, saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of, view_at
from backhaul_runtime.tensors.stopwatch import Stopwatch
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import (
    backward_pass,
    backward_task_id,
    is_batched,
    version_of,
)

RECOVERABLE = (WorkerError, WorkerLostError, CheckpointError, UnsupportedTensorError)
"""Errors that end a remote attempt but not the training: the trainer recomputes instead."""


@contextmanager
def _recoverable() -> Iterator[None]:
    """Lets the trainer recompute after an unexpected error of Backhaul's own code, whose traceback is logged once.

    Raises:
        WorkerError: In the place of an unexpected error.
    """
    try:
        yield
    except (BackhaulError, *RECOVERABLE):
        raise
    except Exception as error:
        log_once(error)
        raise WorkerError(f"the answer could not be used: {type(error).__name__}: {error}") from None


class RemoteGradients(NamedTuple):
    """What a checked backward on a worker gave.

    Attributes:
        contributions: The contributions as `Frame.gradients` returns them. Those that were not sent are None.
        uncollected: The sources whose contributions stayed on the worker, which adds them up.
        stored: The gradients that the worker stores for the backwards of predecessors, by source.
        took_s: Seconds from the request to the answer.
        outputs: The values of the program's outputs, if forward has not run on the trainer; else none.
        contribution_digests: Those of all contributions, also of those that stayed; none if forward has run here.
    """

    contributions: list[Contribution]
    uncollected: set[int]
    stored: Mapping[int, StoredGradient]
    took_s: float
    outputs: Sequence[Tensor] = ()
    contribution_digests: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Where the graph of a segment takes gradients, as far as a frame needs to know.

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
    """A recorded segment that can be given to a worker.

    Attributes:
        call: The call, with its recording.
        program: The program that recomputes the segment.
        need_bytes: The bytes that a worker needs for it.
        tensors: The caller's object behind each source.
        uses: Where the segment's graph takes gradients.
        predecessors: Segments whose outputs are sources of this one: the source, the frame, and the output's position.
    """

    call: CheckpointedCall
    program: Program
    need_bytes: int
    tensors: Sequence[Tensor]
    uses: Uses
    predecessors: "Sequence[tuple[int, Frame, int]]"


@dataclass(eq=False)
class Frame:
    """A segment between forward and backward. It is constructed once, when the call has ended.

    Afterwards only the methods of the frame change it: the remote side, the local reason, and the state of the
    recomputation in progress.

    Attributes:
        call: The call that the segment was recorded from.
        handles: The handles of the call's saved tensors.
        program: The program that recomputes the segment, or its part before something that no program can express. None
            if nothing needs to be recomputed.
        lineage: The sources for a recomputation on the trainer; None if nothing needs to be recomputed.
        uses: Where the segment's graph takes gradients.
        replay_options: Options of the call for a recomputation on the trainer.
        consumers: The sources that are outputs of other segments and that no later op can have used.
        arguments: The tensor arguments of the call that must not be changed before backward, with their versions.
        is_mutated: Whether the call wrote to a tensor that its selective-checkpoint policy keeps.
        remote: The worker's side; None if no worker has the segment.
        local_reason: Why the trainer recomputes the segment; empty if that is not decided.
        is_in_block: Whether an accumulation block runs the backward: a whole one, although it uses `autograd.grad`.
        evidence: Records the backwards of a graft; None if its step is not recorded.
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
    is_in_block: bool = False
    evidence: CallEvidence | None = None
    _first_backward: int | None = field(default=None, init=False)
    _here: dict[int, Callable[[], Tensor]] = field(default_factory=dict, init=False)
    _digests: dict[int, tuple[int, Digest]] = field(default_factory=dict, init=False)  # of `_here`, with versions
    _incoming: SavedTensorStream | None = field(default=None, init=False)
    _is_drawn: bool = field(default=False, init=False)  # whether `_incoming` is rechecked
    _wanted: set[int] = field(default_factory=set, init=False)
    _task: object = field(default=-1, init=False)
    # Guards all fields with an underscore, because several threads may run backward over one graph.
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def gradients(self, gradients: Mapping[int, Tensor], ways: Mapping[int, Tensor]) -> list[Contribution]:
        """Runs the segment's backward or a stage of it, on a worker if possible.

        Autograd calls it in the thread that runs backward.

        Args:
            gradients: The gradients of the program's outputs, by the output's position. No reference to them is kept.
            ways: For a backward that is differentiated itself: tensors through which contributions reach their sources,
                by index among the returned contributions.

        Returns:
            One contribution for each use of a source, cast or output, see `Replay.backward`.
        """
        assert self.program is not None
        assert self.lineage is not None
        self.check_backward()
        self._check_repeated()
        needs_graph = _needs_graph(gradients)
        if needs_graph:
            self.call.check_strict(needs_graph)
            self.call.log.on_trainer(needs_graph)
        remote = self.remote  # another thread's backward may lose it meanwhile
        if remote is not None and not needs_graph:
            stopwatch, summed = Stopwatch(self.call.device), frozenset(self.consumers.sources)
            try:
                contributions = self.remote_gradients(gradients, ambient_state.capture(), summed).contributions
                took = stopwatch.stop()
                if (rechecks := remote.rechecks) is not None:
                    is_checked = rechecks.draws() and self.local_backward.repeats(
                        remote, gradients, contributions, summed
                    )
                    rechecks.believe(remote.worker, is_checked=is_checked)
            except RECOVERABLE as error:
                self.lost(error)
            else:
                self.call.log.add(Decision.GRADIENTS, took)
                self.note_evidence(gradients, ambient_state.capture(), contributions, summed, remote)
                return contributions
        if not needs_graph:
            self.call.check_strict(self.local_reason)
        stopwatch = Stopwatch(self.call.device)
        contributions = self.local_backward.gradients(
            self.lineage.values(), gradients, self._ways_by_number(ways) if needs_graph else None
        )
        self.call.log.add(Decision.TRAINER, stopwatch.stop())
        if not needs_graph:
            self.note_evidence(gradients, ambient_state.capture(), contributions)
        elif self.evidence is not None:
            self.evidence.missed(needs_graph)
        return contributions

    def note_evidence(
        self,
        gradients: Mapping[int, Tensor | StoredGradient],
        state: ambient_state.State,
        contributions: Sequence[Contribution],
        summed: Collection[int] = (),
        remote: RemoteSegment | None = None,
    ) -> None:
        """Records a backward whose contributions count from now on, if its step is recorded.

        Args:
            gradients: The gradients of the program's outputs, by the output's position.
            state: Ambient settings under which backward ran.
            contributions: What it has returned.
            summed: The sources whose contributions are added up.
            remote: The worker's side that has returned them; None if the trainer has computed them.
        """
        if self.evidence is None:
            return
        assert self.program is not None
        here = {position: gradient for position, gradient in gradients.items() if isinstance(gradient, Tensor)}
        if len(here) < len(gradients):
            self.evidence.missed("its gradient was on the worker alone")
            return
        state = ambient_state.as_far_as(state, self.program.ambient_states)
        worker, is_exact = ("", True) if remote is None else (remote.worker, remote.is_exact)
        self.evidence.backward(here, state, contributions, summed, worker, has_other_bits=not is_exact)

    @property
    def local_backward(self) -> LocalBackward:
        """The segment's backward on the trainer."""
        assert self.program is not None
        assert self.lineage is not None
        return LocalBackward(self.call, self.program, self.lineage, self.uses.counts, self.replay_options)

    def remote_gradients(
        self,
        gradients: Mapping[int, Tensor | StoredGradient],
        state: ambient_state.State,
        summed: Set[int],
        may_stay: Mapping[int, Tensor] = MappingProxyType({}),
        unsent: Collection[int] = (),
        upcoming: Sequence[int] | None = None,
        round_number: int = 0,
    ) -> RemoteGradients:
        """Runs the segment's backward on its worker and checks the values. Any thread may call it, one at a time.

        Args:
            gradients: The gradients of the program's outputs, by the output's position.
            state: Ambient settings under which backward runs.
            summed: Sources whose contributions the worker may add up.
            may_stay: Parameters whose gradients the worker may keep and add up, by source.
            unsent: Sources whose gradients only the backwards of predecessors on the same worker need.
            upcoming: Numbers of the segments that will be requested next, as in `RemoteSegment.backward`.
            round_number: The round to which gradients that stay on the worker belong, see NOTE [Uncollected].

        Raises:
            BackhaulError: One of `RECOVERABLE`. Nothing was kept. Pass it to `lost`.
        """
        remote = self.remote
        if remote is None:  # another thread's backward over the same graph has lost it meanwhile
            raise WorkerLostError(self.local_reason, status="LOST")
        assert self.program is not None
        state = ambient_state.as_far_as(state, self.program.ambient_states)
        if changed := names.changed(self.call.recording.identities):
            raise ReplayError(
                f"the custom autograd function {changed}, or a value that it reads, was changed after forward"
            )
        checks_bytes = self.call.options.checks_bytes
        with _recoverable():
            answer = remote.backward(
                gradients,
                state,
                summed,
                self._due(),
                may_stay,
                summed & set(unsent),
                upcoming,
                self._unseen_outputs(),
                checks_bytes=checks_bytes,
            )
            self._check(remote, answer.compared)
        names.proven.update(self.program.functions)
        uncollected = answer.commit(round_number)
        return RemoteGradients(
            answer.contributions, uncollected, answer.stored, answer.took_s, answer.outputs, answer.contribution_digests
        )

    def _unseen_outputs(self) -> Sequence[Layout]:
        """Returns the layouts of the outputs that only a worker has computed; none if forward has run here."""
        assert self.program is not None
        first = len(self.program.sources) + len(self.program.casts)
        return self.uses.layouts[first:] if self.call.recording.is_unseen else ()

    def _ways_by_number(self, ways: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns `ways` by source or output, see `Contribution.source`."""
        assert self.program is not None
        numbers = self.sources_of_contributions()
        ends = [*range(len(self.uses.counts))]
        ends[len(self.program.sources) : len(self.program.sources) + len(self.program.casts)] = self.program.casts
        return {ends[numbers[position]]: way for position, way in ways.items()}

    def sources_of_contributions(self) -> list[int]:
        """Returns the source, cast or output that each contribution belongs to, see `gradients`."""
        return [number for number, count in enumerate(self.uses.counts) for _ in range(count)]

    @property
    def is_proven(self) -> bool:
        """Whether workers have run the backward of each custom function of the segment before, and it was exact.

        Only then may a backward run later than in plain training: one that draws random numbers, for example, has to
        run in its place, and only a worker notices that it does.
        """
        return self.program is not None and self.program.functions <= names.proven

    def release_remote(self) -> None:
        """Lets the worker free the segment, after a backward that only a loss of the worker would repeat."""
        self.remote = None
        self.local_reason = "the worker was lost with the gradients that it had kept"

    def _due(self) -> list[tuple[int, Layout]]:
        """Returns the source and the layout of the gradient of each contribution of a backward, in order."""
        used = enumerate(zip(self.uses.counts, self.uses.layouts, strict=True))
        return [(index, layout) for index, (count, layout) in used for _ in range(count)]

    def unpack(self, handle: Handle) -> Tensor:
        """Returns a tensor that autograd saved. The first call in a backward starts the segment's recomputation."""
        index = handle.index
        with self._lock:
            if handle.kept is not None:
                self.check_backward()
                return handle.kept_tensor(self.call.name)
            group, task = backward_pass()
            if task != self._task or (index not in self._wanted and group is None):
                self._task = None  # set only after a successful start, so that a failed one is repeated
                self._begin()
                self._task = task
            elif index not in self._wanted:
                raise CheckpointError(
                    f"segment {self.call.name}: saved tensor {index} was already unpacked once in this GraphExecGroup. "
                    "Performing two backward calls that overlap (i.e. require the same saved activation in order to "
                    "compute gradients) is not allowed there: use two groups, or none",
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
                    f"segment {self.call.name}: another thread writes to the memory of saved tensor {index} while "
                    "backward runs",
                    segment=self.call.name,
                )
            return tensor

    def _check_repeated(self) -> None:
        """Raises ReplayError for a second backward if the first one has changed the context of a custom function.

        Each recomputation has a context of its own, so it would not see that.
        """
        assert self.program is not None
        task = backward_task_id()
        if self._first_backward is None:
            self._first_backward = task
        if task == self._first_backward:
            return
        for name in self.program.functions:
            if (reason := names.denied.get(name, "")).endswith(CHANGES):
                raise ReplayError(
                    f"segment {self.call.name} can't run a second backward over the same graph: {reason}. From the "
                    "next forward on the function keeps its context on the trainer, so run forward again"
                )

    def check_backward(self) -> None:
        """Raises RuntimeError for a backward that torch's checkpoint rejects too."""
        if not self.is_in_block:
            self.call.check_backward()
        if self.is_mutated:
            raise RuntimeError(MUTATED)
        for reference, version in self.arguments:
            argument = reference()
            if argument is not None and version_of(argument) != version:
                raise SavedTensorModifiedError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an argument of segment {self.call.name}, of shape {list(argument.shape)}, is at version "
                    f"{version_of(argument)}; it was at {version} when the call ended. Run backward first, or write "
                    "to a copy",
                    segment=self.call.name,
                )

    def _begin(self) -> None:
        self.check_backward()
        wanted = awaited(self.handles)
        self._stop_incoming()
        self._wanted = set(wanted)
        self._here = {}
        if self.remote is not None:
            self._here = {i: here for i in wanted if (here := self._present(self.call.recording.saved[i])) is not None}
            self._queue_digests()
        # Backward unpacks tensors in the reverse order of saving.
        missing = [index for index in reversed(wanted) if index not in self._here]
        if missing:
            self._recompute(missing)

    def _recompute(self, positions: Sequence[int]) -> None:
        """Requests saved tensors from a worker; without one, recomputes all that backward needs."""
        if self.remote is not None:
            stopwatch = Stopwatch(self.call.device)
            try:
                with _recoverable():
                    self._incoming = self.remote.recompute(
                        {index: self.call.recording.saved[index].layout for index in positions}
                    )
                    self._check(self.remote, self._incoming.compared)
                    if (rechecks := self.remote.rechecks) is not None:
                        self._is_drawn = rechecks.draws()
                        rechecks.believe(self.remote.worker, is_checked=self._is_drawn)
            except RECOVERABLE as error:
                self.lost(error)
            else:
                self.call.log.add(Decision.ACTIVATIONS, stopwatch.stop())
                return
        self._recompute_here({*positions, *self._wanted})

    def _next(self, index: int) -> Tensor | None:
        """Returns a recomputed tensor; None if its memory has been written to or freed since."""
        if index not in self._here and self._incoming is not None:
            try:
                with _recoverable():
                    return self._take(self._incoming, index)
            except RECOVERABLE as error:
                self.lost(error)
                self._recompute_here({index, *self._wanted})
        try:
            tensor = self._here.pop(index)()
        except UnsupportedTensorError:  # the memory of a parameter was freed
            return None
        return tensor if self._is_as_saved(index, tensor) else None

    def _take(self, incoming: SavedTensorStream, index: int) -> Tensor:
        stopwatch = Stopwatch(self.call.device)
        tensor = incoming.take(index)
        checks_bytes = self.call.options.checks_bytes and not self.call.recording.saved[index].is_undefined
        if checks_bytes and digest_of_tensor(tensor) != incoming.compared.digests[index]:
            raise TransferError(
                f"saved tensor {index} differs from what the worker computed: it was damaged in transit"
            )
        if self._is_drawn and self.remote is not None:
            check_arrived(self.call, self.remote, index, tensor)
        if self._wanted <= self._here.keys():
            self._stop_incoming()
        self.call.log.wait(stopwatch.stop())
        return tensor

    def _check(self, remote: RemoteSegment, saved: Recomputed) -> None:
        assert self.program is not None
        if self.call.recording.is_unseen:
            return
        drift = check_recomputed(self.call.name, self.call.recording.compared(self.program), saved)
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
        stopwatch = Stopwatch(self.call.device)
        values = self.lineage.values()
        self._here = local_recompute.saved_here(
            self.call.name, self.program, self.call.recording, values, sorted(wanted), self.replay_options
        )
        self._queue_digests()
        self.call.log.add(Decision.TRAINER, stopwatch.stop())

    def _present(self, saved: SavedTensor) -> Callable[[], Tensor] | None:
        """Returns access to a saved tensor that lies in a parameter or kept argument, so it need not be fetched."""
        if saved.source < 0 or saved.is_undefined:
            return None
        source = self.call.recording.sources[saved.source]
        start = (saved.offset - source.offset) * saved.layout.dtype.itemsize
        if (
            source.retained is None
            or source.is_written
            or start < 0
            or start + saved.layout.span_bytes > source.layout.span_bytes
        ):
            return None
        return partial(view_at, source.retained, start, saved.layout)

    def _queue_digests(self) -> None:
        """Queues the digests of those tensors here that are on an accelerator and can have changed.

        The first that is unpacked waits for the device, the others no more. What backward itself writes to them from
        here on, without a new version, it would see without checkpointing too.
        """
        contents, self._digests = ContentDigests(), {}
        for index, here in self._here.items():
            saved = self.call.recording.saved[index]
            if saved.layout.is_on_accelerator and self._can_have_changed(saved):
                with suppress(UnsupportedTensorError, SavedTensorModifiedError):  # unpacking it raises them again
                    layout = layout_of(tensor := here())
                    digest = digest_of(saved_digest, layout, contents.take(tensor, layout))
                    self._digests[index] = self._version(saved), digest

    def _is_as_saved(self, index: int, tensor: Tensor) -> bool:
        """Whether a tensor still has the saved values. It may lie in memory that others write to.

        Version counters do not see writes through `.data`, so its digest is compared if it can have changed.
        """
        saved = self.call.recording.saved[index]
        version, digest = self._digests.pop(index, (-1, b""))
        if not self._can_have_changed(saved):
            return True
        return read(digest) == saved.digest if version == self._version(saved) else _is_equal(saved, tensor)

    def _can_have_changed(self, saved: SavedTensor) -> bool:
        is_private = saved.source < 0 or self.call.recording.sources[saved.source].is_copy
        return not saved.is_undefined and not (self.remote is None and is_private)

    def _version(self, saved: SavedTensor) -> int:
        """Returns the version of the memory of the source that a saved tensor lies in; 0 for one that has none."""
        source = self.call.recording.sources[saved.source] if saved.source >= 0 else None
        return 0 if source is None or source.retained is None else version_of(source.retained)

    def lost(self, error: BackhaulError) -> None:
        """Gives up the worker after one of the `RECOVERABLE` errors: the trainer recomputes the segment."""
        # The traceback leads to the segment, and the future that the segment waited for keeps the error.
        error.__traceback__ = None
        self._stop_incoming()
        if self.lineage is not None:
            self.lineage.take_back()
        self.remote = None
        self.local_reason = error.message.splitlines()[0]
        names.deny(error.fields.get("function"), self.local_reason)
        self.call.log.mismatches += isinstance(error, CheckpointError)
        # The connection logs the loss of a worker once for all segments.
        self.call.log.fallback(
            self.local_reason,
            is_said=isinstance(error, WorkerLostError),
            is_refusal=isinstance(error, (BudgetError, CompilingError, LimitError, DrainingError)),
        )


def _needs_graph(gradients: Mapping[int, Tensor]) -> str:
    """Returns why a backward needs the graph of the segment's inside, which no worker can return; empty if not."""
    if torch.is_grad_enabled():
        return "create_graph=True needs the graph of its inside"
    if any(is_batched(gradient) for gradient in gradients.values()):
        return "is_grads_batched=True needs the graph of its inside"
    return ""


def _is_equal(saved: SavedTensor, tensor: Tensor) -> bool:
    """Whether a tensor is bitwise equal to the saved one."""
    return digest_of_tensor(tensor) == saved.digest
