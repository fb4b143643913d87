"""The worker without its wire: sessions, programs, tensors and segments, and one executor that runs programs.

Everything here runs in the event loop's thread, except what the executor is handed (`runs`). The segment machines and
the store decide; this module carries out.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import torch
from torch import Tensor

from backhaul_runtime.errors import (
    BackhaulError,
    BudgetError,
    DrainingError,
    ProgramError,
    SegmentUnknownError,
    SessionUnknownError,
    TensorsMissingError,
    WorkerError,
)
from backhaul_runtime.layout import Layout, layout_of
from backhaul_runtime.program import Program
from backhaul_runtime.program_codec import address_of_program, decode_program
from backhaul_server.worker.executor import Executor
from backhaul_server.worker.fair_queue import Job
from backhaul_server.worker.runs import Finished, Ready, Work
from backhaul_server.worker.segment_machine import (
    Answer,
    AnswerError,
    DropReplay,
    ForgetResult,
    Free,
    Hurry,
    Instruction,
    Key,
    ReplayAhead,
    Run,
    SegmentMachine,
)
from backhaul_server.worker.store import Store

logger = logging.getLogger("backhaul.worker")
KEPT_GRADIENTS = 8
MAX_GENERATOR_BYTES = 16 << 10  # of a state; torch's largest has 5 KiB
MAX_ANSWERS = 16  # of one session, read at the same time
ENTRY_BYTES = 2 << 10  # what a tensor takes beside its elements
_LEAST_PROGRAM_BYTES = 4 << 20

Perform = Callable[[Work, Ready | None], Finished]
"""What a request wants done with a segment. Called in the executor's thread."""


@dataclass(slots=True)
class Request:
    """A request for a segment.

    Attributes:
        perform: The work; None once it is done, with the tensors it held.
        expected_s: What the trainer thinks it takes.
        answer: Done when the work is; holds the result for those who ask again.
    """

    perform: Perform | None
    expected_s: float
    answer: "asyncio.Future[Finished]"


