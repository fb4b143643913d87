"""Speculative work: replays of segments, and backwards on those replays, that run before the trainer requests them.

NOTE [Speculation]
1. The executor asks for speculative work only while no request can begin. `Schedule` picks the segment, and evicts the
   replays that are needed later than the new one.
2. When a backward has returned the gradients of a segment's inputs, the segments that produced these inputs will
   probably be asked for a backward from exactly those gradients. `predict_backwards` notes them, and the executor runs
   that backward as soon as the predecessor has a replay.
3. Speculative work never reports an error: the trainer's request runs again, and raises its own.
4. A speculative run that takes longer than `LIMIT_S` ends at the next op if a request waits.

Runs in the event loop's thread, except each job's `work`, which the executor's thread runs.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from time import monotonic, time

from backhaul_runtime.program.program import NODE_BYTES
from backhaul_runtime.replay.schedule import Footprint, Schedule
from backhaul_runtime.replay.schedule import Key as ScheduleKey
from backhaul_runtime.tensors.durations import known_s, wait_s
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.engine import segment_runs
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.fair_queue import Job, job_of
from backhaul_server.worker.engine.segment import Segment, SpeculativeBackward
from backhaul_server.worker.engine.segment_machine import Instruction, Phase
from backhaul_server.worker.engine.segment_runs import BackwardInputs, LiveReplay, RunResult
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue

logger = logging.getLogger("backhaul.worker")

MOST_FOOTPRINTS = 4096
"""The number of kinds of segments whose measured footprints are remembered."""

LIMIT_S = 10.0
"""A speculative run is cancelled after this many seconds if a request waits."""

SHORT_S = 0.001
"""Speculative backwards run as one job if the replays of all but the first took at most this many seconds together.

