"""Decides which work runs before the trainer requests it: replays of segments, and backwards on those replays.

NOTE [Speculation]
1. The engine asks for speculative work only while no request can begin. `Schedule` picks the segment, and evicts the
   replays that are needed later than the new one.
2. When a backward has returned the gradients of a segment's inputs, the segments that produced these inputs will
   probably be asked for a backward from exactly those gradients. `predict_backwards` notes them, and such a backward
   runs as soon as the predecessor has a replay.
3. Speculative work never reports an error: the trainer's request runs again, and raises its own.
4. A speculative execution that takes longer than `LIMIT_S` ends at the next op if a request waits.

The speculator never waits, computes or charges memory. `SegmentEngine` reports what has happened, and carries out the
instructions that are returned.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import time

from backhaul_runtime.program.program import NODE_BYTES
from backhaul_runtime.replay.schedule import Footprint, Schedule
from backhaul_runtime.replay.schedule import Key as ScheduleKey
from backhaul_runtime.tensors.durations import known_s
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.engine.executions import BackwardInputs, ExecutionResult, LiveReplay
from backhaul_server.worker.engine.segment import Segment, SpeculativeBackward
from backhaul_server.worker.engine.segment_machine import Phase

MOST_FOOTPRINTS = 4096
"""The number of kinds of segments whose measured footprints are remembered."""

LIMIT_S = 10.0
"""A speculative execution is cancelled after this many seconds if a request waits."""

SHORT_S = 0.001
"""Speculative backwards run as one job if the replays of all but the first took at most this many seconds together.