@dataclass(eq=False)
class Segment:
    """What the worker has of a segment.

    Attributes:
        session: Whose it is.
        id: The trainer's number for it.
        work: Program and tensors, None once it was released.
        name: For people.
    """

    session: "Session"
    id: int
    work: Work | None
    name: str
    machine: SegmentMachine = field(default_factory=SegmentMachine)
    ready: Ready | None = None
    job: Job | None = None
    requests: dict[Key, Request] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """Names it among all segments of the worker."""
        return self.session.id, self.id


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
    """

    id: str
    trainer: str
    expires_at: float
    segments: dict[int, Segment] = field(default_factory=dict)
    gradients: deque[bytes] = field(default_factory=deque)
    answers: int = 0


class Worker:
    """Construct it in a running event loop; `close` ends it.

    Args:
        device: Programs run there.
        budget_bytes: For everything held, see `Store`.
        lease_s: A session silent for longer is freed.
    """

    def __init__(self, device: torch.device, budget_bytes: int, lease_s: float) -> None:
        self.device = device
        self.lease_s = lease_s
        self.epoch = secrets.token_hex(8)
        self.store: Store[Tensor] = Store(budget_bytes)
        self.sessions: dict[str, Session] = {}
        self.draining = False
        self.recomputed_segments = 0
        self._programs: OrderedDict[bytes, tuple[Program, int]] = OrderedDict()
        self._program_bytes = 0
        self.executor = Executor()
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Frees everything. What the executor runs is waited for."""
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        await self.executor.close()
        for session_id in list(self.sessions):
            self.close_session(session_id)

    # Sessions

    def open_session(self, trainer: str) -> Session:
        """A new session. Raises DrainingError."""
        self._check_draining()
        session = Session(secrets.token_hex(16), trainer, monotonic() + self.lease_s)
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> Session:
        """The session of that id, its lease renewed. Raises SessionUnknownError."""
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionUnknownError(
                f"this worker has no session {session_id[:8]}…: its lease of {self.lease_s:g} s ran out, or the worker "
                "was restarted. Open a new one"
            )
        session.expires_at = monotonic() + self.lease_s
        return session

    def close_session(self, session_id: str) -> None:
        """Frees a session and all it holds. Unknown ones are gone already."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            for segment in list(session.segments.values()):
                self._carry_out(segment, segment.machine.released())
            self.store.uncache(session.gradients)
        if not self.sessions:
            self.store.clear_cache()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for session in list(self.sessions.values()):
                if session.expires_at < monotonic():
                    logger.warning("the lease of %s ran out: freed", session.trainer)
                    self.close_session(session.id)

    # Programs and tensors

    async def put_program(self, encoded: bytes) -> bytes:
        """Checks and keeps a program. Returns its address. Raises ProgramError."""
        self._check_draining()
        address = address_of_program(encoded)
        if address not in self._programs:
            program = await asyncio.to_thread(decode_program, encoded, self.device)  # a long one takes a second
            if address not in self._programs:
                self._programs[address] = program, len(encoded)
                self._program_bytes += len(encoded)
            # Decoded they take some twenty times as much.
            while self._program_bytes > max(_LEAST_PROGRAM_BYTES, self.store.budget_bytes // 256):
                if len(self._programs) == 1:
                    break
                _, (_, size) = self._programs.popitem(last=False)
                self._program_bytes -= size
        return address

    def expect_tensor(self, layout: Layout) -> int:
        """Makes room for a declared tensor. Returns what is charged for it. Raises BudgetError."""
        self._check_draining()
        # One with gaps is put together from a packed copy.
        gaps = layout.payload_bytes if layout.payload_bytes < layout.span_bytes else 0
        charged = ENTRY_BYTES + layout.span_bytes + gaps
        self.store.expect(charged)
        return charged

    # Segments

    def save(
        self,
        session: Session,
        segment_id: int,
        program_address: bytes,
        addresses: Sequence[bytes],
        transient: Sequence[int],
        generator_states: Sequence[bytes],
        name: str,
    ) -> tuple[bool, list[bytes]]:
        """Saves a segment and starts to replay it, as far as room allows. A repeated save changes nothing.

        Returns:
            Whether the program is missing, and which tensors are; saved only if neither.

        Raises:
            BudgetError: No room.
            ProgramError: The lists do not fit the program.
        """
        self._check_draining()
        if segment_id in session.segments:
            return False, []
        missing = self.store.missing(addresses)
        if program_address not in self._programs or missing:
            return program_address not in self._programs, missing
        self._programs.move_to_end(program_address)
        program, _ = self._programs[program_address]
        if len(addresses) != len(program.sources) or max(transient, default=0) >= max(1, len(addresses)):
            raise ProgramError(f"{len(addresses)} tensors are named for a program of {len(program.sources)} sources")
        drawn = sum(node.draws for node in program.nodes)
        if len(generator_states) != drawn or max(map(len, generator_states), default=0) > MAX_GENERATOR_BYTES:
            raise ProgramError(f"{len(generator_states)} generator states came for {drawn} draws, or too large")
        sources = [self.store.tensor(address) for address in addresses]
        need = program.run_bytes([layout_of(tensor).gradient_bytes for tensor in sources]) + sum(
            map(len, generator_states)
        )
        self.store.attach((session.id, segment_id), addresses, [addresses[position] for position in transient], need)
        work = Work(program, sources, generator_states)
        segment = session.segments[segment_id] = Segment(session, segment_id, work, name)
        self._carry_out(segment, segment.machine.ahead())
        return False, []

    def segment(self, session: Session, segment_id: int) -> Segment:
        """A saved segment. Raises SegmentUnknownError."""
        segment = session.segments.get(segment_id)
        if segment is None:
            raise SegmentUnknownError(f"this worker has no segment {segment_id} of this session")
        return segment

    def request(self, segment: Segment, key: Key, prepare: Callable[[], Perform], expected_s: float) -> Request:
        """Asks for work on a segment. A repeated request joins the first, or finds its answer.

        Args:
            segment: Saved.
            key: Names the request.
            prepare: Gives the work, called only for a request that is new.
            expected_s: What the trainer thinks it takes.
        """
        request = segment.requests.get(key)
        if request is None:
            request = Request(prepare(), expected_s, asyncio.get_running_loop().create_future())
            segment.requests[key] = request
        self._carry_out(segment, segment.machine.requested(key))
        return request

    def gradients(self, session: Session, addresses: Mapping[int, bytes]) -> dict[int, Tensor]:
        """The tensors a backward starts from. Raises TensorsMissingError."""
        missing = self.store.missing(addresses.values())
        if missing:
            raise TensorsMissingError(f"{len(missing)} gradients are named that this worker does not hold: send them")
        found = {output: self.store.tensor(address) for output, address in addresses.items()}
        self._remember(session, addresses.values())
        return found

    def _remember(self, session: Session, addresses: Iterable[bytes]) -> None:
        """Keeps gradients for the next segment of the chain, and lets go of those before them."""
        session.gradients.extend(addresses)
        while len(session.gradients) > KEPT_GRADIENTS:
            oldest = session.gradients.popleft()
            if oldest not in session.gradients:
                self.store.uncache([oldest])

    def replay_ahead(self, session: Session, segment_ids: Sequence[int]) -> None:
        """Starts on segments that will be asked for, as far as room allows. Unknown ones are passed over."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self._carry_out(segment, segment.machine.ahead())

    def release(self, session: Session, segment_ids: Sequence[int]) -> None:
        """Frees segments. Unknown ones are gone already."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self._carry_out(segment, segment.machine.released())

    def _carry_out(self, segment: Segment, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    self._replay_ahead(segment)
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
                    segment.ready = None
                    self.store.end_ahead(segment.key)
                case ForgetResult(key):
                    self.store.forget_result((segment.key, key))
                    segment.requests.pop(key, None)
                case Free():
                    segment.work = None  # a job of it may still wait its turn
                    self.store.detach(segment.key)
                    segment.session.segments.pop(segment.id, None)

    def _replay_ahead(self, segment: Segment) -> None:
        def drop() -> None:
            segment.ready = None
            segment.machine.dropped()

        if not self.store.start_ahead(segment.key, drop):
            self._carry_out(segment, segment.machine.replayed(succeeded=False))
            return
        made: list[Ready] = []

        def work() -> None:
            found = segment.work
            try:
                if found is not None:
                    made.append(found.replay(keep_saved=not found.program.outputs))
            except Exception:  # the request that needs it will meet its own
                logger.debug("a replay ahead of %s failed", segment.name, exc_info=True)

        def end() -> None:
            succeeded = bool(made) and self.store.is_ahead(segment.key)
            if succeeded:
                segment.ready = made.pop()
            else:
                self.store.end_ahead(segment.key)
            segment.job = None  # it leads back to the segment
            self._carry_out(segment, segment.machine.replayed(succeeded=succeeded))

        self._submit(segment, Job(segment.session.id, lambda: None, work, end, 0.0, is_demanded=False))

    def _run(self, segment: Segment, key: Key) -> None:
        request = segment.requests[key]
        outcome: list[Finished | BackhaulError] = []
        charged: list[int] = []

        def begin() -> None:
            charged.append(self.store.start_run(segment.key))

        def work() -> None:
            ready, segment.ready = segment.ready, None
            perform, request.perform = request.perform, None
            found = segment.work
            if perform is None or found is None:
                outcome.append(SegmentUnknownError(f"segment {segment.id} was released meanwhile"))
            else:
                outcome.append(_outcome(perform, found, ready))

        def end() -> None:
            segment.job = None  # it leads back to the segment
            self.store.end_run(charged.pop())
            found = outcome.pop()
            succeeded = isinstance(found, Finished)
            if isinstance(found, Finished):
                self.recomputed_segments += 1
                self._keep(segment, key, request, found)
            else:
                self._fail(segment, key, found)
            self._carry_out(segment, segment.machine.ran(key, succeeded=succeeded))

        self._submit(segment, Job(segment.session.id, begin, work, end, request.expected_s, is_demanded=True))

    def _submit(self, segment: Segment, job: Job) -> None:
        segment.job = job
        self.executor.submit(job)

    def _keep(self, segment: Segment, key: Key, request: Request, found: Finished) -> None:
        def drop() -> None:
            segment.machine.forgot(key)
            segment.requests.pop(key, None)

        self.store.keep_result((segment.key, key), found.bundle.size_bytes, drop)
        addressed = [parcel for parcel in found.bundle.parcels if parcel.address]
        for parcel in addressed:
            self.store.cache(parcel.address, parcel.tensor, ENTRY_BYTES + parcel.layout.span_bytes)
        self._remember(segment.session, [parcel.address for parcel in addressed])
        request.answer.set_result(found)

    @contextmanager
    def answering(self, segment: Segment, key: Key) -> Iterator[None]:
        """Around the sending of an answer, which is held until then. Raises BudgetError for too many at once."""
        session, result = segment.session, (segment.key, key)
        if session.answers >= MAX_ANSWERS:
            raise BudgetError(
                f"{session.answers} answers are being sent to this trainer already: read them first",
                needed_bytes=0,
                budget_bytes=self.store.budget_bytes,
                retry_after_s=1.0,
            )
        session.answers += 1
        self.store.pin_result(result)
        try:
            yield
        finally:
            session.answers -= 1
            self.store.unpin_result(result)

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, waits to, or is being sent."""
        return len(self.executor) > 0 or any(session.answers for session in self.sessions.values())

    def _fail(self, segment: Segment, key: Key, error: BackhaulError) -> None:
        """Answers a request with an error and forgets it, so that a repeated one tries again."""
        request = segment.requests.pop(key, None)
        if request is not None and not request.answer.done():
            request.answer.set_exception(error)
            request.answer.exception()  # seen, also where nobody waits any more

    def _check_draining(self) -> None:
        if self.draining:
            raise DrainingError("this worker is shutting down: it finishes what it has and takes nothing new")


def _outcome(perform: Perform, work: Work, ready: Ready | None) -> Finished | BackhaulError:
    try:
        return perform(work, ready)
    except BackhaulError as error:
        return error
    except Exception as error:  # a bug of ours: the trainer recomputes, the log has the story
        logger.exception("a run failed")
        return WorkerError(f"the worker failed: {type(error).__name__}: {error}")