A turn of the event loop between them, and a pushed message for each, would take about as long as such a backward does.
Longer backwards run one by one, because a shared job would delay the push of the first result.
"""


class Speculator:
    """Runs replays and backwards before they are requested. Event loop only.

    Args:
        store: The worker's memory accounts.
        schedule: Decides which segment is worked on next.
        carry_out: Carries out the instructions of a segment's machine.
        executor: The thread that runs all programs. It asks for speculative work when no request can begin.

    Attributes:
        segments: All segments of the worker that are not released.
        hits: Number of requests that a speculative backward answered.
        misses: Number of speculative backwards that ran on other inputs than the request's, and of mispredicted calls.
    """

    def __init__(
        self,
        store: Store[StoredValue],
        schedule: Schedule,
        carry_out: Callable[[Segment, Sequence[Instruction]], None],
        executor: Executor,
    ) -> None:
        self.segments: dict[ScheduleKey, Segment] = {}
        self.hits = 0
        self.misses = 0
        self._store = store
        self._schedule = schedule
        self._carry_out = carry_out
        self._executor = executor
        self._by_kind: dict[Hashable, dict[ScheduleKey, Segment]] = {}
        self._footprints: OrderedDict[Hashable, Footprint] = OrderedDict()

    def add(self, segment: Segment, need_bytes: int, source_bytes: int) -> None:
        """Registers a saved segment. Call `schedule_replay` next if the trainer will request it.

        Args:
            segment: A segment that is attached to the store.
            need_bytes: Upper bound of the bytes that its run takes, from its program.
            source_bytes: Bytes of the tensors that no other segment names.
        """
        assert segment.inputs is not None
        unknown = Footprint(need_bytes, need_bytes, need_bytes)
        segment.footprint = self._footprints.get(segment.inputs.kind, unknown)
        self.segments[segment.key] = segment
        self._by_kind.setdefault(segment.inputs.kind, {})[segment.key] = segment
        self._schedule.saved(segment.key, segment.footprint, source_bytes)

    def remove(self, segment: Segment) -> None:
        """Forgets a segment that is being released, and frees what its speculative work left."""
        kind = segment.inputs.kind if segment.inputs is not None else None
        for derivation in segment.inputs.derivations if segment.inputs is not None else ():
            if derivation.origin.inputs is not None:
                derivation.origin.inputs.successors.remove(derivation)
        # A job of the segment may still wait in the queue or run. It must find no inputs, and must not keep them alive.
        segment.inputs = segment.speculation = None
        same_kind = self._by_kind[kind]
        del same_kind[segment.key]
        if not same_kind:
            del self._by_kind[kind]
        self._store.free_ready(segment.key)
        self._schedule.released(segment.key)
        del self.segments[segment.key]

    def schedule_replay(self, segment: Segment) -> None:
        """Notes that the trainer will request a segment, perhaps once more. It is replayed as far as memory allows."""
        if segment.machine.phase is Phase.SAVED:
            segment.queued_at_s = time()
            self._schedule.expected(segment.key)
            self._executor.wake()

    def drop_replay(self, segment: Segment) -> None:
        """Frees the replay that is ready, and the speculative backward that ran on it."""
        self._store.free_ready(segment.key)
        self._forget_ready(segment)

    def mispredicted(self, segment: Segment) -> None:
        """Counts a predicted replay that drew from other generator states than the call did."""
        self.misses += 1
        segment.session.note_misprediction(segment.addresses[0])

    def predict_backwards(self, segment: Segment, result: RunResult, inputs: BackwardInputs) -> None:
        """Notes which backwards of the segment's predecessors will probably be requested next (Rule 2)."""
        for predecessor, speculation in _predictions(segment, result, inputs):
            predecessor.speculation = speculation
            self._schedule.backward_predicted(predecessor.key)

    def start_run(self, segment: Segment, most_bytes: int) -> int | None:
        """Charges a run that begins now. Returns the charged bytes, or None if an answer has to be sent first."""
        return self._store.start_run(segment.key, most_bytes, lambda: self._schedule.started(segment.key))

    def _start_speculative(self, segment: Segment, most_bytes: int) -> int:
        """Charges a speculative run. The caller has found room for it in the same turn of the event loop."""
        charged = self.start_run(segment, most_bytes)
        # Else the replay would stay evictable while it runs, and `dropped` is illegal then.
        assert charged is not None, "the schedule promised room that the store does not have"
        return charged

    def replay(self, segment: Segment) -> Job:
        """Returns a job that replays a segment. Its memory is charged already."""
        charged = self._start_speculative(segment, segment.footprint.replay_bytes)
        made: list[LiveReplay] = []
        is_measured = segment.inputs is not None and segment.inputs.kind not in self._footprints
        must_yield = self._must_yield()

        def work() -> None:
            inputs = segment.inputs
            segment.bounds.begin(charged, must_yield)
            try:
                if inputs is not None:
                    ready = inputs.replay(keep_saved=not inputs.program.outputs, is_measured=is_measured)
                    # Otherwise replays would queue up on an accelerator, and a request would run after all of them.
                    wait_s(ready.took)
                    made.append(ready)
            except Exception:  # Rule 3
                logger.debug("A speculative replay failed.", exc_info=True, extra=segment.about)

        def end() -> None:
            segment.job = None  # the job refers to the segment: the cycle would keep both alive
            self._store.end_run(charged)
            # The call may have been confirmed while its predicted replay ran, with other generator states.
            is_mispredicted = bool(made) and not segment.matches_recorded_rng(made[0])
            if made and not is_mispredicted and segment.inputs is not None:
                segment.ready = made.pop()
                if segment.ready.replay.footprint is not None:
                    nodes_bytes = NODE_BYTES * len(segment.inputs.program.nodes)
                    self._measured(segment.inputs.kind, segment.ready.replay.footprint.beside(nodes_bytes))
            else:
                segment.speculation = None
            self._ended(segment, segment.footprint.ready_bytes if segment.ready is not None else None)
            if is_mispredicted:
                self.mispredicted(segment)
                self.schedule_replay(segment)

        return job_of(segment.session, lambda: True, work, end, name=segment.name)

    def run_backward(self, segment: Segment) -> Job:
        """Returns a job that runs a speculative backward, and those that follow from it while they are short."""
        chain, charged = [segment], [self._start_speculative(segment, segment.footprint.run_bytes)]
        for predecessor in _short_predecessors(segment):
            if not self._store.has_room(predecessor.footprint.run_bytes):
                break
            predecessor.machine.speculate()
            chain.append(predecessor)
            charged.append(self._start_speculative(predecessor, predecessor.footprint.run_bytes))
        made: list[SpeculativeBackward] = []
        must_yield = self._must_yield()

        def work() -> None:
            speculation = segment.speculation
            try:
                for member, charge in zip(chain, charged, strict=True):
                    (ready, member.ready), inputs = (member.ready, None), member.inputs
                    # The event loop may have released the member, or the backward before it returned no gradient.
                    if inputs is None or ready is None or speculation is None:
                        member.ready = ready
                        break
                    member.bounds.begin(charge, must_yield)
                    backward, gradients = speculation.inputs, speculation.gradients
                    result = segment_runs.backward(inputs, ready, backward, gradients, member.chained)
                    made.append(replace(speculation, result=result))
                    speculation = next((following for _, following in _predictions(member, result, backward)), None)
            except Exception:  # Rule 3
                logger.debug("A speculative backward of %s failed.", chain[len(made)].name, exc_info=True)

        def end() -> None:
            for member, charge, speculation in zip_longest(chain, charged, made):
                member.job = None  # the job refers to the segment: the cycle would keep both alive
                self._store.end_run(charge)
                if member.inputs is None:  # the segment was released during the job
                    member.ready = None
                    member.machine.replayed(succeeded=False)
                    continue
                member.speculation = speculation
                held_bytes = None if member.ready is None else member.footprint.ready_bytes
                if speculation is not None and speculation.result is not None:
                    held_bytes = speculation.result.kept_bytes(member.inputs.sources)
                self._ended(member, held_bytes, is_done=speculation is not None)
            # Not in the loop above: it would overwrite the prediction for the next member of the chain.
            for member, speculation in zip(chain, made, strict=False):
                if member.inputs is not None and speculation.result is not None:
                    self.predict_backwards(member, speculation.result, speculation.inputs)
                    member.session.push(member)

        job = job_of(segment.session, lambda: True, work, end, name=segment.name)
        for member in chain:
            member.job = job
        return job

    def next_job(self) -> Job | None:
        """Returns the speculative job to run now, with its memory charged; None if there is none."""
        step = self._schedule.next(self._store.room_for_replays())
        if step is None:
            return None
        for key in step.evicts:
            self._store.drop_ready(key)
        segment = self.segments[step.key]
        machine = segment.machine
        self._carry_out(segment, machine.speculate() if machine.phase is Phase.READY else machine.replay_ahead())
        return segment.job

    def _must_yield(self) -> Callable[[], bool]:
        """Returns a function that says whether a run that begins now must end because a request waits (Rule 4)."""
        executor, until_s = self._executor, monotonic() + LIMIT_S
        return lambda: executor.has_waiting and monotonic() > until_s

    def _ended(self, segment: Segment, held_bytes: int | None, *, is_done: bool = False) -> None:
        """Charges the bytes that speculative work left ready; None if it left nothing."""

        def drop() -> None:
            segment.machine.dropped()
            self._forget_ready(segment)

        if held_bytes is not None:
            self._store.keep_ready(segment.key, held_bytes, drop)
            self._schedule.ready(segment.key, held_bytes, is_done=is_done)
        elif segment.inputs is not None:
            self._schedule.abandoned(segment.key)
        self._carry_out(segment, segment.machine.replayed(succeeded=held_bytes is not None))

    def _forget_ready(self, segment: Segment) -> None:
        segment.ready = segment.speculation = None
        self._schedule.dropped(segment.key)

    def _measured(self, kind: Hashable, footprint: Footprint) -> None:
        """Notes the measured footprint of all segments of a kind."""
        self._footprints[kind] = footprint
        while len(self._footprints) > MOST_FOOTPRINTS:
            self._footprints.popitem(last=False)
        for segment in self._by_kind.get(kind, {}).values():
            segment.footprint = footprint
            self._schedule.measured(segment.key, footprint)