A turn of the event loop between them, and a pushed message for each, would take about as long as such a backward does.
Longer backwards run one by one, because a shared job would delay the push of the first result.
"""


@dataclass(frozen=True, slots=True)
class Speculate:
    """Instruction: replay a segment now or, if it has a replay, run its predicted backward.

    Attributes:
        segment: The segment to work on.
        evicts: The segments whose replays have to be evicted first.
    """

    segment: Segment
    evicts: Sequence[ScheduleKey]


@dataclass(frozen=True, slots=True)
class Keep:
    """Instruction: the speculative work on a segment has ended. Keep what it left until a request takes it.

    Attributes:
        segment: The segment that was worked on. It may have been released meanwhile.
        held_bytes: The bytes that the work has left; None if it has left nothing.
        is_done: Whether they are the result of a backward rather than a replay.
    """

    segment: Segment
    held_bytes: int | None
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class ReplayAgain:
    """Instruction: replay a segment once more, because its replay drew from other generator states than its call."""

    segment: Segment


class Speculator:
    """Chooses the speculative work of all sessions. Event loop only.

    Args:
        schedule: Decides which segment is worked on next.

    Attributes:
        segments: All segments of the worker that are not released.
        hits: Number of requests that a speculative backward answered.
        misses: Number of speculative backwards that ran on other inputs than the request's, and of mispredicted calls.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.segments: dict[ScheduleKey, Segment] = {}
        self.hits = 0
        self.misses = 0
        self._schedule = schedule
        self._by_kind: dict[Hashable, dict[ScheduleKey, Segment]] = {}
        self._footprints: OrderedDict[Hashable, Footprint] = OrderedDict()

    def add(self, segment: Segment, need_bytes: int, source_bytes: int) -> None:
        """Registers a saved segment. Call `expect` next if the trainer will request it.

        Args:
            segment: The segment, with its inputs.
            need_bytes: Upper bound of the bytes that its execution takes, from its program.
            source_bytes: Bytes of the tensors that no other segment names.
        """
        assert segment.inputs is not None
        unknown = Footprint(need_bytes, need_bytes, need_bytes)
        segment.footprint = self._footprints.get(segment.inputs.kind, unknown)
        self.segments[segment.key] = segment
        self._by_kind.setdefault(segment.inputs.kind, {})[segment.key] = segment
        self._schedule.saved(segment.key, segment.footprint, source_bytes)

    def remove(self, segment: Segment) -> None:
        """Forgets a segment that is being released and still has its inputs."""
        assert segment.inputs is not None
        same_kind = self._by_kind[segment.inputs.kind]
        del same_kind[segment.key]
        if not same_kind:
            del self._by_kind[segment.inputs.kind]
        self._schedule.released(segment.key)
        del self.segments[segment.key]

    def expect(self, segment: Segment) -> bool:
        """Notes that the trainer will request a segment, perhaps once more. It is replayed as far as memory allows.

        Returns whether there may be work now.
        """
        if segment.machine.phase is not Phase.SAVED:
            return False
        segment.queued_at_s = time()
        self._schedule.expected(segment.key)
        return True

    def next(self, room_bytes: int) -> Speculate | None:
        """Returns the work to begin now; None if there is none.

        Args:
            room_bytes: The bytes that all replays may hold together, those that are ready included.
        """
        work = self._schedule.next(room_bytes)
        return None if work is None else Speculate(self.segments[work.key], work.evicts)

    def is_measured(self, segment: Segment) -> bool:
        """Whether the footprint of the segment's kind was measured by a replay."""
        return segment.inputs is not None and segment.inputs.kind in self._footprints

    def replayed(self, segment: Segment, made: LiveReplay | None) -> Sequence[Keep | ReplayAgain]:
        """Reports the end of a replay. `made` is None if it failed."""
        # The call may have been confirmed while its predicted replay ran, with other generator states.
        is_mispredicted = made is not None and not segment.matches_recorded_rng(made)
        if made is None or is_mispredicted or segment.inputs is None:
            segment.speculation = None
            nothing = Keep(segment, None)
            if not is_mispredicted:
                return [nothing]
            self.mispredicted(segment)
            return [nothing, ReplayAgain(segment)]
        segment.ready = made
        if made.replay.footprint is not None:
            nodes_bytes = NODE_BYTES * len(segment.inputs.program.nodes)
            self._measured(segment.inputs.kind, made.replay.footprint.beside(nodes_bytes))
        return [Keep(segment, segment.footprint.ready_bytes)]

    def ran_backwards(self, chain: Sequence[Segment], made: Sequence[SpeculativeBackward]) -> Sequence[Keep]:
        """Reports the end of the backwards of a segment and of predecessors. `made` has those that did not fail."""
        return [_left_by_backward(segment, speculation) for segment, speculation in zip_longest(chain, made)]

    def take(self, segment: Segment, inputs: BackwardInputs | None) -> ExecutionResult | None:
        """Takes the speculative backward of a segment that is requested, and counts a hit or a miss.

        Args:
            segment: The segment. Its prediction is forgotten.
            inputs: What the request's backward starts from; None for a recompute.

        Returns:
            The result, if a backward has run that started from exactly these inputs.
        """
        speculation, segment.speculation = segment.speculation, None
        if speculation is None or speculation.result is None:
            return None
        if speculation.inputs != inputs:
            self.misses += 1
            return None
        self.hits += 1
        return speculation.result

    def mispredicted(self, segment: Segment) -> None:
        """Counts a predicted replay that drew from other generator states than the call did."""
        self.misses += 1
        segment.session.note_misprediction(segment.addresses[0])

    def predict_backwards(self, segment: Segment, result: ExecutionResult, inputs: BackwardInputs) -> None:
        """Notes which backwards of the segment's predecessors will probably be requested next (Rule 2)."""
        for predecessor, speculation in predictions(segment, result, inputs):
            predecessor.speculation = speculation
            self._schedule.backward_predicted(predecessor.key)

    def forget_ready(self, segment: Segment) -> None:
        """Forgets the replay that is ready, and the speculative backward that ran on it."""
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


def _left_by_backward(segment: Segment, made: SpeculativeBackward | None) -> Keep:
    segment.speculation = made
    if segment.inputs is None:  # it was released during the job
        segment.ready = segment.speculation = None
        return Keep(segment, None)
    if made is not None and made.result is not None:
        return Keep(segment, made.result.live_bytes(segment.inputs.sources), is_done=True)
    return Keep(segment, segment.footprint.ready_bytes if segment.ready is not None else None)


def short_predecessors(segment: Segment) -> Iterator[Segment]:
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


def predictions(
    segment: Segment, result: ExecutionResult, inputs: BackwardInputs
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
