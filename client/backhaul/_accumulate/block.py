"""A block of micro-batches whose backward passes finish later, see `Session.accumulate`.

NOTE [Deferred]
1. `backward` differentiates the head of a micro-batch and queues the run (NOTE [Parts]). A thread for each worker asks
   that worker for the segments of the run, one after the other. No thread but the caller's ever runs autograd.
2. The caller's thread finishes micro-batches in their order: in a later `backward`, and when the block ends. It
   computes what a worker could not, and the tail.
3. Later gradients of a parameter must not be added up before earlier ones. So each thread gets its parts of runs in the
   order of the micro-batches, and waits for the part before. When a run fails, its worker's thread takes no further
   ones, and nothing more stays on any worker in the block.
4. The gradients that workers have kept are fetched when the block ends, or when a run has failed. Each worker's thread
   fetches them after its last run. If they are lost, the trainer computes them again, from the gradient with which each
   run began.
5. Nothing reaches `.grad` before the end, so a block that ends by an exception leaves nothing there.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from backhaul._accumulate.gradients import HeldGradients
from backhaul._accumulate.graph_parts import Parts, RunSegment, Target, divide, leaves_of
from backhaul._accumulate.reductions import Reductions, note_use
from backhaul._backward.frame import RECOVERABLE, Frame, StoredGradient
from backhaul._observe.report import BlockReport, Decision, Helper, SegmentLog
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.uploader import Uploader
from backhaul_runtime.errors import AccumulationError, BackhaulError
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import is_referred_to, next_sequence_number, without_hooks

MOST_UPCOMING = 32
"""The number of its next segments that a worker is told, which it replays ahead in this order."""

Sums = list[tuple[Tensor, Tensor]]
"""Parameters with the sums of the gradients that a worker has kept."""


@dataclass(slots=True, eq=False)
class _MicroBatch:
    number: int
    trainers_segments: int  # also those whose activations the trainer keeps
    parts: Parts
    state: ambient_state.State
    stream: torch.cuda.Stream | None  # on which the head was computed; None on a CPU
    sums: dict[Target, Tensor]  # the folds so far, by where they arrive
    size_bytes: int  # of what the trainer keeps for it
    segments_left: list[RunSegment] = field(default_factory=list)
    kept: list[tuple[Uploader, dict[int, Tensor]]] = field(default_factory=list)  # per segment done: what stayed where
    first_gradient: Tensor | None = None  # with which the run began
    stored: StoredGradient | None = None  # the gradient of the next segment, if only its worker has it
    last_gradient: tuple[int, Tensor] | None = None  # the last one that the trainer had, with the segment's position
    ended: "Future[None] | None" = None  # the last part of the run that was queued
    is_stopped: bool = False
    error: Exception | None = None


class AccumulationBlock:
    """An open accumulation block. Only the thread that opened it may use it.

    Args:
        name: The name of the block, for messages.
        micro_batch_ended: Called after the forward of each micro-batch. Returns of how many of its segments the trainer
            keeps the activations.
        is_ours: Whether a segment belongs to the session of the block.
        log: The log of the session's blocks.
        most_open: The number of micro-batches that the trainer may not have finished. `backward` finishes the first of
            them when there are more. None is finished earlier, so that the trainer has work at the end of a block while
            it waits for the last run.
        deferred_bytes: The most bytes that the trainer may keep for unfinished micro-batches; 0 for any number.
            `backward` finishes the first of them when there are more.
        held_bytes: The most bytes of gradients that may be held back; 0 for any number.

    Attributes:
        micro_batches: The number of micro-batches so far.
        hooked: Nodes of tensors on which a hook was registered since the last `backward`.
        is_working: Whether autograd works for the block now.
        waited_s: Seconds for which the trainer waited for workers.
        trainers_segments: Segments of all micro-batches that the trainer has computed.
        trainers_s: Seconds of the tails, in which the trainer computes its share.
        most_held_bytes: The most bytes of gradients that were held back.
        busy_s: Seconds from the request for each segment to its answer, by worker.
    """

    def __init__(
        self,
        name: str,
        micro_batch_ended: Callable[[], int],
        is_ours: Callable[[Frame], bool],
        log: SegmentLog,
        most_open: int = 4,
        deferred_bytes: int = 0,
        held_bytes: int = 0,
    ) -> None:
        self.name = name
        self._thread = os.getpid(), threading.get_ident()
        self._micro_batch_ended = micro_batch_ended
        self._is_ours = is_ours
        self._log = log
        self._most_open, self._deferred_bytes, self._held_bytes = most_open, deferred_bytes, held_bytes
        self._gradients = HeldGradients()
        self._reductions = Reductions()
        self.hooked: set[Node] = set()
        self._first_sequence = next_sequence_number()
        self._threads: dict[Uploader, ThreadPoolExecutor] = {}
        self._rounds: dict[Uploader, int] = {}  # of the gradients that each worker keeps
        self._last: dict[Uploader, Future[None]] = {}  # the last part of a run that each thread was given
        self._collecting: dict[Uploader, Future[Sums]] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last micro-batch
        self._failed: set[Uploader] = set()
        self._open: list[_MicroBatch] = []
        self._finished: list[_MicroBatch] = []  # those of which a worker keeps gradients
        self._is_open = True
        self.is_working = self._has_failed = False
        self.micro_batches = self.trainers_segments = self.most_held_bytes = 0
        self._chain = self._segment_bytes = self._most_deferred_bytes = 0
        self.waited_s = self.trainers_s = 0.0
        self.busy_s: dict[Uploader, list[float]] = {}

    def report(self, took_s: float) -> BlockReport:
        """Returns what the block took, after its end.

        Args:
            took_s: Seconds from its beginning to its end.
        """
        return BlockReport(
            micro_batches=self.micro_batches,
            took_s=took_s,
            others_s=max(0.0, took_s - self.waited_s - self.trainers_s),
            trainer=Helper(self.trainers_segments, self.trainers_s / max(1, self.trainers_segments)),
            workers={
                uploader.name: Helper(len(seconds), sum(seconds) / len(seconds))
                for uploader, seconds in self.busy_s.items()
            },
            held_bytes=self.most_held_bytes,
            chain=self._chain,
            segment_bytes=self._segment_bytes,
            deferred_bytes=self._most_deferred_bytes,
        )

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of any of these parameters are held back."""
        return any(map(self._gradients.holds, parameters))

    def begin_forward(self, model: DistributedDataParallel) -> None:
        """Notes that a forward of a model of DistributedDataParallel begins, which may expect a reduction.

        Raises:
            AccumulationError: The block can't reduce when the model would, or it can't be used any more.
        """
        if self._reductions.expect(model):
            self._check_use()
            with self._working():
                while self._open:
                    self._finish_first()
                for leaf in filter(self._gradients.has_gradient, model.parameters()):
                    note_use(leaf)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a micro-batch, except for what a worker computes meanwhile.

        Args:
            loss: A scalar that a forward inside the block has computed.

        Raises:
            AccumulationError: The block has ended or belongs to another thread, the loss comes from another session, or
                a parameter was changed inside the block.
            RuntimeError: As `Tensor.backward` raises it, for example for a graph that was used before.
        """
        self._check_use()
        kept = self._micro_batch_ended()
        if loss.grad_fn is None or loss.numel() != 1:
            raise AccumulationError(
                f"backward() in {self.name} needs a scalar loss with a graph, not a tensor of shape "
                f"{list(loss.shape)} with requires_grad={loss.requires_grad}"
            )
        with self._working():
            self._backward(loss, kept)

    def _backward(self, loss: Tensor, kept: int) -> None:
        self._check_unchanged()
        parts = divide(loss, self.hooked, self._first_sequence)
        self.hooked.clear()
        for frame in parts.frames:
            if not self._is_ours(frame):
                raise AccumulationError(f"the loss comes from another session than {self.name}")
            frame.is_in_block = True
            frame.call.log.micro_batch = self.micro_batches + 1
        self._gradients.enter(parts.leaves.values())
        if self._reductions.enter(parts.leaves.values(), self.micro_batches + 1):
            parts = parts.undivided("the first reduction of a DistributedDataParallel model must see autograd's order")
        self.micro_batches += 1
        stream = self._stream = torch.cuda.current_stream(loss.device) if loss.is_cuda else None
        on_workers = sum(frame.remote is not None for frame in parts.frames)
        started = perf_counter()
        sums = self._head(loss, parts)
        state, size_bytes = ambient_state.capture(), _size_bytes(parts, sums, kept)
        own = kept + len(parts.frames) - on_workers
        self._chain = max(self._chain, kept + len(parts.frames))
        micro_batch = _MicroBatch(self.micro_batches, own, parts, state, stream, sums, size_bytes)
        if parts.run:
            for segment in parts.run:
                segment.frame.check_backward()
                segment.consume()
            micro_batch.segments_left = list(parts.run)
            micro_batch.first_gradient = micro_batch.sums.get(parts.run[0].target)
            self._plan(parts)
            self._submit(micro_batch)
        else:
            if on_workers:
                self._log.blocked(parts.reason)
            else:
                self.trainers_s += perf_counter() - started
                self.trainers_segments += own
            for leaf in parts.leaves.values():
                self._gradients.plan(leaf, None, self.micro_batches)
        self._open.append(micro_batch)
        while len(self._open) > self._most_open or 0 < self._deferred_bytes < self._open_bytes:
            self._finish_first()
        self._most_deferred_bytes = max(self._most_deferred_bytes, self._open_bytes)

    @property
    def _open_bytes(self) -> int:
        return sum(micro_batch.size_bytes for micro_batch in self._open)

    def flush(self, outputs: Iterable[Tensor | GradientEdge] = ()) -> None:
        """Finishes all micro-batches, and adds their gradients to `.grad`.

        Args:
            outputs: What a backward begins at that follows, and that is not of the block.
        """
        self._check_use()
        self._micro_batch_ended()  # a forward of the caller's own, if a plain backward comes now
        with self._working():
            self._check_unchanged()  # before a recomputation notices it, which could not name the block
            for uploader, thread in self._threads.items():  # sums arrive while the trainer computes the last tails
                with suppress(RuntimeError):  # the interpreter is shutting down and starts no more work in threads
                    self._collecting[uploader] = thread.submit(self._collected, uploader)
            while self._open:
                self._finish_first()
            self._collect()
            self._check_unchanged()
            self._gradients.deliver(self._reductions)
            self._reductions.end(leaves_of(outputs))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Notes that autograd works for the block, and that the block is incomplete if that raises an error."""
        self.is_working, self._has_failed = True, True
        try:
            yield
        finally:
            self.is_working = False
        self._has_failed = False

    def close(self, *, is_failed: bool) -> None:
        """Ends the block: delivers all gradients, or drops everything if the block has failed."""
        try:
            if not is_failed:
                self.flush()
        finally:
            self._is_open = False
            self._reductions.abandon()
            for uploader in self._threads:
                uploader.uncollected.abandon()
            for thread in self._threads.values():
                thread.shutdown(cancel_futures=True)
            self._open.clear()
            self._finished.clear()
            self._gradients = HeldGradients()

    def _check_use(self) -> None:
        if not self._is_open:
            raise AccumulationError(f"{self.name} has ended: call backward() inside it")
        if (os.getpid(), threading.get_ident()) != self._thread:
            raise AccumulationError(f"{self.name} belongs to another thread or process: open a block in each")
        if self._has_failed:
            raise AccumulationError(f"{self.name} is incomplete after an error in it: leave the block and run it again")

    def _check_unchanged(self) -> None:
        changed = self._gradients.changed()
        if changed is not None:
            raise AccumulationError(
                f"a parameter of shape {list(changed.shape)} was changed inside {self.name}: its values, its hooks, "
                "its .grad or requires_grad. Its micro-batches would be treated differently. Change it after the block"
            )

    def _head(self, loss: Tensor, parts: Parts) -> dict[Target, Tensor]:
        """Differentiates the head. Returns what it contributes to leaves, and to the run."""
        leaves = parts.leaves.values()
        with without_hooks(leaves), self._reductions.ordering(leaves) if not parts.run else nullcontext():
            sums = _gradients([loss], None, parts.head, parts)
            if sides := [target for target in parts.sides if target in sums]:
                sums |= _gradients(
                    [GradientEdge(*target) for target in sides],
                    [sums.pop(target) for target in sides],
                    parts.shared,
                    parts,
                )
        return sums

    def _plan(self, parts: Parts) -> None:
        """Notes which leaves get all of their gradient from one segment of the run, and from which worker."""
        segments_of: dict[Target, set[RunSegment]] = {}
        for segment in parts.run:
            targets = {target for _, target in segment.contributions}
            for target in targets:
                segments_of.setdefault(target, set()).add(segment)
            segment_bytes = sum(parts.leaves[target].nbytes for target in targets & parts.leaves.keys())
            self._segment_bytes = max(self._segment_bytes, segment_bytes)
        elsewhere = {*parts.head, *parts.shared, *parts.tail}
        for target, leaf in parts.leaves.items():
            segments = segments_of.get(target, set()) if target not in elsewhere else set()
            uploader = _uploader(segments.pop()) if len(segments) == 1 else None
            self._gradients.plan(leaf, uploader, self.micro_batches)

    def _submit(self, micro_batch: _MicroBatch) -> None:
        """Queues the run. Each worker's thread gets its parts of runs in the order of the micro-batches (Rule 3)."""
        for uploader, segments in itertools.groupby(micro_batch.parts.run, _uploader):
            if uploader is None or uploader in self._failed:
                self._gradients.stop_keeping()
                return
            if uploader not in self._threads:
                self._rounds[uploader] = uploader.uncollected.begin()
                self._threads[uploader] = ThreadPoolExecutor(1, "backhaul-deferred")
            run = partial(self._run, micro_batch, uploader, len(list(segments)), micro_batch.ended)
            try:
                micro_batch.ended = self._last[uploader] = self._threads[uploader].submit(run)
            except RuntimeError:  # the interpreter is shutting down and starts no more work in threads
                self._gradients.stop_keeping()
                return

    def _run(
        self, micro_batch: _MicroBatch, uploader: Uploader, segments: int, previous: "Future[None] | None"
    ) -> None:
        """Asks a worker for the next segments of a run. The worker's thread runs it, after the part before it."""
        if previous is not None:
            wait([previous])
        try:
            with torch.cuda.stream(micro_batch.stream):  # this thread's own stream would not wait for the head
                for _ in range(segments):
                    if micro_batch.error is not None or micro_batch.is_stopped or uploader in self._failed:
                        micro_batch.is_stopped = True
                        return
                    self._ask(micro_batch, micro_batch.segments_left[0], uploader)
        except Exception as error:  # the caller's thread deals with it
            error.__traceback__ = None
            micro_batch.error = error
            self._failed.add(uploader)
            self._gradients.stop_keeping()

    def _ask(self, micro_batch: _MicroBatch, segment: RunSegment, uploader: Uploader) -> None:
        frame = segment.frame
        gradient = micro_batch.stored or micro_batch.sums.get(segment.target)
        if gradient is None:  # no gradient reaches the segment, so none leaves it
            micro_batch.segments_left.pop(0)
            micro_batch.kept.append((uploader, {}))
            return
        if isinstance(gradient, Tensor):
            micro_batch.last_gradient = len(micro_batch.kept), gradient
        leaves, due = micro_batch.parts.leaves, frame.sources_of_contributions()
        may_stay = {
            due[index]: leaves[target]
            for index, target in segment.contributions
            if target in leaves and self._gradients.may_stay(leaves[target], uploader, micro_batch.number)
        }
        following = self._following(micro_batch, segment)
        summed = _only_contributions(micro_batch, segment, due)
        unsent = {due[index] for index, target in segment.contributions if target == following} & summed
        started = perf_counter()
        answer = frame.remote_gradients(
            {0: gradient},
            micro_batch.state,
            may_stay,
            summed,
            unsent if len(unsent) == 1 else (),
            self._upcoming(micro_batch, uploader),
            self._rounds[uploader],
        )
        micro_batch.stored = None  # not before, because `_recovered` must learn that the trainer lacks the gradient
        kept = {source: may_stay[source] for source in answer.kept}
        frame.call.log.add(Decision.GRADIENTS, 0.0)  # nothing waited
        for source, leaf in may_stay.items():
            self._gradients.stayed(leaf, is_kept=source in answer.kept)
        micro_batch.segments_left.pop(0)
        micro_batch.kept.append((uploader, kept))
        _fold(micro_batch.sums, segment, answer.contributions)
        if len(unsent) == 1 and following not in micro_batch.sums:
            micro_batch.stored = answer.stored.get(*unsent)
        # Not only what the run took: while requests wait for it, the worker also does what surrounds its runs.
        self.busy_s.setdefault(uploader, []).append(perf_counter() - started)

    def _upcoming(self, micro_batch: _MicroBatch, uploader: Uploader) -> list[int]:
        """Returns the numbers of the segments that a worker is asked for after the next one."""
        _, *rest = micro_batch.segments_left
        later = [other for other in self._open if other.number > micro_batch.number]
        segments = itertools.chain(rest, *(other.segments_left for other in later))
        remotes = (segment.frame.remote for segment in segments if _uploader(segment) is uploader)
        return [
            remote.number for remote in itertools.islice(remotes, MOST_UPCOMING) if isinstance(remote, SavedSegment)
        ]

    def _following(self, micro_batch: _MicroBatch, segment: RunSegment) -> Target | None:
        """Returns where the gradient of the run's next segment is summed up, if only the same worker needs it."""
        _, *later = micro_batch.segments_left
        if not later or _uploader(later[0]) is not _uploader(segment) or later[0].target in micro_batch.sums:
            return None
        return later[0].target

    def _finish_first(self) -> None:
        """Completes the gradients of the first micro-batch that is open."""
        micro_batch = self._open[0]
        started = perf_counter()
        if micro_batch.ended is not None:
            wait([micro_batch.ended])
        waited_s = perf_counter() - started
        self.waited_s += waited_s
        self._log.wait(waited_s)
        parts, sums = micro_batch.parts, micro_batch.sums
        if micro_batch.error is not None:
            if not isinstance(micro_batch.error, RECOVERABLE):
                raise micro_batch.error
            micro_batch.segments_left[0].frame.lost(micro_batch.error)
            self._collect()
        done = len(parts.run) - len(micro_batch.segments_left)
        if micro_batch.stored is not None:
            sums |= _recovered(micro_batch, done)
            micro_batch.stored = None
        for segment in micro_batch.segments_left:
            gradient = sums.get(segment.target)
            if gradient is not None:
                _fold(sums, segment, _on_trainer(segment, gradient, micro_batch.state))
        micro_batch.segments_left.clear()
        for segment in parts.run[:done]:
            segment.frame.release_remote()
        started = perf_counter()
        with _under(micro_batch.state):
            self._tail(parts, sums)
        if parts.run:
            self.trainers_s += perf_counter() - started
            self.trainers_segments += micro_batch.trainers_segments
        for position, (target, leaf) in enumerate(parts.leaves.items()):
            gradient = sums.get(target)
            if gradient is not None:
                self._gradients.add(leaf, (micro_batch.number, position), gradient)
        self._check_held()
        sums.clear()
        self._open.pop(0)
        if any(kept for _, kept in micro_batch.kept):
            self._finished.append(micro_batch)

    def _check_held(self) -> None:
        """Counts the gradients that are held back. Raises AccumulationError if there are more than allowed."""
        held_bytes = self._gradients.size_bytes
        self.most_held_bytes = max(self.most_held_bytes, held_bytes)
        if 0 < self._held_bytes < held_bytes:
            raise AccumulationError(
                f"{self.name} holds back {held_bytes} bytes of gradients, but held_bytes allows {self._held_bytes}: "
                "use fewer micro-batches in a block, set gradients to None before it, or remove hooks from parameters"
            )

    def _tail(self, parts: Parts, sums: dict[Target, Tensor]) -> None:
        """Differentiates the tail from the sums that arrive there."""
        roots = [target for target in parts.roots if target in sums]
        if not roots:
            return
        roots += [target for target in parts.tail if target in sums]
        edges = [GradientEdge(*target) for target in roots]
        with without_hooks(parts.leaves.values()):
            sums |= _gradients(edges, [sums.pop(target) for target in roots], parts.tail, parts)

    def _collected(self, uploader: Uploader) -> Sums:
        with torch.cuda.stream(self._stream):  # a worker's thread has another one, which nothing would wait for
            return uploader.uncollected.collect(
                self._rounds[uploader], lambda size_bytes: self._log.traffic(down_bytes=size_bytes)
            )

    def _collect(self) -> None:
        """Fetches the gradients that workers have kept, or computes them again (Rule 4)."""
        lost = set[Uploader]()
        for uploader, last in self._last.items():
            wait([last])  # until the worker's thread is idle
            collecting = self._collecting.pop(uploader, None)
            try:
                sums = self._collected(uploader) if collecting is None else collecting.result()
            except BackhaulError as error:
                lost.add(uploader)
                self._log.fallback(f"a worker was lost with gradients that it had kept: {error.message}")
            else:
                self._gradients.put_first({id(parameter): total for parameter, total in sums})
            self._rounds[uploader] = uploader.uncollected.begin()
        keeping = [*self._finished, *self._open]
        if lost:
            self._gradients.stop_keeping()
            sums_again: dict[int, Tensor] = {}
            for micro_batch in sorted(keeping, key=lambda micro_batch: micro_batch.number):
                for parameter, gradient in _computed_again(micro_batch, lost):
                    sums_again[id(parameter)] = _plus(sums_again.get(id(parameter)), gradient)
            self._gradients.put_first(sums_again)
        for micro_batch in keeping:
            micro_batch.kept = [(uploader, {}) for uploader, _ in micro_batch.kept]
        self._finished.clear()


