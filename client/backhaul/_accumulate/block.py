"""A block of micro-batches whose backward passes finish later, see `Session.accumulate`.

NOTE [Deferred]
1. `backward` differentiates the head of a micro-batch and queues the chain (NOTE [Parts]). A thread for each worker
   asks that worker for the segments of the chain, one after the other. No thread but the caller's ever runs autograd.
2. The caller's thread finishes micro-batches in their order: in a later `backward`, and when the block ends. It
   computes what a worker could not, and the tail.
3. Later gradients of a parameter must not be added up before earlier ones. So each thread gets its parts of chains in
   the order of the micro-batches, and waits for the part before. When a chain fails, its worker's thread takes no
   further ones, and nothing more stays on any worker in the block.
4. The gradients that workers have kept are fetched when the block ends, or when a chain has failed. Each worker's
   thread fetches them after its last chain. If they are lost, the trainer computes them again, from the gradient with
   which each chain began.
5. Nothing reaches `.grad` before the end, so a block that ends by an exception leaves nothing there.
6. What follows the delivery reports and cleans up. If it fails, that is logged: an exception would make the caller run
   the block again, which adds the gradients twice. Ctrl-C is raised there, with a note that says so.
7. If the session rechecks, workers keep no gradients, because nobody would see single ones. The caller's thread
   rechecks the answers that were drawn when it finishes their micro-batch. If a worker was wrong since the block began,
   others of its gradients may be in the sums, so the block ends by an error.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parallel import DistributedDataParallel

from backhaul._accumulate.block_times import BlockTimes, EndedBlock
from backhaul._accumulate.gradients import PendingGradients
from backhaul._accumulate.graph_parts import ChainSegment, Parts, Target, divide, leaves_of
from backhaul._accumulate.micro_batch import (
    MicroBatch,
    Streams,
    check_functions,
    computed_again,
    differentiated,
    fold,
    gradients_of,
    on_trainer,
    plus,
    present_streams,
    recovered,
    size_bytes_of,
    under,
    uploader_of,
)
from backhaul._accumulate.reductions import Reductions, note_use
from backhaul._accumulate.remote_chains import RemoteChains
from backhaul._accumulate.whole import NOT_CALLED, WholeMicroBatches, loss_in, whole_parts
from backhaul._backward.frame import RECOVERABLE, Frame
from backhaul._backward.recheck import Rechecks
from backhaul._forward.whole_call import WholeCall
from backhaul._observe.journal import SegmentLog
from backhaul._observe.report import Helper
from backhaul_runtime.errors import AccumulationError, BackhaulError, RecheckError, WorkerLostError, log_once
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.stopwatch import Stopwatch
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import next_sequence_number, pytree, without_hooks


class AccumulationBlock:
    """An open accumulation block. Only the thread that opened it may use it.

    Args:
        name: The name of the block, for messages.
        micro_batch_ended: Called after the forward of each micro-batch. Returns of how many of its segments the trainer
            keeps the activations.
        take_last: Called before each further micro-batch with what `Shares.last_segments` takes. Returns of how many of
            the last segments the trainer computes in the head.
        is_ours: Whether a segment belongs to the session of the block.
        log: The log of the session's blocks.
        fixed: The digests of parameters that forwards in the block take.
        rechecks: What the session rechecks.
        whole: Whole micro-batches, see NOTE [Whole micro-batches].
        most_open: The number of micro-batches that the trainer may not have finished. `backward` finishes the first of
            them when there are more. None is finished earlier, so that the trainer has work at the end of a block while
            it waits for the last chain.
        deferred_bytes: The most bytes that the trainer may keep for unfinished micro-batches; 0 for any number.
            `backward` finishes the first of them when there are more.
        pending_gradient_bytes: The most bytes of gradients that may be pending; 0 for any number.

    Attributes:
        is_open: Whether the block has not ended.
        micro_batches: The number of micro-batches so far.
        hooked: Nodes of tensors on which a hook was registered since the last `backward`.
        is_working: Whether autograd works for the block now.
        is_deferring: Whether a plain backward is one of the block's micro-batches.
        ends_in_closure: Whether the block ends in the closure of an optimizer's step, so that the step may begin
            inside the block.
        trainers_segments: Segments of all micro-batches that the trainer has computed.
        most_pending_bytes: The most bytes of gradients that were pending.
    """

    def __init__(
        self,
        name: str,
        micro_batch_ended: Callable[[], int],
        take_last: Callable[[int, Mapping[str, int], Mapping[str, int], int], int],
        is_ours: Callable[[Frame], bool],
        log: SegmentLog,
        fixed: FixedDigests,
        rechecks: Sequence[Rechecks],
        whole: WholeMicroBatches,
        most_open: int = 4,
        deferred_bytes: int = 0,
        pending_gradient_bytes: int = 0,
    ) -> None:
        self.name = name
        self._thread = os.getpid(), threading.get_ident()
        self._micro_batch_ended = micro_batch_ended
        self._take_last = take_last
        self._is_ours = is_ours
        self._log, self._fixed = log, fixed
        self._most_open, self._deferred_bytes, self._allowed_pending_bytes = (
            most_open,
            deferred_bytes,
            pending_gradient_bytes,
        )
        self._rechecks, self._whole = rechecks, whole
        self._out_before = frozenset(worker for one in rechecks for worker in one.out)
        self._gradients = PendingGradients()
        self._reductions = Reductions()
        self.hooked: set[Node] = set()
        self._first_sequence = next_sequence_number()
        self._streams: Streams = ()  # of the last micro-batch
        self._device = torch.device("cpu")  # of its loss
        self._open: list[MicroBatch] = []
        self._finished: list[MicroBatch] = []  # those of which a worker keeps gradients
        self.is_open = True
        self.is_working = self.is_deferring = self.ends_in_closure = False
        self._has_failed = self._has_delivered = False
        self.micro_batches = self.trainers_segments = self.most_pending_bytes = 0
        self._chain = self._segment_bytes = self._most_deferred_bytes = 0
        self._times = BlockTimes()
        self._in_head = 0  # segments of the next micro-batch that belong to its head
        self._usual_head: Duration = 0.0  # what the last head without such segments took
        self._chains = RemoteChains(self._gradients, log, self._open, whole.rechecks)

    def ended(self, took: Duration) -> EndedBlock:
        """Returns what is known of the block after its end.

        Args:
            took: What it took from its beginning to its end.
        """
        return EndedBlock(
            took,
            self._times,
            micro_batches=self.micro_batches,
            trainers_segments=self.trainers_segments,
            workers={
                uploader.name: Helper(len(seconds), sum(seconds) / len(seconds))
                for uploader, seconds in self._chains.busy_s.items()
            },
            pending_gradient_bytes=self.most_pending_bytes,
            chain=self._chain,
            segment_bytes=self._segment_bytes,
            deferred_bytes=self._most_deferred_bytes,
        )

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of any of these parameters are pending."""
        return any(map(self._gradients.holds, parameters))

    @property
    def is_complete(self) -> bool:
        """Whether every gradient so far has reached `.grad`, as after a plain backward."""
        return self._gradients.is_empty and not self._has_failed

    def begin_forward(self, model: DistributedDataParallel) -> None:
        """Notes that a forward of a model of DistributedDataParallel begins, which may expect a reduction.

        Raises:
            AccumulationError: The block can't reduce when the model would, or it can't be used any more.
        """
        if self._reductions.expect(model):
            self._check_use()
            with self._working():
                self._finish_all()
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

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a micro-batch with its backward, or lets a worker do so, forward included.

        A worker gets the first micro-batches of a block, as many as it computes while the trainer computes the others.
        See docs/whole-micro-batches.md.

        Args:
            function: Returns the loss of the micro-batch: a tensor of one element with a graph, or a tuple, list or
                mapping with such a loss as its first item, as its item or as its attribute `loss`. It must depend on
                nothing that changes in the block, and change nothing but what it returns.
            *args: Arguments of the function. Tensors among them must not be changed before the block ends.
            **kwargs: Keyword arguments of the function.

        Returns:
            What the function returns, with tensors that have no graph. The loss of a micro-batch that a worker computes
            has its value when the block ends. Reading it before waits for the worker.

        Raises:
            AccumulationError: As for `backward`, or the function returns no loss.
        """
        self._check_use()
        returned, began_s = NOT_CALLED, perf_counter()
        if self._whole.is_next:
            with self._working():
                returned, call = self._whole.call(function, args, kwargs)
                if call is not None:
                    self._submit(call)
                    return _without_graph(returned)
        if returned is NOT_CALLED:
            returned = self._whole.call_here(function, args, kwargs)
        loss = loss_in(returned)
        if loss is None:
            raise AccumulationError(f"run() in {self.name} needs a function that returns a loss: see its documentation")
        self.backward(loss)
        del loss
        self._whole.ran_here(perf_counter() - began_s)
        return _without_graph(returned)

    def _submit(self, call: WholeCall) -> None:
        """Queues the backward of a whole micro-batch."""
        self._check_unchanged()
        self._micro_batch_ended()
        parts, gradient = whole_parts(call)
        call.frame.is_in_block = True
        self._gradients.enter(parts.leaves.values())
        self.micro_batches += 1
        call.frame.call.log.micro_batch = self.micro_batches
        streams = self._streams = present_streams(gradient)
        self._device = gradient.device
        with torch.no_grad():
            state = ambient_state.capture()
        sums = {parts.chain[0].target: gradient}
        micro_batch = MicroBatch(self.micro_batches, 0, parts, state, streams, sums, size_bytes_of(parts, sums, 0))
        micro_batch.segments_left, micro_batch.first_gradient = list(parts.chain), gradient
        self._plan(parts)
        self._chains.submit(micro_batch)
        self._open.append(micro_batch)
        self._whole.submitted(call, micro_batch)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Turns each `loss.backward()` inside into `backward(loss)`, for libraries that call it themselves.

        Calls with further arguments, and those whose loss is no scalar with a graph, stay plain ones.
        """
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

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
        parts = self._divisible(parts)
        # Its head has nodes of the tail, whose hooks see the micro-batches in their order. A whole one has none here.
        if not parts.chain and any(one.parts.chain and not one.is_whole for one in self._open):
            self._finish_all()
        self.micro_batches += 1
        streams = self._streams = present_streams(loss)
        self._device = loss.device
        on_workers = sum(frame.remote is not None for frame in parts.frames)
        stopwatch = Stopwatch(self._device)
        sums = self._head(loss, parts)
        head = stopwatch.stop()
        with torch.no_grad():  # as in autograd's own backward: a segment's backward otherwise records a graph of itself
            state = ambient_state.capture()
        size_bytes = size_bytes_of(parts, sums, kept)
        own = kept + len(parts.frames) - on_workers
        self._chain = max(self._chain, kept + len(parts.frames))
        micro_batch = MicroBatch(self.micro_batches, own, parts, state, streams, sums, size_bytes)
        if parts.chain:
            for segment in parts.chain:
                segment.frame.check_backward()
                segment.consume()
            micro_batch.segments_left = list(parts.chain)
            micro_batch.first_gradient = micro_batch.sums.get(parts.chain[0].target)
            self._plan(parts)
            self._chains.submit(micro_batch)
        else:
            if on_workers:
                self._log.blocked(parts.reason)
            else:
                self._times.own.add(head)
                self.trainers_segments += own
            for leaf in parts.leaves.values():
                self._gradients.plan(leaf, None, self.micro_batches)
        self._open.append(micro_batch)
        while self._open and self._must_finish_first():
            self._finish_first()
        self._most_deferred_bytes = max(self._most_deferred_bytes, self._open_bytes)
        self._in_head = self._chosen_for_head(parts)

    def _must_finish_first(self) -> bool:
        """Whether the first open micro-batch is finished now."""
        first = self._open[0]
        if first.is_whole:  # the trainer goes on with the others until it has ended
            return first.ended is None or first.ended.is_done
        return (
            len(self._open) > self._most_open
            or 0 < self._deferred_bytes < self._open_bytes
            or not first.parts.chain  # it waits for nothing, and would hold a set of gradients
        )

    def _divisible(self, parts: Parts) -> Parts:
        """Returns the parts, undivided if a part of the backward must not run later than in a plain backward."""
        if self._reductions.enter(parts.leaves.values(), self.micro_batches + 1):
            return parts.undivided("the first reduction of a DistributedDataParallel model must see autograd's order")
        if parts.chain and any(names.changed(frame.call.recording.identities) for frame in parts.frames):
            return parts.undivided("a custom autograd function was changed after forward")
        if not all(segment.frame.is_proven for segment in parts.chain):
            return parts.undivided("no worker has run the backward of one of its custom functions yet")
        return parts

    def _chosen_for_head(self, parts: Parts) -> int:
        """Chooses how many of the next micro-batch's last segments its head computes. Expects a graph like this one."""
        workers = [uploader_of(segment) for segment in reversed(parts.chain)]
        targets = [target for segment in parts.chain for target in {target for _, target in segment.contributions}]
        # A weight of two segments would be used by the head and by the chain, and such a graph is not divided.
        is_divisible = len(targets) == len(set(targets))
        if not workers or None in workers or not is_divisible:
            return 0
        left = [uploader_of(segment) for micro_batch in self._open for segment in list(micro_batch.segments_left)]
        return self._take_last(
            self.micro_batches + 1,
            Counter(worker.name for worker in workers if worker is not None),
            Counter(worker.name for worker in left if worker is not None),
            sum(micro_batch.trainers_segments for micro_batch in self._open),
        )

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
            self._chains.begin_collecting(self._streams)
            self._finish_all()
            self._collect()
            self._check_unchanged(self._fixed.changed())
            self._check_workers()
            self._whole.end()
            self._gradients.deliver(self._reductions, self._fixed.changed)
            self._has_delivered = True  # nothing between these two lines lets Ctrl-C in
            self._fixed.forget()  # an optimizer may step now, if a plain backward completes the gradients
            self._reductions.end(leaves_of(outputs))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Notes that autograd works for the block, and that the block is incomplete if that raises an error."""
        self.is_working, self._has_failed = True, True
        try:
            with _outside_inference_mode():
                yield
        finally:
            self.is_working = False
        self._has_failed = False

    def close(self, *, is_failed: bool) -> None:
        """Ends the block: delivers all gradients, or drops everything if the block has failed."""
        self._has_delivered = False  # a plain backward in the block may have delivered
        try:
            if not is_failed:
                self.flush()
        finally:
            self.is_open = False
            with ExitStack() as cleanup:  # calls all of these, the last one first, even if one fails
                for drop in (self._gradients.drop, self._finished.clear, self._open.clear, self._fixed.end):
                    cleanup.callback(drop)
                cleanup.callback(self._chains.end)
                cleanup.callback(self._reductions.abandon)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Lets no exception leave a block that has delivered its gradients when it was closed (Rule 6)."""
        try:
            yield
        except BaseException as error:
            if not self._has_delivered:
                raise
            if not isinstance(error, Exception):
                error.add_note(f"The gradients of {self.name} have reached .grad: do not run the block again.")
                raise
            log_once(error, f"The gradients of {self.name} are complete. Please report it.")

    def _check_use(self) -> None:
        if not self.is_open:
            raise AccumulationError(f"{self.name} has ended: call backward() inside it")
        if (os.getpid(), threading.get_ident()) != self._thread:
            raise AccumulationError(f"{self.name} belongs to another thread or process: open a block in each")
        if self._has_failed:
            raise AccumulationError(f"{self.name} is incomplete after an error in it: leave the block and run it again")

    def _check_unchanged(self, changed: Tensor | None = None) -> None:
        changed = self._gradients.changed() if changed is None else changed
        if changed is not None:
            raise AccumulationError(
                f"a parameter of shape {list(changed.shape)} was changed inside {self.name}: its values, its hooks, "
                "its .grad or requires_grad. Its micro-batches would be treated differently. Change it after the block"
            )

    def _head(self, loss: Tensor, parts: Parts) -> dict[Target, Tensor]:
        """Differentiates the head. Returns what it contributes to leaves, and to the chain."""
        leaves, stopwatch = parts.leaves.values(), Stopwatch(self._device)
        with without_hooks(leaves), self._reductions.ordering(leaves) if not parts.chain else nullcontext():
            sums = differentiated([loss], None, parts.head, parts)
            if sides := [target for target in parts.sides if target in sums]:
                sums |= differentiated(
                    [GradientEdge(*target) for target in sides],
                    [sums.pop(target) for target in sides],
                    parts.shared,
                    parts,
                )
        head = stopwatch.stop()
        if not self._in_head:
            self._usual_head = head
        elif parts.chain:
            self._times.heads.append((head, self._usual_head))
        return sums

    def _plan(self, parts: Parts) -> None:
        """Notes which leaves get all of their gradient from one segment of the chain, and from which worker."""
        segments_of: dict[Target, set[ChainSegment]] = {}
        for segment in parts.chain:
            targets = {target for _, target in segment.contributions}
            for target in targets:
                segments_of.setdefault(target, set()).add(segment)
            segment_bytes = sum(parts.leaves[target].nbytes for target in targets & parts.leaves.keys())
            self._segment_bytes = max(self._segment_bytes, segment_bytes)
        elsewhere = {*parts.head, *parts.shared, *parts.tail}
        for target, leaf in parts.leaves.items():
            segments = segments_of.get(target, set()) if target not in elsewhere else set()
            uploader = uploader_of(segments.pop()) if len(segments) == 1 else None
            self._gradients.plan(leaf, uploader, self.micro_batches)

    def _finish_all(self) -> None:
        while self._open:
            self._finish_first()

    def _finish_first(self) -> None:
        """Completes the gradients of the first micro-batch that is open."""
        micro_batch = self._open[0]
        stopwatch = Stopwatch(self._device)
        if micro_batch.ended is not None:
            micro_batch.ended.wait()
        waited = stopwatch.stop()
        self._times.waited.add(waited)
        self._log.wait(waited)
        self._recheck(micro_batch)
        parts, sums = micro_batch.parts, micro_batch.sums
        if micro_batch.error is not None:
            if not isinstance(micro_batch.error, RECOVERABLE):
                raise micro_batch.error
            micro_batch.segments_left[0].frame.lost(micro_batch.error)
            self._check_order(micro_batch.error)
            self._collect()
        done = len(parts.chain) - len(micro_batch.segments_left)
        if micro_batch.stored is not None:
            sums |= recovered(micro_batch, done)
            micro_batch.stored = None
        for segment in micro_batch.segments_left:
            gradients = gradients_of(segment, sums.get(segment.target))
            if gradients is not None:
                fold(sums, segment, on_trainer(segment, gradients, micro_batch.state))
        micro_batch.segments_left.clear()
        for segment in parts.chain[:done]:
            segment.frame.release_remote()
        stopwatch = Stopwatch(self._device)
        with under(micro_batch.state):
            self._tail(parts, sums)
        if parts.chain:
            self._times.own.add(stopwatch.stop())
            self.trainers_segments += micro_batch.trainers_segments
        for position, (target, leaf) in enumerate(parts.leaves.items()):
            gradient = sums.get(target)
            if gradient is not None:
                self._gradients.add(leaf, (micro_batch.number, position), gradient)
        self._check_pending()
        sums.clear()
        self._open.pop(0)
        if any(stayed for _, stayed in micro_batch.uncollected):
            self._finished.append(micro_batch)

    def _recheck(self, micro_batch: MicroBatch) -> None:
        """Computes the drawn answers of a micro-batch a second time (Rule 7).

        Raises:
            RecheckError: The gradients of one are wrong.
        """
        for is_repeated in micro_batch.drawn:
            try:
                with under(micro_batch.state):
                    is_repeated()
            except WorkerLostError:  # the worker is out
                self._check_workers()
        micro_batch.drawn.clear()

    def _check_workers(self) -> None:
        """Raises RecheckError if a worker was wrong since the block began."""
        out = {worker: why for one in self._rechecks for worker, why in one.out.items()}
        for worker, why in out.items():
            if worker not in self._out_before:
                raise RecheckError(
                    f"{why}. Other gradients of the same worker have counted in {self.name}. Leave the block, set the "
                    "gradients to None and run it again: the worker gets nothing any more",
                    worker=worker,
                )

    def _check_order(self, error: BackhaulError) -> None:
        """Raises AccumulationError if a backward must run on the trainer, and its place in the order is past."""
        if error.fields.get("function") and len(self._open) > 1:
            raise AccumulationError(
                f"{self.name} can't be finished: {error.message}. In the next block the trainer runs this function in "
                "its place, so run the block again"
            )

    def _check_pending(self) -> None:
        """Counts the pending gradients. Raises AccumulationError if there are more than allowed."""
        pending_bytes = self._gradients.size_bytes
        self.most_pending_bytes = max(self.most_pending_bytes, pending_bytes)
        if 0 < self._allowed_pending_bytes < pending_bytes:
            raise AccumulationError(
                f"{self.name} has {pending_bytes} bytes of pending gradients, but pending_gradient_bytes "
                f"allows {self._allowed_pending_bytes}: "
                "use fewer micro-batches in a block, set gradients to None before it, or remove hooks from parameters"
            )

    def _tail(self, parts: Parts, sums: dict[Target, Tensor]) -> None:
        """Differentiates the tail from the sums that arrive there."""
        roots = [target for target in parts.roots if target in sums]
        if not roots:
            return
        check_functions(parts)
        roots += [target for target in parts.tail if target in sums]
        edges = [GradientEdge(*target) for target in roots]
        with without_hooks(parts.leaves.values()):
            sums |= differentiated(edges, [sums.pop(target) for target in roots], parts.tail, parts)

    def _collect(self) -> None:
        """Fetches the gradients that workers have kept, or computes them again (Rule 4)."""
        lost = self._chains.collect(self._streams)
        keeping = [*self._finished, *self._open]
        if lost:
            self._gradients.stop_keeping()
            sums_again: dict[int, Tensor] = {}
            for micro_batch in sorted(keeping, key=lambda micro_batch: micro_batch.number):
                for parameter, gradient in computed_again(micro_batch, lost):
                    sums_again[id(parameter)] = plus(sums_again.get(id(parameter)), gradient)
            self._gradients.put_first(sums_again)
        for micro_batch in keeping:
            micro_batch.uncollected = [(uploader, {}) for uploader, _ in micro_batch.uncollected]
        self._finished.clear()


def _without_graph(returned: Any) -> Any:
    """Detaches the tensors that a function has returned, also parameters, which would take gradients."""
    return pytree.tree_map_only(Tensor, lambda one: one.detach() if one.requires_grad else one, returned)


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Leaves an inference mode in which the caller ends a block. Autograd can make no graph there."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # leaving the mode turns gradients on
        yield
