"""Segments on their way through a worker: the machine of each decides, this carries out.

Runs in the event loop's thread, except what the executor is handed (`runs`).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from time import monotonic, time

from torch import Tensor

from backhaul_runtime.errors import BackhaulError, BudgetError, SegmentUnknownError, WorkerError
from backhaul_runtime.program.program import NODE_BYTES
from backhaul_runtime.replay.schedule import Footprint, Schedule
from backhaul_runtime.replay.schedule import Key as ScheduleKey
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.wire.tensor_stream import OutgoingTensor
from backhaul_server.worker.engine import runs
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep, GradientSums
from backhaul_server.worker.engine.runs import PART_BYTES, BackwardInputs, LiveReplay, RunResult, SegmentInputs
from backhaul_server.worker.engine.segment import Operation, Segment, SegmentRequest, SessionState, SpeculativeBackward
from backhaul_server.worker.engine.segment_machine import (
    Answer,
    AnswerError,
    DropReplay,
    ForgetResult,
    Free,
    GuessAhead,
    Instruction,
    Key,
    Phase,
    ReplayAhead,
    Run,
)
from backhaul_server.worker.engine.store import ENTRY_BYTES, Store
from backhaul_server.worker.engine.stored_values import Held
from backhaul_server.worker.limits import ALL_REQUESTS, ANSWERS, REQUESTS

logger = logging.getLogger("backhaul.worker")

KEPT_GRADIENTS = 8
MOST_FOOTPRINTS = 4096
SENDING_BYTES = 2 << 20
"""Of an answer that is being sent: a message that is written, and one in gRPC's buffers."""

AHEAD_S = 10.0
"""A run that nobody asked for is cancelled after this many seconds if a request waits."""

SHORT_S = 0.001
"""Guesses whose replays took no longer together run without a turn of the event loop between them, and are told in one
message: both take about as long as the guess. Longer ones would only be told later."""