def _short_predecessors(segment: Segment) -> Iterator[Segment]:
    """Yields the chain of predecessors whose backwards can run in the same job, see `SHORT_S`."""
    left_s = SHORT_S
    while len(predecessors := segment.saved_predecessors()) == 1:
        (segment,) = predecessors
        ready = segment.ready if segment.machine.phase is Phase.READY and segment.can_speculate else None
        took_s = None if ready is None else known_s(ready.took)
        if took_s is None or took_s > left_s:
            return
        left_s -= took_s
        yield segment


def _predictions(
    segment: Segment, result: RunResult, inputs: BackwardInputs
) -> Iterator[tuple[Segment, SpeculativeBackward]]:
    """Yields the predecessors with the backward each will probably be asked for: from the returned gradients."""
    by_predecessor: dict[int, dict[int, OutgoingTensor]] = {}
    for source, outgoing in result.chained.items():
        number, output = segment.predecessors[source]
        by_predecessor.setdefault(number, {})[output] = outgoing
    for predecessor in segment.saved_predecessors():
        if predecessor.can_speculate and (outgoing_tensors := by_predecessor.get(predecessor.id)):
            addresses = tuple(sorted((output, outgoing.address) for output, outgoing in outgoing_tensors.items()))
            # A trainer that wanted sums just now probably wants them here too.
            summed = tuple(sorted(predecessor.predecessors)) if inputs.summed else ()
            yield (
                predecessor,
                SpeculativeBackward(
                    BackwardInputs(addresses, inputs.state, inputs.wants_digests, summed),
                    {output: outgoing.tensor for output, outgoing in outgoing_tensors.items()},
                ),
            )
