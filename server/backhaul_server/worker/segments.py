"""Segments on their way through a worker: the machine of each decides, this carries out.

Runs in the event loop's thread, except what the executor is handed (`runs`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backhaul_runtime.errors import BackhaulError, BudgetError, SegmentUnknownError, WorkerError
from backhaul_runtime.framing import Parcel
from backhaul_runtime.logs import about
from backhaul_server.worker import runs
from backhaul_server.worker.executor import Executor
from backhaul_server.worker.fair_queue import Job
from backhaul_server.worker.runs import Finished, Ready, Start, Work
from backhaul_server.worker.segment_machine import (
    Answer,
    AnswerError,
    DropReplay,
    ForgetResult,
    Free,
    GuessAhead,
    Hurry,
    Instruction,
    Key,
    ReplayAhead,
    Run,
    SegmentMachine,
)
from backhaul_server.worker.store import Store

if TYPE_CHECKING:
    from backhaul_server.worker.handover import Sharing

logger = logging.getLogger("backhaul.worker")
KEPT_GRADIENTS = 8
MAX_ANSWERS = 16  # of one session, read at the same time
ENTRY_BYTES = 2 << 10  # what a tensor takes beside its elements

Perform = Callable[[Work, Ready | None], Finished]
"""What a request wants done with a segment. Called in the executor's thread."""


@dataclass(slots=True)
class Request:
    """A request for a segment.

    Attributes:
        perform: The work; None once it is done, with the tensors it held.
        start: Of a backward.
        expected_s: What the trainer thinks it takes.
        came_at_s: When it came, in seconds since 1970.
        answer: Done when the work is; holds the result for those who ask again.
    """

    perform: Perform | None
    start: Start | None
    expected_s: float
    came_at_s: float
    answer: "asyncio.Future[Finished]"


@dataclass(frozen=True, slots=True)
class Guess:
    """A backward nobody asked for yet.

    Attributes:
        start: What it starts from.
        gradients: The tensors that `start` names.
        finished: Its result, None until it has run.
    """

    start: Start
    gradients: Mapping[int, Tensor]
    finished: Finished | None = None


@dataclass(eq=False)
class Segment:
    """What the worker has of a segment.

    Attributes:
        session: Whose it is.
        id: The trainer's number for it.
        work: Program and tensors, None once it was released.
        name: For people.
        predecessors: By source, the segment and output it is.
        made_of: Addresses of its program and of its sources.
        is_confirmed: Its call has ended, and was what `work` says.
        guess: What its backward will probably start from, and its result once that has run.
        queued_at_s: When its replay ahead came to the queue, in seconds since 1970; 0 without one.
    """

    session: "Session"
    id: int
    work: Work | None
    name: str
    predecessors: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    made_of: tuple[bytes, ...] = ()
    is_confirmed: bool = True
    machine: SegmentMachine = field(default_factory=SegmentMachine)
    guess: Guess | None = None
    ready: Ready | None = None
    queued_at_s: float = 0.0
    job: Job | None = None
    requests: dict[Key, Request] = field(default_factory=dict)

    @property
    def key(self) -> Hashable:
        """Names it among all segments of the worker, also beside one that it replaces."""
        return id(self)

    def fits(self, ready: Ready) -> bool:
        """Whether a replay is that of the call, as far as the call has ended."""
        return not self.is_confirmed or self.work is None or ready.replay.drawn_from == list(self.work.generator_states)

    @property
    def about(self) -> dict[str, Any]:
        """What a log call about it passes as `extra`."""
        return about(self.session.run, self.name)


@dataclass(eq=False)
class Session:
    """A trainer's stay.

    Attributes:
        id: Not to be guessed.
        trainer: For people.
        expires_at: When its lease runs out, by the monotonic clock.
        segments: By the trainer's number.
        gradients: Addresses of the last gradients that came or went, which are cached.
        answers: How many are being sent.
        drift: The largest its trainer measured between its numbers and ours.
        run: The trainer's session, which may have others on other workers.
        client_version: Of the trainer.
        last_error: Of the last request that was refused or failed.
        unpredictable: Programs that draw from other generator states than the replay of a prediction does.
        memory: What is shared with its trainer, if that is on this machine.
    """

    id: str
    trainer: str
    expires_at: float
    segments: dict[int, Segment] = field(default_factory=dict)
    gradients: deque[bytes] = field(default_factory=deque)
    answers: int = 0
    drift: float = 0.0
    run: str = ""
    client_version: str = ""
    last_error: str = ""
    unpredictable: set[bytes] = field(default_factory=set)
    memory: "Sharing | None" = None