def _gradients(
    outputs: Sequence[Tensor] | Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    targets: Sequence[Target],
    parts: Parts,
) -> dict[Target, Tensor]:
    """Differentiates outputs down to targets. Returns the gradients that reach any, to which nothing else refers.

    Args:
        outputs: The outputs, or edges that lead to them.
        gradients: The gradients of the outputs; None for a loss.
        targets: Where the gradients are taken.
        parts: The graph that they belong to.
    """
    if gradients is not None and len(gradients) == 1:  # torch's hooks over several tensors overlook a lone root
        other = gradients[0].new_zeros(()).requires_grad_()
        outputs, gradients = [*outputs, get_gradient_edge(other)], [*gradients, other.detach()]
    register: Callable[[Tensor, Callable[[Tensor], Tensor]], Any] = Tensor.register_hook
    leaves = [parts.leaves[target] for target in targets if target in parts.leaves] if parts.may_reuse else []
    hooks = [register(leaf, torch.clone) for leaf in leaves]  # before the same memory is written to for another leaf
    try:
        edges = [GradientEdge(*target) for target in targets]
        reached = torch.autograd.grad(outputs, edges, gradients, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    owned = dict[Target, Tensor]()
    for index, target in enumerate(targets):
        if reached[index] is not None:
            # That of anything but a leaf may be a view of memory that a hook writes to again.
            is_shared = target not in parts.leaves or is_referred_to(reached, index)
            owned[target] = reached[index].clone() if is_shared else reached[index]
    return owned


def _size_bytes(parts: Parts, sums: Mapping[Target, Tensor], kept: int) -> int:
    """Returns the bytes that the trainer keeps for a micro-batch until it is finished.

    Args:
        parts: The graph of the micro-batch, divided.
        sums: The gradients that the head contributes.
        kept: The number of segments whose activations it keeps, about as many as the others would.
    """
    sources = [source for frame in parts.frames for source in frame.call.recording.sources if not source.is_leaf]
    inputs = {id(source.kept_value): source.layout.span_bytes for source in sources if source.kept_value is not None}
    keeping = kept * max((frame.call.log.saved_bytes for frame in parts.frames), default=0)
    return sum(inputs.values()) + sum(g.numel() * g.element_size() for g in sums.values()) + keeping


def _only_contributions(micro_batch: _MicroBatch, segment: RunSegment, due: Sequence[int]) -> set[int]:
    """Returns the outputs of earlier segments whose gradients get no contributions before those of this segment.

    These contributions can be summed beforehand, because (a + b) + c is what autograd computes.

    Args:
        micro_batch: The micro-batch with the gradients so far.
        segment: The next segment of its run.
        due: The source of each contribution.
    """
    sources: dict[Target, set[int]] = {}
    targets: dict[int, set[Target]] = {}
    for index, target in segment.contributions:
        sources.setdefault(target, set()).add(due[index])
        targets.setdefault(due[index], set()).add(target)
    known = micro_batch.sums.keys() | micro_batch.parts.leaves.keys()
    return {
        source
        for source in targets.keys() & segment.frame.consumers.watched
        for target, *others in [targets[source]]
        if not others and target not in known and len(sources[target]) == 1
    }


def _uploader(segment: RunSegment) -> Uploader | None:
    """Returns the uploader of the worker that stores a segment."""
    remote = segment.frame.remote
    return remote.uploader if isinstance(remote, SavedSegment) else None


@contextmanager
def _under(state: ambient_state.State) -> Iterator[None]:
    """Runs under the ambient settings of a micro-batch's own `backward`."""
    with ambient_state.restored():
        ambient_state.apply(state, ambient_state.capture())
        yield


def _on_trainer(segment: RunSegment, gradient: Tensor, state: ambient_state.State) -> list[Contribution]:
    with torch.no_grad(), _under(state):  # as autograd runs backward
        return segment.frame.gradients({0: gradient}, {})


def _plus(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Adds as autograd does, which puts a sparse gradient second."""
    if total is None:
        return gradient
    return gradient + total if total.is_sparse and not gradient.is_sparse else total + gradient


def _fold(sums: dict[Target, Tensor], segment: RunSegment, contributions: Sequence[Contribution]) -> None:
    """Adds a segment's contributions to the gradients that they belong to, in autograd's order."""
    sums.pop(segment.target, None)
    for index, target in segment.contributions:
        gradient = contributions[index].gradient
        if gradient is not None:
            sums[target] = _plus(sums.get(target), gradient)


def _recovered(micro_batch: _MicroBatch, done: int) -> dict[Target, Tensor]:
    """Computes the gradient with which a run goes on, which only a lost worker had. `done` segments had ended."""
    assert micro_batch.last_gradient is not None
    position, gradient = micro_batch.last_gradient
    run = micro_batch.parts.run
    for segment, following in pairwise(run[position : done + 1]):
        sums: dict[Target, Tensor] = {}
        _fold(sums, segment, _on_trainer(segment, gradient, micro_batch.state))
        gradient = sums[following.target]
    return {run[done].target: gradient}


def _computed_again(micro_batch: _MicroBatch, lost: Set[Uploader]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the parameters whose gradients lost workers have kept of a micro-batch, with these gradients."""
    sums: dict[Target, Tensor] = {}
    if micro_batch.first_gradient is not None:
        sums[micro_batch.parts.run[0].target] = micro_batch.first_gradient
    last = max(
        (number for number, (uploader, kept) in enumerate(micro_batch.kept) if kept and uploader in lost), default=-1
    )
    for segment, (uploader, kept) in zip(micro_batch.parts.run[: last + 1], micro_batch.kept, strict=False):
        gradient = sums.get(segment.target)
        if gradient is None:
            continue
        _fold(sums, segment, _on_trainer(segment, gradient, micro_batch.state))
        if uploader in lost:
            wanted = {id(parameter): parameter for parameter in kept.values()}
            for target in {target for _, target in segment.contributions}:
                leaf = micro_batch.parts.leaves.get(target)
                if leaf is not None and id(leaf) in wanted:
                    yield leaf, sums[target]