class SegmentEngine:
    """Executes segments on one device.

    Args:
        store: Of what they are made of.
        schedule: Decides what is done ahead.
        run_limit_s: No run may take longer.
        overdue: See `Executor`.

    Attributes:
        executor: Of the device.
        recomputed: How many requests were done.
        guessed: How many of them found a guess that was right.
        wasted: How many guesses ran and were not.
    """

    def __init__(
        self,
        store: Store[Held],
        schedule: Schedule,
        run_limit_s: float,
        overdue: Callable[[Job], None],
    ) -> None:
        self.executor = Executor(self._next_ahead, overdue, run_limit_s)
        self._run_limit_s = run_limit_s
        self._requests = 0
        self.recomputed = 0
        self.guessed = 0
        self.wasted = 0
        self._store = store
        self._schedule = schedule
        self._sums: dict[str, GradientSums] = {}
        self._by_key: dict[ScheduleKey, Segment] = {}
        self._by_kind: dict[Hashable, dict[ScheduleKey, Segment]] = {}
        self._footprints: OrderedDict[Hashable, Footprint] = OrderedDict()

    def add(self, segment: Segment, need_bytes: int, source_bytes: int) -> None:
        """Takes a saved segment in; `ahead` follows if it will be asked for.

        Args:
            segment: Attached to the store.
            need_bytes: What its run takes at most, by its program.
            source_bytes: Of what only it names.
        """
        assert segment.work is not None
        unknown = Footprint(need_bytes, need_bytes, need_bytes)
        segment.footprint = self._footprints.get(segment.work.kind, unknown)
        self._by_key[segment.key] = segment
        self._by_kind.setdefault(segment.work.kind, {})[segment.key] = segment
        self._schedule.saved(segment.key, segment.footprint, source_bytes)

    def ahead(self, segment: Segment) -> None:
        """Notes that a segment will be asked for, perhaps once more. It is replayed as far as room allows."""
        if segment.machine.phase is Phase.SAVED:
            segment.queued_at_s = time()
            self._schedule.wanted(segment.key)
            self.executor.wake()

    def confirm(
        self, segment: Segment, generator_states: Sequence[bytes], predecessors: Mapping[int, tuple[int, int]]
    ) -> None:
        """The call of a segment that was predicted has ended, and was that but for the generator states, perhaps."""
        assert segment.work is not None
        segment.work = replace(segment.work, generator_states=generator_states)
        segment.predecessors, segment.is_confirmed = predecessors, True
        if segment.ready is not None and not segment.fits(segment.ready):
            self._mispredicted(segment)
            self._carry_out(segment, [DropReplay()])
            segment.machine.dropped()
        self.ahead(segment)

    def _mispredicted(self, segment: Segment) -> None:
        self.wasted += 1
        segment.session.mispredicted(segment.made_of[0])

    def release(self, segment: Segment) -> None:
        """Frees a segment."""
        if segment.guess is not None and segment.guess.was_pushed:  # and was right, or there would have been a request
            self.guessed += 1
            self.recomputed += 1
        self._carry_out(segment, segment.machine.released())
        self.executor.wake()

    def __len__(self) -> int:
        return len(self._by_key)

    def closed(self, session: SessionState) -> None:
        """Forgets a session whose segments were released."""
        self._schedule.closed(session.id)
        sums = self._sums.pop(session.id, None)
        if sums is not None:
            sums.close()

    def sums(self, session: SessionState) -> GradientSums:
        """Of gradients that a session's trainer has not collected."""
        found = self._sums.get(session.id)
        if found is None:
            found = self._sums[session.id] = GradientSums(session.id, self._store, self.executor)
        return found

    @property
    def has_sums(self) -> bool:
        """Whether a trainer would lose what it has not collected."""
        return any(sums.are_awaited for sums in self._sums.values())

    def request(
        self,
        segment: Segment,
        key: Key,
        prepare: Callable[[], Operation],
        expected_s: float,
        start: BackwardInputs | None = None,
        keep: GradientsToKeep | None = None,
    ) -> SegmentRequest:
        """Asks for work on a segment. A repeated request joins the first, or finds its answer.

        Args:
            segment: Saved.
            key: Names the request.
            prepare: Gives the work, called only for a request that is new.
            expected_s: What the trainer thinks it takes.
            start: Of a backward.
            keep: What a backward may keep here.

        Raises:
            LimitError: Too many requests have no answer yet.
        """
        request = segment.requests.get(key)
        if request is None:
            REQUESTS.check(segment.session.requests + 1)
            ALL_REQUESTS.check(self._requests + 1)
            expected_s = expected_s if 0 <= expected_s <= self._run_limit_s else self._run_limit_s
            request = SegmentRequest(
                prepare(), start, keep, expected_s, time(), asyncio.get_running_loop().create_future()
            )
            segment.requests[key] = request
            segment.session.requests += 1
            self._requests += 1
            if segment.work is not None:
                self._schedule.demanded(segment.key)
        self._carry_out(segment, segment.machine.requested(key))
        return request

    @contextmanager
    def answering(self, segment: Segment, key: Key) -> Iterator[None]:
        """Around the sending of an answer, which is held until then. Raises BudgetError for too many at once."""
        result = segment.key, key
        with self._sending(segment.session):
            self._store.pin_result(result)
            try:
                yield
            finally:
                self._store.unpin_result(result)

    @contextmanager
    def reading(self, session: SessionState, addresses: Iterable[bytes]) -> Iterator[list[OutgoingTensor]]:
        """Around the sending of those tensors that a session's segments name. Otherwise as `answering`."""
        found = [address for address in dict.fromkeys(addresses) if self._store.is_named(session.id, address)]
        values = {address: self._store.value(address) for address in found}
        tensors = {address: value for address, value in values.items() if isinstance(value, Tensor)}
        reader = object()
        with self._sending(session):
            self._store.attach(reader, session.id, list(tensors), list(tensors), 0)
            try:
                yield [OutgoingTensor(tensor, layout_of(tensor), address) for address, tensor in tensors.items()]
            finally:
                self._store.detach(reader)

    @contextmanager
    def sending(self, size_bytes: int) -> Iterator[None]:
        """Around the sending of messages with so many bytes in all. Raises BudgetError."""
        charged = min(size_bytes, SENDING_BYTES)
        self._store.start_sending(charged)
        try:
            yield
        finally:
            self._store.end_sending(charged)
            self.executor.wake()

    @contextmanager
    def collecting(self, session: SessionState) -> Iterator[None]:
        """Around the sending of a session's sums. Otherwise as `answering`."""
        with self._sending(session):
            yield

    @contextmanager
    def _sending(self, session: SessionState) -> Iterator[None]:
        if session.answers >= ANSWERS.most:
            raise BudgetError(
                f"{session.answers} answers are being sent to this trainer already: read them first",
                needed_bytes=0,
                budget_bytes=self._store.budget_bytes,
                retry_after_s=1.0,
            )
        session.answers += 1
        try:
            yield
        finally:
            session.answers -= 1
            self.executor.wake()

    def remember(self, session: SessionState, addresses: Iterable[bytes]) -> None:
        """Keeps gradients for the next segment of the chain, and lets go of those before them."""
        for address in addresses:
            session.gradients[address] = None
            session.gradients.move_to_end(address)
        while len(session.gradients) > KEPT_GRADIENTS:
            oldest, _ = session.gradients.popitem(last=False)
            self._store.give_up(session.id, [oldest])

    def _carry_out(self, segment: Segment, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    segment.job = self._replay_ahead(segment)
                case GuessAhead():
                    segment.job = self._guess_ahead(segment)
                case Run(key):
                    self._run(segment, key)
                case Answer():
                    pass  # the future was set when the run ended
                case AnswerError(key):
                    self._fail(segment, key, SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
                case DropReplay():
                    segment.ready = segment.guess = None
                    self._store.let_go(segment.key)
                    self._schedule.dropped(segment.key)
                case ForgetResult(key):
                    self._store.forget_result((segment.key, key))
                    segment.requests.pop(key, None)
                case Free():
                    segment.bounds.set(SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
                    kind = segment.work.kind if segment.work is not None else None
                    segment.work = segment.guess = None  # a job of it may still wait its turn
                    same_kind = self._by_kind[kind]
                    del same_kind[segment.key]
                    if not same_kind:
                        del self._by_kind[kind]
                    self._store.let_go(segment.key)
                    self._store.detach(segment.key)
                    self._schedule.released(segment.key)
                    self.sums(segment.session).released(segment.id)
                    del self._by_key[segment.key]
                    if segment.session.segments.pop(segment.id, None) is not None:
                        segment.session.named -= len(segment.made_of) - 1

    def _go_on(self, segment: Segment, found: RunResult, start: BackwardInputs) -> None:
        for before, guess in _guesses(segment, found, start):
            before.guess = guess
            self._schedule.guessed(before.key)

    def told(self, segment: Segment, most_bytes: int, most_parts: int) -> tuple[BackwardInputs, RunResult] | None:
        """The guess about a segment, to be sent to its trainer; None where there is none, or a larger one."""
        guess = segment.guess
        if guess is None or guess.finished is None or guess.finished.parts > most_parts:
            return None
        if guess.finished.bundle.size_bytes > most_bytes:
            return None
        segment.guess = replace(guess, was_pushed=True)
        self._share(segment.session, guess.finished)
        return guess.start, guess.finished

    def _share(self, session: SessionState, found: RunResult) -> None:
        """Keeps the gradients that a trainer may name from now on."""
        if session.is_closed:
            return
        addressed = [parcel for parcel in (*found.bundle.parcels, *found.chained.values()) if parcel.address]
        for parcel in addressed:
            held_bytes = parcel.tensor.untyped_storage().nbytes()  # of which the tensor may be a part
            self._store.cache(session.id, parcel.address, parcel.tensor, ENTRY_BYTES + held_bytes)
        self.remember(session, [parcel.address for parcel in addressed])

    def _next_ahead(self) -> Job | None:
        """What to do ahead now, begun already."""
        step = self._schedule.next(self._store.room_for_replays())
        if step is None:
            return None
        for key in step.gives_way:
            self._store.drop_ready(key)
        segment = self._by_key[step.key]
        self._carry_out(segment, segment.machine.guess() or segment.machine.ahead())
        return segment.job

    def _guess_ahead(self, segment: Segment) -> Job:
        """Runs a guess on the replay that is ready, and those that follow from it while they are short."""
        chain, charged = [segment], [self._start_run(segment, segment.footprint.run_bytes) or 0]
        for before in _short_before(segment):
            if not self._store.has_room(before.footprint.run_bytes):
                break
            before.machine.guess()
            chain.append(before)
            charged.append(self._start_run(before, before.footprint.run_bytes) or 0)
        made: list[SpeculativeBackward] = []
        gives_way = self._gives_way()

        def work() -> None:
            guess = segment.guess
            try:
                for each, charge in zip(chain, charged, strict=True):
                    (ready, each.ready), found = (each.ready, None), each.work
                    if found is None or ready is None or guess is None:
                        each.ready = ready
                        break
                    each.bounds.begin(charge, gives_way)
                    finished = runs.backward(found, ready, guess.start, guess.gradients, each.predecessors)
                    made.append(replace(guess, finished=finished))
                    guess = next((following for _, following in _guesses(each, finished, guess.start)), None)
            except Exception:  # the request will meet its own
                logger.debug("a guess for %s failed", chain[len(made)].name, exc_info=True)

        def end() -> None:
            for each, charge, guess in zip_longest(chain, charged, made):
                each.job = None  # it leads back to the segment
                self._store.end_run(charge)
                if each.work is None:  # released meanwhile
                    each.ready = None
                    continue
                each.guess = guess
                held_bytes = None if each.ready is None else each.footprint.ready_bytes
                if guess is not None and guess.finished is not None:
                    held_bytes = guess.finished.kept_bytes(each.work.sources)
                self._ended_ahead(each, held_bytes, is_done=guess is not None)
            for each, guess in zip(chain, made, strict=False):
                if each.work is not None and guess.finished is not None:
                    self._go_on(each, guess.finished, guess.start)
                    each.session.tell(each)

        job = Job(segment.session.id, lambda: True, work, end, 0.0, segment.name)
        for each in chain:
            each.job = job
        return job

    def _replay_ahead(self, segment: Segment) -> Job:
        charged = self._start_run(segment, segment.footprint.replay_bytes) or 0
        made: list[LiveReplay] = []
        is_measured = segment.work is not None and segment.work.kind not in self._footprints
        gives_way = self._gives_way()

        def work() -> None:
            found = segment.work
            segment.bounds.begin(charged, gives_way)
            try:
                if found is not None:
                    made.append(found.replay(keep_saved=not found.program.outputs, is_measured=is_measured))
            except Exception:  # the request that needs it will meet its own
                logger.debug("a replay ahead failed", exc_info=True, extra=segment.about)

        def end() -> None:
            segment.job = None  # it leads back to the segment
            self._store.end_run(charged)
            is_other = bool(made) and not segment.fits(made[0])
            if made and not is_other and segment.work is not None:
                segment.ready = made.pop()
                if segment.ready.replay.footprint is not None:
                    nodes_bytes = NODE_BYTES * len(segment.work.program.nodes)
                    self._measured(segment.work.kind, segment.ready.replay.footprint.beside(nodes_bytes))
            else:
                segment.guess = None
            self._ended_ahead(segment, segment.footprint.ready_bytes if segment.ready is not None else None)
            if is_other:
                self._mispredicted(segment)
                self.ahead(segment)

        return Job(segment.session.id, lambda: True, work, end, 0.0, segment.name)

    def _gives_way(self) -> Callable[[], bool]:
        """What tells a run ahead that begins now whether it has taken too long for those who wait."""
        executor, until_s = self.executor, monotonic() + AHEAD_S
        return lambda: executor.has_waiting and monotonic() > until_s

    def _start_run(self, segment: Segment, most_bytes: int) -> int | None:
        """Charges what runs next. None where there is no room until an answer has been sent."""
        charged = self._store.start_run(segment.key, most_bytes)
        if charged is not None and segment.work is not None:
            self._schedule.started(segment.key)
        return charged

    def _ended_ahead(self, segment: Segment, held_bytes: int | None, *, is_done: bool = False) -> None:
        """Charges what work ahead left ready; None: it left nothing."""

        def drop() -> None:
            segment.ready = segment.guess = None
            segment.machine.dropped()
            self._schedule.dropped(segment.key)

        if held_bytes is not None:
            self._store.keep_ready(segment.key, held_bytes, drop)
            self._schedule.ready(segment.key, held_bytes, is_done=is_done)
        elif segment.work is not None:
            self._schedule.given_up(segment.key)
        self._carry_out(segment, segment.machine.replayed(succeeded=held_bytes is not None))

    def _measured(self, kind: Hashable, found: Footprint) -> None:
        """Notes what segments of a kind take."""
        self._footprints[kind] = found
        while len(self._footprints) > MOST_FOOTPRINTS:
            self._footprints.popitem(last=False)
        for segment in self._by_kind.get(kind, {}).values():
            segment.footprint = found
            self._schedule.measured(segment.key, found)

    def _run(self, segment: Segment, key: Key) -> None:
        request = segment.requests[key]
        guess, segment.guess = segment.guess, None
        if guess is not None and guess.finished is not None and guess.start == request.start:
            self.guessed += 1
            request.perform = None
            self._store.let_go(segment.key)
            self._schedule.started(segment.key)
            self._done(segment, key, request, guess.finished)
            self._carry_out(segment, segment.machine.ran(key, succeeded=True))
            return
        self.wasted += guess is not None and guess.finished is not None
        outcome: list[RunResult | BackhaulError] = []
        charged: list[int] = []

        def begin() -> bool:
            taken = self._start_run(segment, segment.footprint.run_bytes)
            if taken is not None:
                charged.append(taken)
            return taken is not None

        def work() -> None:
            ready, segment.ready = segment.ready, None
            perform, request.perform = request.perform, None
            found = segment.work
            segment.bounds.begin(charged[0])
            if perform is None or found is None:
                outcome.append(SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
            else:
                outcome.append(_outcome(segment, perform, found, ready))

        def end() -> None:
            segment.job = None  # it leads back to the segment
            self._store.end_run(charged.pop())
            found = outcome.pop()
            succeeded = isinstance(found, RunResult)
            if isinstance(found, RunResult):
                self._done(segment, key, request, found)
            else:
                self._fail(segment, key, found)
            self._carry_out(segment, segment.machine.ran(key, succeeded=succeeded))
            if isinstance(found, RunResult) and request.start is not None:
                self._go_on(segment, found, request.start)

        segment.job = Job(segment.session.id, begin, work, end, request.expected_s, segment.name)
        self.executor.submit(segment.job)

    def _done(self, segment: Segment, key: Key, request: SegmentRequest, found: RunResult) -> None:
        """Answers a request and keeps the answer for those who ask again."""
        self.recomputed += 1
        self._answered(segment)
        if request.keep is not None and segment.work is not None:
            sums = self.sums(segment.session)
            found = sums.keep(segment.id, key.backward, request.keep, found, segment.work.sources)

        def drop() -> None:
            segment.machine.forgot(key)
            segment.requests.pop(key, None)

        sources = segment.work.sources if segment.work is not None else ()
        started = PART_BYTES * len(request.start.addresses) if request.start is not None else 0
        self._store.keep_result((segment.key, key), found.kept_bytes(sources) + started, drop)
        self._share(segment.session, found)
        request.answer.set_result(found)

    def _fail(self, segment: Segment, key: Key, error: BackhaulError) -> None:
        """Answers a request with an error and forgets it, so that a repeated one tries again."""
        request = segment.requests.pop(key, None)
        if request is not None and not request.answer.done():
            self._answered(segment)
            request.answer.set_exception(error)
            request.answer.exception()  # seen, also where nobody waits any more

    def _answered(self, segment: Segment) -> None:
        segment.session.requests -= 1
        self._requests -= 1


def _short_before(segment: Segment) -> Iterator[Segment]:
    """Those whose guess will follow from that of a segment, while all together are short."""
    left_s = SHORT_S
    while len(before := segment.before()) == 1:
        (segment,) = before
        ready = segment.ready if segment.machine.phase is Phase.READY and segment.takes_guess else None
        if ready is None or ready.took_s > left_s:
            return
        left_s -= ready.took_s
        yield segment


def _guesses(
    segment: Segment, found: RunResult, start: BackwardInputs
) -> Iterator[tuple[Segment, SpeculativeBackward]]:
    """What the segments before will be asked for: the gradients just found, unchanged."""
    given: dict[int, dict[int, OutgoingTensor]] = {}
    for source, parcel in found.chained.items():
        number, output = segment.predecessors[source]
        given.setdefault(number, {})[output] = parcel
    for before in segment.before():
        if before.takes_guess and (parcels := given.get(before.id)):
            addresses = tuple(sorted((output, parcel.address) for output, parcel in parcels.items()))
            summed = tuple(sorted(before.predecessors)) if start.summed else ()  # likely as it was just now
            yield (
                before,
                SpeculativeBackward(
                    BackwardInputs(addresses, start.state, start.wants_digests, summed),
                    {output: parcel.tensor for output, parcel in parcels.items()},
                ),
            )


def _outcome(
    segment: Segment, perform: Operation, work: SegmentInputs, ready: LiveReplay | None
) -> RunResult | BackhaulError:
    try:
        return perform(work, ready)
    except BackhaulError as error:
        return error
    except Exception as error:  # a bug of ours: the trainer recomputes, the log has the story
        logger.exception("a run failed", extra=segment.about)
        return WorkerError(f"the worker failed: {type(error).__name__}: {error}")
