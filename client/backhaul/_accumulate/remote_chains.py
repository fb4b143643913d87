"""Workers compute the chains of a block's micro-batches, see NOTE [Deferred]. One thread for each worker asks it."""

import itertools
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from torch import Tensor

from backhaul._accumulate.gradients import PendingGradients
from backhaul._accumulate.graph_parts import ChainSegment, Target
from backhaul._accumulate.micro_batch import (
    MicroBatch,
    Streams,
    fold,
    gradients_of,
    on_streams,
    only_contributions,
    uploader_of,
)
from backhaul._accumulate.serial_thread import SerialThread
from backhaul._backward.recheck import Rechecks
from backhaul._backward.remote_side import StoredGradient
from backhaul._observe.journal import SegmentLog
from backhaul._observe.report import Decision
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_runtime.errors import BackhaulError
from backhaul_runtime.process.latch import Promise

MOST_UPCOMING = 32
"""The number of its next segments that a worker is told, which it replays ahead in this order."""

Sums = list[tuple[Tensor, Tensor]]
"""Parameters with the sums of the gradients that a worker has kept."""


class RemoteChains:
    """The chains that workers compute for a block. Only the block's thread may use it.

    Args:
        gradients: The gradients of the block, which learn what stays on a worker.
        log: The log of the session's blocks.
        unfinished: The micro-batches that the block has not finished, in their order. The block changes this list.
        unseen_rechecks: Which whole micro-batches are rechecked; None if none are.

    Attributes:
        busy_s: Seconds from the request for each segment to its answer, by worker.
    """

    def __init__(
        self,
        gradients: PendingGradients,
        log: SegmentLog,
        unfinished: Sequence[MicroBatch],
        unseen_rechecks: Rechecks | None = None,
    ) -> None:
        self._gradients, self._log, self._unfinished = gradients, log, unfinished
        self._unseen_rechecks = unseen_rechecks
        self._threads: dict[Uploader, SerialThread] = {}
        self._rounds: dict[Uploader, int] = {}  # of the gradients that each worker keeps
        self._last: dict[Uploader, Promise[None]] = {}  # the last part of a chain that each thread was given
        self._collecting: dict[Uploader, Promise[Sums]] = {}
        self._failed: set[Uploader] = set()
        self.busy_s: dict[Uploader, list[float]] = {}

    def submit(self, micro_batch: MicroBatch) -> None:
        """Queues the chain. Each worker's thread gets its parts in the order of the micro-batches (Rule 3)."""
        for uploader, segments in itertools.groupby(micro_batch.parts.chain, uploader_of):
            if uploader is None or uploader in self._failed:
                self._gradients.stop_keeping()
                return
            if uploader not in self._threads:
                try:
                    self._threads[uploader] = SerialThread()
                except RuntimeError:  # the interpreter is shutting down and starts no more threads
                    self._gradients.stop_keeping()
                    return
                self._rounds[uploader] = uploader.uncollected.begin()
            work = partial(self._run, micro_batch, uploader, len(list(segments)), micro_batch.ended)
            micro_batch.ended = self._last[uploader] = self._threads[uploader].submit(work)

    def begin_collecting(self, streams: Streams) -> None:
        """Lets each worker's thread fetch the gradients that its worker has kept, after its last chain.

        Args:
            streams: The streams of the last micro-batch.
        """
        for uploader, thread in self._threads.items():
            self._collecting[uploader] = thread.submit(partial(self._collected, uploader, streams))

    def collect(self, streams: Streams) -> set[Uploader]:
        """Waits for all chains, and fetches the gradients that workers have kept.

        Args:
            streams: The streams of the last micro-batch.

        Returns:
            The uploaders of the workers that are lost with what they had kept.
        """
        lost = set[Uploader]()
        for uploader, last in self._last.items():
            last.wait()  # until the worker's thread is idle
            collecting = self._collecting.pop(uploader, None)
            try:
                sums = self._collected(uploader, streams) if collecting is None else collecting.result()
            except BackhaulError as error:
                lost.add(uploader)
                self._log.fallback(f"a worker was lost with gradients that it had kept: {error.message}")
            else:
                self._gradients.put_first({id(parameter): total for parameter, total in sums})
            self._rounds[uploader] = uploader.uncollected.begin()
        return lost

    def end(self) -> None:
        """Ends the threads, and abandons what workers have kept and nobody has fetched."""
        for uploader in self._threads:
            uploader.uncollected.abandon()
        for thread in self._threads.values():
            thread.end()

    def _collected(self, uploader: Uploader, streams: Streams) -> Sums:
        with on_streams(streams):  # a worker's thread has another one, which nothing would wait for
            return uploader.uncollected.collect(
                self._rounds[uploader], lambda size_bytes: self._log.traffic(down_bytes=size_bytes)
            )

    def _run(self, micro_batch: MicroBatch, uploader: Uploader, segments: int, previous: Promise[None] | None) -> None:
        """Asks a worker for the next segments of a chain. The worker's thread runs it, after the part before it."""
        if previous is not None:
            previous.wait()
        try:
            with on_streams(micro_batch.streams):  # this thread's own stream would not wait for the head
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

    def _ask(self, micro_batch: MicroBatch, segment: ChainSegment, uploader: Uploader) -> None:
        frame = segment.frame
        gradient = micro_batch.stored or micro_batch.sums.get(segment.target)
        gradients: dict[int, Tensor | StoredGradient] | None = gradients_of(segment, gradient)
        if gradients is None:  # no gradient reaches the segment, so none leaves it
            micro_batch.segments_left.pop(0)
            micro_batch.uncollected.append((uploader, {}))
            return
        if isinstance(gradient, Tensor):
            micro_batch.last_gradient = len(micro_batch.uncollected), gradient
        leaves, due = micro_batch.parts.leaves, frame.sources_of_contributions()
        remote = frame.remote
        is_unseen = frame.call.recording.is_unseen
        rechecks = None if remote is None or is_unseen else remote.rechecks
        may_keep = rechecks is None and frame.evidence is None  # else somebody has to see single gradients
        may_stay = {
            due[index]: leaves[target]
            for index, target in segment.contributions
            if may_keep and target in leaves and self._gradients.may_stay(leaves[target], uploader, micro_batch.number)
        }
        following = self._following(micro_batch, segment) if may_keep else None
        summed = only_contributions(micro_batch, segment, due)
        unsent = {due[index] for index, target in segment.contributions if target == following} & summed
        answer = frame.remote_gradients(
            gradients,
            micro_batch.state,
            summed,
            may_stay,
            unsent if len(unsent) == 1 else (),
            self._upcoming(micro_batch, uploader),
            self._rounds[uploader],
        )
        if remote is not None and rechecks is not None and rechecks.draws():
            own = {position: one for position, one in gradients.items() if isinstance(one, Tensor)}
            micro_batch.drawn.append(partial(frame.local_backward.repeats, remote, own, answer.contributions, summed))
        if remote is not None and is_unseen:
            micro_batch.outputs, micro_batch.ended_s = answer.outputs, perf_counter()
            if self._unseen_rechecks is not None and self._unseen_rechecks.draws():
                again = partial(frame.local_backward.repeats_unseen, remote, self._unseen_rechecks)
                micro_batch.drawn.append(partial(again, {0: gradient}, answer.contribution_digests, answer.outputs))
        frame.note_evidence(gradients, micro_batch.state, answer.contributions, summed, remote)
        micro_batch.stored = None  # not before, because `_recovered` must learn that the trainer lacks the gradient
        stayed = {source: may_stay[source] for source in answer.uncollected}
        frame.call.log.add(Decision.GRADIENTS, 0.0)  # nothing waited
        for source, leaf in may_stay.items():
            self._gradients.stayed(leaf, is_uncollected=source in answer.uncollected)
        micro_batch.segments_left.pop(0)
        micro_batch.uncollected.append((uploader, stayed))
        fold(micro_batch.sums, segment, answer.contributions)
        if len(unsent) == 1 and following not in micro_batch.sums:
            micro_batch.stored = answer.stored.get(*unsent)
        # Not only what the execution took: while requests wait for it, the worker also does what surrounds it.
        self.busy_s.setdefault(uploader, []).append(answer.took_s)

    def _upcoming(self, micro_batch: MicroBatch, uploader: Uploader) -> list[int]:
        """Returns the numbers of the segments that a worker is asked for after the next one."""
        _, *rest = micro_batch.segments_left
        later = [other for other in self._unfinished if other.number > micro_batch.number]
        segments = itertools.chain(rest, *(other.segments_left for other in later))
        remotes = (segment.frame.remote for segment in segments if uploader_of(segment) is uploader)
        return [
            remote.number for remote in itertools.islice(remotes, MOST_UPCOMING) if isinstance(remote, SavedSegment)
        ]

    def _following(self, micro_batch: MicroBatch, segment: ChainSegment) -> Target | None:
        """Returns where the gradient of the chain's next segment is summed up, if only the same worker needs it."""
        _, *later = micro_batch.segments_left
        if not later or uploader_of(later[0]) is not uploader_of(segment) or later[0].target in micro_batch.sums:
            return None
        return later[0].target