class Segments:
    """Executes segments on one device.

    Args:
        store: Of what they are made of.

    Attributes:
        executor: Of the device.
        recomputed: How many requests were done.
        guessed: How many of them found a guess that was right.
        wasted: How many guesses ran and were not.
    """

    def __init__(self, store: Store[Tensor]) -> None:
        self.executor = Executor()
        self.recomputed = 0
        self.guessed = 0
        self.wasted = 0
        self._store = store

    def ahead(self, segment: Segment) -> None:
        """Starts on a segment that will be asked for, as far as room allows."""
        self._carry_out(segment, segment.machine.ahead())

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
        segment.session.unpredictable.add(segment.made_of[0])

    def release(self, segment: Segment) -> None:
        """Frees a segment."""
        self._carry_out(segment, segment.machine.released())

    def request(
        self,
        segment: Segment,
        key: Key,
        prepare: Callable[[], Perform],
        expected_s: float,
        start: Start | None = None,
    ) -> Request:
        """Asks for work on a segment. A repeated request joins the first, or finds its answer.

        Args:
            segment: Saved.
            key: Names the request.
            prepare: Gives the work, called only for a request that is new.
            expected_s: What the trainer thinks it takes.
            start: Of a backward.
        """
        request = segment.requests.get(key)
        if request is None:
            request = Request(prepare(), start, expected_s, time(), asyncio.get_running_loop().create_future())
            segment.requests[key] = request
        self._carry_out(segment, segment.machine.requested(key))
        return request

    @contextmanager
    def answering(self, segment: Segment, key: Key) -> Iterator[None]:
        """Around the sending of an answer, which is held until then. Raises BudgetError for too many at once."""
        session, result = segment.session, (segment.key, key)
        if session.answers >= MAX_ANSWERS:
            raise BudgetError(
                f"{session.answers} answers are being sent to this trainer already: read them first",
                needed_bytes=0,
                budget_bytes=self._store.budget_bytes,
                retry_after_s=1.0,
            )
        session.answers += 1
        self._store.pin_result(result)
        try:
            yield
        finally:
            session.answers -= 1
            self._store.unpin_result(result)

    def remember(self, session: Session, addresses: Iterable[bytes]) -> None:
        """Keeps gradients for the next segment of the chain, and lets go of those before them."""
        session.gradients.extend(addresses)
        while len(session.gradients) > KEPT_GRADIENTS:
            oldest = session.gradients.popleft()
            if oldest not in session.gradients:
                self._store.uncache([oldest])

    def _carry_out(self, segment: Segment, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    self._replay_ahead(segment)
                case GuessAhead():
                    self._guess_ahead(segment)
                case Hurry():
                    if segment.job is not None:
                        self.executor.hurry(segment.job)
                case Run(key):
                    self._run(segment, key)
                case Answer():
                    pass  # the future was set when the run ended
                case AnswerError(key):
                    self._fail(segment, key, SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
                case DropReplay():
                    segment.ready = segment.guess = None
                    self._store.end_ahead(segment.key)
                case ForgetResult(key):
                    self._store.forget_result((segment.key, key))
                    segment.requests.pop(key, None)
                case Free():
                    segment.work = None  # a job of it may still wait its turn
                    self._store.detach(segment.key)
                    segment.session.segments.pop(segment.id, None)

    def _go_on(self, segment: Segment, found: Finished, start: Start | None) -> None:
        """Guesses what the segments before will be asked for: the gradients just found, unchanged."""
        given: dict[int, dict[int, Parcel]] = {}
        for source, parcel in found.chained.items():
            number, output = segment.predecessors[source]
            given.setdefault(number, {})[output] = parcel
        for number, parcels in given.items():
            before = segment.session.segments.get(number)
            if start is None or before is None or not before.is_confirmed:
                continue
            if before.guess is not None or before.machine.was_asked:
                continue
            addresses = tuple(sorted((output, parcel.address) for output, parcel in parcels.items()))
            summed = tuple(sorted(before.predecessors)) if start.summed else ()  # likely as it was just now
            before.guess = Guess(
                Start(addresses, start.state, start.wants_digests, summed),
                {output: parcel.tensor for output, parcel in parcels.items()},
            )
            self._carry_out(before, before.machine.guess() or before.machine.ahead())

    def _guess_ahead(self, segment: Segment) -> None:
        """Runs a guess on the replay that is ready, in the room of that replay."""
        made: list[Finished] = []

        def work() -> None:
            (ready, segment.ready), found, guess = (segment.ready, None), segment.work, segment.guess
            try:
                if found is not None and guess is not None and ready is not None:
                    made.append(runs.backward(found, ready, guess.start, guess.gradients, segment.predecessors))
            except Exception:  # the request will meet its own
                logger.debug("a guess for %s failed", segment.name, exc_info=True)

        def end() -> None:
            guess, segment.guess = segment.guess, None
            succeeded = bool(made) and guess is not None and self._store.is_ahead(segment.key)
            segment.job = None  # it leads back to the segment
            if succeeded and guess is not None:
                segment.guess = replace(guess, finished=made[0])
            else:
                self._store.end_ahead(segment.key)
            self._carry_out(segment, segment.machine.replayed(succeeded=succeeded))
            if succeeded and guess is not None:
                self._go_on(segment, made[0], guess.start)

        self._submit(segment, Job(segment.session.id, lambda: None, work, end, 0.0, is_demanded=False))

    def _replay_ahead(self, segment: Segment) -> None:
        def drop() -> None:
            segment.ready = segment.guess = None
            segment.machine.dropped()

        if not self._store.start_ahead(segment.key, drop):
            self._carry_out(segment, segment.machine.replayed(succeeded=False))
            return
        segment.queued_at_s = time()
        made: list[Ready] = []

        def work() -> None:
            found = segment.work
            try:
                if found is not None:
                    made.append(found.replay(keep_saved=not found.program.outputs))
            except Exception:  # the request that needs it will meet its own
                logger.debug("a replay ahead failed", exc_info=True, extra=segment.about)

        def end() -> None:
            is_other = bool(made) and not segment.fits(made[0])
            succeeded = bool(made) and not is_other and self._store.is_ahead(segment.key)
            if succeeded:
                segment.ready = made.pop()
            else:
                self._store.end_ahead(segment.key)
                segment.guess = None
            segment.job = None  # it leads back to the segment
            self._carry_out(segment, segment.machine.replayed(succeeded=succeeded))
            if is_other:
                self._mispredicted(segment)
                self.ahead(segment)
            if segment.guess is not None:
                self._carry_out(segment, segment.machine.guess())

        self._submit(segment, Job(segment.session.id, lambda: None, work, end, 0.0, is_demanded=False))

    def _run(self, segment: Segment, key: Key) -> None:
        request = segment.requests[key]
        guess, segment.guess = segment.guess, None
        if guess is not None and guess.finished is not None and guess.start == request.start:
            self.guessed += 1
            request.perform = None
            self._store.end_ahead(segment.key)
            self._done(segment, key, request, guess.finished)
            self._carry_out(segment, segment.machine.ran(key, succeeded=True))
            return
        self.wasted += guess is not None and guess.finished is not None
        outcome: list[Finished | BackhaulError] = []
        charged: list[int] = []

        def begin() -> None:
            charged.append(self._store.start_run(segment.key))

        def work() -> None:
            ready, segment.ready = segment.ready, None
            perform, request.perform = request.perform, None
            found = segment.work
            if perform is None or found is None:
                outcome.append(SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
            else:
                outcome.append(_outcome(segment, perform, found, ready))

        def end() -> None:
            segment.job = None  # it leads back to the segment
            self._store.end_run(charged.pop())
            found = outcome.pop()
            succeeded = isinstance(found, Finished)
            if isinstance(found, Finished):
                self._done(segment, key, request, found)
            else:
                self._fail(segment, key, found)
            self._carry_out(segment, segment.machine.ran(key, succeeded=succeeded))
            if isinstance(found, Finished):
                self._go_on(segment, found, request.start)

        self._submit(segment, Job(segment.session.id, begin, work, end, request.expected_s, is_demanded=True))

    def _submit(self, segment: Segment, job: Job) -> None:
        segment.job = job
        self.executor.submit(job)

    def _done(self, segment: Segment, key: Key, request: Request, found: Finished) -> None:
        """Answers a request and keeps the answer for those who ask again."""
        self.recomputed += 1

        def drop() -> None:
            segment.machine.forgot(key)
            segment.requests.pop(key, None)

        self._store.keep_result((segment.key, key), found.bundle.size_bytes, drop)
        addressed = [parcel for parcel in (*found.bundle.parcels, *found.chained.values()) if parcel.address]
        for parcel in addressed:
            self._store.cache(parcel.address, parcel.tensor, ENTRY_BYTES + parcel.layout.span_bytes)
        self.remember(segment.session, [parcel.address for parcel in addressed])
        request.answer.set_result(found)

    def _fail(self, segment: Segment, key: Key, error: BackhaulError) -> None:
        """Answers a request with an error and forgets it, so that a repeated one tries again."""
        request = segment.requests.pop(key, None)
        if request is not None and not request.answer.done():
            request.answer.set_exception(error)
            request.answer.exception()  # seen, also where nobody waits any more


def _outcome(segment: Segment, perform: Perform, work: Work, ready: Ready | None) -> Finished | BackhaulError:
    try:
        return perform(work, ready)
    except BackhaulError as error:
        return error
    except Exception as error:  # a bug of ours: the trainer recomputes, the log has the story
        logger.exception("a run failed", extra=segment.about)
        return WorkerError(f"the worker failed: {type(error).__name__}: {error}")
