"""Requests for segments: the state machine of each segment decides, and the engine carries out its instructions.

Runs in the event loop's thread, except each job's `work`, which the executor's thread runs.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import monotonic, time

from backhaul_runtime.errors import BackhaulError, SegmentUnknownError, WorkerError
from backhaul_runtime.replay.schedule import Schedule
from backhaul_server.worker.engine.executions import (
    PART_BYTES,
    BackwardInputs,
    ExecutionResult,
    LiveReplay,
    SegmentInputs,
)
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.fair_queue import Job, job_of
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep, GradientSums
from backhaul_server.worker.engine.segment import Operation, Segment, SegmentRequest, SessionState
from backhaul_server.worker.engine.segment_machine import (
    Answer,
    AnswerError,
    DropReplay,
    Execute,
    ForgetResult,
    Free,
    Instruction,
    Key,
    Phase,
    ReplayAhead,
    SpeculateBackward,
)
from backhaul_server.worker.engine.speculation import LIMIT_S, Keep, ReplayAgain, Speculator, short_predecessors
from backhaul_server.worker.engine.speculative_executions import SpeculativeBackwards, SpeculativeReplay
from backhaul_server.worker.engine.store import ENTRY_BYTES, Store
from backhaul_server.worker.engine.stored_values import StoredValue
from backhaul_server.worker.limits import ALL_REQUESTS, REQUESTS

logger = logging.getLogger("backhaul.worker")

MAX_CACHED_GRADIENTS = 8
"""The number of gradients per session that are cached for the next requests."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an engine so far, and what waits for it.

    Attributes:
        recomputed: Number of requests that were answered with a result.
        hits: Number of those that a speculative backward answered.
        misses: Number of speculative backwards that ran on other inputs than the request's, and of mispredicted calls.
        jobs: Number of jobs that wait or run.
        busy_s: Seconds that jobs have run since the start, with the one that runs now.
    """

    recomputed: int
    hits: int
    misses: int
    jobs: int
    busy_s: float


class SegmentEngine:
    """Runs the segments of all sessions on one device, and keeps their results until they were sent.

    Args:
        store: The worker's memory accounts, and the tensors and programs that segments name.
        schedule: Decides which segments are replayed before they are requested.
        execution_limit_s: Seconds that an execution may take.
        overdue: The callback of `Executor` for a job that cannot be stopped.
    """

    def __init__(
        self,
        store: Store[StoredValue],
        schedule: Schedule,
        execution_limit_s: float,
        overdue: Callable[[Job], None],
    ) -> None:
        self._executor = Executor(self._next_job, overdue, execution_limit_s)
        self._speculator = Speculator(schedule)
        self._recomputed = 0
        self._execution_limit_s = execution_limit_s
        self._requests = 0
        self._store = store
        self._schedule = schedule
        self._sums: dict[str, GradientSums] = {}

    async def close(self) -> None:
        """Waits until the running job has ended, and drops the others."""
        await self._executor.close()

    @property
    def executor(self) -> Executor:
        """The thread that runs the segments' programs."""
        return self._executor

    def look_for_work(self) -> None:
        """Begins a job that may have waited for memory, in the next turn of the event loop."""
        self._executor.wake()

    def add(self, segment: Segment, need_bytes: int, source_bytes: int, *, is_expected: bool) -> None:
        """Adds a segment that was saved.

        Args:
            segment: A segment that is attached to the store.
            need_bytes: Upper bound of the bytes that its execution takes, from its program.
            source_bytes: Bytes of the tensors that no other segment names.
            is_expected: Whether the trainer will request it, so that a replay is of use.
        """
        self._speculator.add(segment, need_bytes, source_bytes)
        if is_expected:
            self._expect(segment)

    def _expect(self, segment: Segment) -> None:
        if self._speculator.expect(segment):
            self._executor.wake()

    def reject(self, segment: Segment) -> None:
        """Frees a predicted segment whose call was another one."""
        self._speculator.misses += 1
        self.release(segment)

    def confirm(
        self, segment: Segment, generator_states: Sequence[bytes], predecessors: Mapping[int, tuple[int, int]]
    ) -> None:
        """Confirms a predicted segment: its call has ended, with the predicted program and sources.

        Args:
            segment: A segment that is not confirmed.
            generator_states: The states that the call drew from, one for each node that draws.
            predecessors: The field of `Segment`, as the call has recorded it.
        """
        assert segment.inputs is not None
        segment.inputs = replace(segment.inputs, generator_states=generator_states)
        segment.predecessors, segment.is_confirmed = predecessors, True
        if segment.ready is not None and not segment.matches_recorded_rng(segment.ready):
            self._speculator.mispredicted(segment)
            segment.machine.dropped()
            self._drop_replay(segment)
        self._expect(segment)

    def announced(self, session: SessionState, segment_ids: Sequence[int]) -> None:
        """Schedules replays of the segments that the trainer will request next, in order. Ignores unknown segments."""
        self._schedule.announced(session.id, segment_ids)
        for segment in filter(None, map(session.segments.get, segment_ids)):
            self._expect(segment)

    def release(self, segment: Segment) -> None:
        """Frees a segment. An execution that is in progress ends at its next op."""
        # A trainer that releases a segment whose result was pushed has used that result instead of a request.
        if segment.speculation is not None and segment.speculation.was_pushed:
            self._speculator.hits += 1
            self._recomputed += 1
        self._carry_out(segment, segment.machine.released())
        self._executor.wake()

    def __len__(self) -> int:
        return len(self._speculator.segments)

    def close_session(self, session: SessionState) -> None:
        """Forgets a session whose segments were released, with its gradient sums."""
        self._schedule.closed(session.id)
        sums = self._sums.pop(session.id, None)
        if sums is not None:
            sums.close()

    def sums(self, session: SessionState) -> GradientSums:
        """Returns the gradients that the worker has added up for a session's trainer."""
        sums = self._sums.get(session.id)
        if sums is None:
            sums = self._sums[session.id] = GradientSums(session, self._store, self._executor)
        return sums

    @property
    def is_busy(self) -> bool:
        """Whether a job runs or waits, or gradient sums exist that their trainer has not collected and would lose."""
        return len(self._executor) > 0 or any(sums.are_awaited for sums in self._sums.values())

    @property
    def work(self) -> Work:
        """What the engine has done and has to do."""
        counts = self._speculator
        return Work(self._recomputed, counts.hits, counts.misses, len(self._executor), self._executor.busy_s)

    def request(
        self,
        segment: Segment,
        key: Key,
        prepare: Callable[[], Operation],
        expected_s: float,
        backward_inputs: BackwardInputs | None = None,
        keep: GradientsToKeep | None = None,
        unsent: Sequence[int] = (),
    ) -> SegmentRequest:
        """Requests work on a segment. A repeated request joins the first one, or finds its result.

        Args:
            segment: A segment that is confirmed.
            key: Names the request within the segment.
            prepare: Returns the work; called only for a new request.
            expected_s: Seconds that the trainer expects the execution to take.
            backward_inputs: The inputs of a backward; None for a recompute.
            keep: The gradients that a backward may keep on the worker; None to send them all.
            unsent: The field of `SegmentRequest`.

        Raises:
            LimitError: Too many requests of the session, of its credential or of all sessions have no answer yet.
        """
        request = segment.requests.get(key)
        if request is None:
            segment.session.account.check_requests()
            REQUESTS.check(segment.session.requests + 1)
            ALL_REQUESTS.check(self._requests + 1)
            expected_s = expected_s if 0 <= expected_s <= self._execution_limit_s else self._execution_limit_s
            answer = asyncio.get_running_loop().create_future()
            request = SegmentRequest(prepare(), backward_inputs, keep, unsent, expected_s, time(), answer)
            segment.requests[key] = request
            segment.session.requests += 1
            segment.session.account.requests += 1
            self._requests += 1
            if segment.inputs is not None:
                self._schedule.requested(segment.key)
        self._carry_out(segment, segment.machine.requested(key))
        return request

    def progress(self, segment: Segment) -> tuple[bool, float]:
        """Returns whether the segment's job runs, and else the expected seconds of work queued before it."""
        return self._executor.position(segment.job)

    def keep_gradients(self, session: SessionState, addresses: Iterable[bytes]) -> None:
        """Keeps cached gradients for the session's next requests, and frees all but the last `MAX_CACHED_GRADIENTS`."""
        for address in addresses:
            session.gradients[address] = None
            session.gradients.move_to_end(address)
        while len(session.gradients) > MAX_CACHED_GRADIENTS:
            oldest, _ = session.gradients.popitem(last=False)
            self._store.disown(session, [oldest])

    def take_pushed(
        self, segment: Segment, most_bytes: int, most_parts: int
    ) -> tuple[BackwardInputs, ExecutionResult] | None:
        """Returns the speculative backward of a segment to push to its trainer, and notes that it was pushed.

        Returns:
            The inputs and the result; None if the backward is gone, or has more bytes or parts than allowed.
        """
        speculation = segment.speculation
        if speculation is None or speculation.result is None or speculation.result.parts > most_parts:
            return None
        if speculation.result.bundle.size_bytes > most_bytes:
            return None
        segment.speculation = replace(speculation, was_pushed=True)
        self._cache_gradients(segment.session, speculation.result)
        return speculation.inputs, speculation.result

    def _carry_out(self, segment: Segment, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    self._replay(segment)
                case SpeculateBackward():
                    self._run_backwards(segment)
                case Execute(key):
                    self._run(segment, key)
                case Answer():
                    pass  # `_done` has resolved the future already
                case AnswerError(key):
                    self._fail(segment, key, _released(segment))
                case DropReplay():
                    self._drop_replay(segment)
                case ForgetResult(key):
                    self._store.forget_result((segment.key, key))
                    segment.requests.pop(key, None)
                case Free():
                    self._free(segment)

    def _free(self, segment: Segment) -> None:
        segment.bounds.set(_released(segment))
        self._speculator.remove(segment)
        for derivation in segment.inputs.derivations if segment.inputs is not None else ():
            if derivation.origin.inputs is not None:
                derivation.origin.inputs.successors.remove(derivation)
        # A job of the segment may still wait in the queue or run. It must find no inputs, and must not keep them alive.
        segment.inputs = segment.speculation = None
        self._store.free_ready(segment.key)
        self._store.detach(segment.key)
        self.sums(segment.session).released(segment.id)
        if segment.session.segments.pop(segment.id, None) is not None:
            segment.session.named_sources -= len(segment.addresses) - 1

    def _cache_gradients(self, session: SessionState, result: ExecutionResult) -> None:
        """Caches the gradients that the trainer may name from now on, because the result told it their addresses."""
        if session.is_closed:
            return
        addressed = [outgoing for outgoing in (*result.bundle.tensors, *result.chained.values()) if outgoing.address]
        for outgoing in addressed:
            storage_bytes = outgoing.tensor.untyped_storage().nbytes()  # the tensor may be a view of a part of it
            self._store.cache(session, outgoing.address, outgoing.tensor, ENTRY_BYTES + storage_bytes)
        self.keep_gradients(session, [outgoing.address for outgoing in addressed])

    def _run(self, segment: Segment, key: Key) -> None:
        request = segment.requests[key]
        speculative = self._speculator.take(segment, request.backward_inputs)
        if speculative is not None:
            request.perform = None
            self._store.free_ready(segment.key)
            self._schedule.started(segment.key)
            self._done(segment, key, request, speculative)
            self._carry_out(segment, segment.machine.ran(key, succeeded=True))
            return
        outcome: list[ExecutionResult | BackhaulError] = []
        charged: list[int] = []

        def begin() -> bool:
            charged_bytes = self._start_execution(segment, segment.execution_bytes)
            if charged_bytes is not None:
                charged.append(charged_bytes)
            return charged_bytes is not None

        def work() -> None:
            ready, segment.ready = segment.ready, None
            perform, request.perform = request.perform, None
            inputs = segment.inputs
            segment.bounds.begin(charged[0])
            if perform is None or inputs is None:  # the segment was released while the job waited
                outcome.append(_released(segment))
            else:
                outcome.append(_outcome(segment, perform, inputs, ready))

        def end() -> None:
            segment.job = None  # the job refers to the segment: the cycle would keep both alive
            self._store.end_execution(charged.pop())
            result = outcome.pop()
            if isinstance(result, ExecutionResult):
                self._done(segment, key, request, result)
            else:
                self._fail(segment, key, result)
            self._carry_out(segment, segment.machine.ran(key, succeeded=isinstance(result, ExecutionResult)))
            if isinstance(result, ExecutionResult) and request.backward_inputs is not None:
                self._speculator.predict_backwards(segment, result, request.backward_inputs)

        segment.job = job_of(segment.session, begin, work, end, request.expected_s, segment.name)
        self._executor.submit(segment.job)

    def _start_execution(self, segment: Segment, most_bytes: int) -> int | None:
        """Charges an execution that begins. Returns the charged bytes, or None if an answer has to be sent first."""
        return self._store.start_execution(segment.key, most_bytes, lambda: self._schedule.started(segment.key))

    # Speculative work

    def _next_job(self) -> Job | None:
        """Returns the speculative job to run now, with its memory charged; None if there is none."""
        step = self._speculator.next(self._store.room_for_replays())
        if step is None:
            return None
        for evicted in step.evicts:
            self._store.drop_ready(evicted)
        machine = step.segment.machine
        instructions = machine.speculate() if machine.phase is Phase.READY else machine.replay_ahead()
        self._carry_out(step.segment, instructions)
        return step.segment.job

    def _start_speculative(self, segment: Segment, most_bytes: int) -> int:
        """Charges a speculative execution. The caller has found room for it in the same turn of the event loop."""
        charged = self._start_execution(segment, most_bytes)
        # Else the replay would stay evictable while it runs, and `dropped` is illegal then.
        assert charged is not None, "the schedule promised room that the store does not have"
        return charged

    def _replay(self, segment: Segment) -> None:
        charged = self._start_speculative(segment, segment.footprint.replay_bytes)
        is_measured = not self._speculator.is_measured(segment)
        execution = SpeculativeReplay(segment, charged, self._must_yield(), is_measured=is_measured)

        def end() -> None:
            segment.job = None  # the job refers to the segment: the cycle would keep both alive
            self._store.end_execution(charged)
            for instruction in self._speculator.replayed(segment, execution.take()):
                match instruction:
                    case Keep():
                        self._keep(instruction)
                    case ReplayAgain():
                        self._expect(segment)

        segment.job = job_of(segment.session, lambda: True, execution.work, end, name=segment.name)

    def _run_backwards(self, segment: Segment) -> None:
        """Makes the job of a segment that has a replay, and of those predecessors whose backwards are short."""
        chain, charged = [segment], [self._start_speculative(segment, segment.footprint.execution_bytes)]
        for predecessor in short_predecessors(segment):
            if not self._store.has_room(predecessor.footprint.execution_bytes):
                break
            predecessor.machine.speculate()
            chain.append(predecessor)
            charged.append(self._start_speculative(predecessor, predecessor.footprint.execution_bytes))
        execution = SpeculativeBackwards(chain, charged, self._must_yield())

        def end() -> None:
            for member, charged_bytes in zip(chain, charged, strict=True):
                member.job = None  # the job refers to the segment: the cycle would keep both alive
                self._store.end_execution(charged_bytes)
            for instruction in self._speculator.ran_backwards(chain, execution.made):
                self._keep(instruction)
            # Not before all are kept, which would overwrite the prediction for the next member of the chain.
            for member, speculation in zip(chain, execution.made, strict=False):
                if member.inputs is not None and speculation.result is not None:
                    self._speculator.predict_backwards(member, speculation.result, speculation.inputs)
                    member.session.push(member)

        job = job_of(segment.session, lambda: True, execution.work, end, name=segment.name)
        for member in chain:
            member.job = job

    def _must_yield(self) -> Callable[[], bool]:
        """Returns a function that says whether an execution that begins now must end because a request waits."""
        executor, until_s = self._executor, monotonic() + LIMIT_S
        return lambda: executor.has_waiting and monotonic() > until_s

    def _keep(self, left: Keep) -> None:
        """Charges what speculative work has left, and goes on with requests that waited for its end."""
        segment = left.segment

        def drop() -> None:
            segment.machine.dropped()
            self._speculator.forget_ready(segment)

        if left.held_bytes is not None:
            self._store.keep_ready(segment.key, left.held_bytes, drop)
            self._schedule.ready(segment.key, left.held_bytes, is_done=left.is_done)
        elif segment.inputs is not None:
            self._schedule.abandoned(segment.key)
        self._carry_out(segment, segment.machine.replayed(succeeded=left.held_bytes is not None))

    def _drop_replay(self, segment: Segment) -> None:
        self._store.free_ready(segment.key)
        self._speculator.forget_ready(segment)

    # Answers

    def _done(self, segment: Segment, key: Key, request: SegmentRequest, result: ExecutionResult) -> None:
        """Answers a request, and stores the result for repeated requests."""
        self._recomputed += 1
        self._count_answer(segment)
        if request.keep is not None and segment.inputs is not None:
            sums = self.sums(segment.session)
            result = sums.keep(segment.id, key.backward, request.keep, result, segment.inputs.sources)
        if unsent := result.chained.keys() & set(request.unsent):
            result = result.without(unsent)

        def drop() -> None:
            segment.machine.forgot(key)
            segment.requests.pop(key, None)

        sources = segment.inputs.sources if segment.inputs is not None else ()
        # The request stays with its result for repeated requests, and with it the addresses of its gradients.
        inputs_bytes = PART_BYTES * len(request.backward_inputs.addresses) if request.backward_inputs is not None else 0
        self._store.keep_result((segment.key, key), result.live_bytes(sources) + inputs_bytes, drop)
        self._cache_gradients(segment.session, result)
        request.answer.set_result(result)

    def _fail(self, segment: Segment, key: Key, error: BackhaulError) -> None:
        """Answers a request with an error, and forgets the request so that a repeated one runs again."""
        request = segment.requests.pop(key, None)
        if request is not None and not request.answer.done():
            self._count_answer(segment)
            request.answer.set_exception(error)
            request.answer.exception()  # marks it as retrieved: the caller may have gone, and asyncio would log it

    def _count_answer(self, segment: Segment) -> None:
        segment.session.requests -= 1
        segment.session.account.requests -= 1
        self._requests -= 1


def _released(segment: Segment) -> SegmentUnknownError:
    return SegmentUnknownError(f"segment {segment.id} was released meanwhile")


def _outcome(
    segment: Segment, perform: Operation, inputs: SegmentInputs, ready: LiveReplay | None
) -> ExecutionResult | BackhaulError:
    try:
        return perform(inputs, ready)
    except BackhaulError as error:
        return copy(error)  # without its traceback, which refers to the tensors of the execution
    except Exception as error:  # a bug of the worker: the trainer recomputes, and the log has the traceback
        logger.exception("An execution failed with an unexpected error.", extra=segment.about)
        return WorkerError(f"the worker failed: {type(error).__name__}: {error}")
