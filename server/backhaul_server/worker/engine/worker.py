"""The worker without its wire: who stays, and what they sent. Everything here runs in the event loop's thread."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from time import monotonic

import torch
from torch import Tensor

from backhaul_runtime.errors import (
    DrainingError,
    ProgramError,
    SegmentUnknownError,
    SessionUnknownError,
    TensorsMissingError,
)
from backhaul_runtime.process.logs import about
from backhaul_runtime.program.codec import DECODED_FACTOR, MAX_PROGRAM_BYTES, address_of_program, decode_program
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.schedule import Schedule
from backhaul_runtime.tensors.deferred_digest import KnownDigests
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_server.worker.config import RUN_LIMIT_S
from backhaul_server.worker.engine.bounds import Bounds, RunMemory
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.heap import return_freed_memory
from backhaul_server.worker.engine.runs import SegmentInputs
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_engine import SegmentEngine
from backhaul_server.worker.engine.store import ENTRY_BYTES, Store
from backhaul_server.worker.engine.stored_values import Held, ReadProgram, is_same
from backhaul_server.worker.limits import (
    ALL_SEGMENTS,
    ALL_STREAMS,
    NAMED,
    SEGMENTS,
    SESSIONS,
    STREAMS,
    UNNAMED_STREAMS,
)

logger = logging.getLogger("backhaul.worker")
_SESSION_BYTES, _PASS_BYTES = 12 << 10, 512
"""What a session takes beside its names, and what it takes for each segment of the largest number that it ever had at
once: the schedule remembers the last pass."""

_SEGMENT_BYTES, _NAMED_BYTES = 4 << 10, 256
"""What a segment takes beside its name and generator states, and for each of its sources, predecessors and states."""

_PROGRAM_BYTES, _LONG_BYTES = 4 << 10, 16 << 10


class Worker:
    """Construct it in a running event loop; `close` ends it.

    Args:
        device: Programs run there.
        budget_bytes: For everything held, see `Store`.
        lease_s: A session silent for longer is freed.
        run_limit_s: No run may take longer.
        overdue: Called with a job that goes on nevertheless: only the end of the process ends it.
        run_memory: Bounds what a run takes; None where something else does.

    Attributes:
        memory_path: Of the socket that hands out shared memory, empty without one.
        socket_path: Of a Unix socket beside a TCP address, empty without one.
        last_error: Of the last request that failed by a fault of the worker's own, and when, in seconds since 1970.
        streams: How many are open that stay so, of all sessions.
        unnamed_streams: How many more are open and have named no session yet.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        lease_s: float,
        run_limit_s: float = RUN_LIMIT_S,
        overdue: Callable[[Job], None] = lambda _: None,
        run_memory: RunMemory | None = None,
    ) -> None:
        self.device = device
        self.lease_s = lease_s
        self.epoch = secrets.token_hex(8)
        schedule = Schedule()
        self.store: Store[Held] = Store(budget_bytes, schedule.last_needed, is_same=is_same)
        self.segments = SegmentEngine(self.store, schedule, run_limit_s, overdue)
        self.sessions: dict[str, SessionState] = {}
        self.draining = False
        self.memory_path = self.socket_path = ""
        self.last_error = ("", 0.0)
        self.streams = self.unnamed_streams = 0
        self._reading = asyncio.Lock()
        self._known = KnownDigests()
        self._run_memory = run_memory
        self._run_limit_s = run_limit_s
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Frees everything. What the executor runs is ended between two ops, and waited for."""
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        for session in self.sessions.values():
            for segment in session.segments.values():
                segment.bounds.set(DrainingError("this worker has ended"))
        await self.segments.executor.close()
        for session_id in list(self.sessions):
            self.close_session(session_id)

    # Sessions

    def open_session(self, trainer: str, run: str = "", client_version: str = "") -> SessionState:
        """A new session. Raises BudgetError, DrainingError or LimitError."""
        self._check_draining()
        SESSIONS.check(len(self.sessions) + 1)
        expires_at = monotonic() + self.lease_s
        session = SessionState(secrets.token_hex(16), trainer, expires_at, run=run, client_version=client_version)
        self._charge(session, _SESSION_BYTES + 4 * (len(trainer) + len(run) + len(client_version)))  # 4 a character
        self.sessions[session.id] = session
        logger.info("%s (backhaul %s) opened a session", trainer, client_version, extra=about(run))
        return session

    def session(self, session_id: str) -> SessionState:
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
            logger.info("the session of %s is closed", session.trainer, extra=about(session.run))
            session.is_closed = True
            for segment in list(session.segments.values()):
                self.segments.release(segment)
            self.segments.closed(session)
            self.store.leave(session.id)
            self.store.refund(session.own_bytes)
            session.stop_telling()
            if session.memory is not None:
                session.memory.close()
        if not self.sessions:
            return_freed_memory()

    def _charge(self, session: SessionState, size_bytes: int) -> None:
        self.store.charge(f"{size_bytes} bytes of a session", size_bytes)
        session.own_bytes += size_bytes

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for session in list(self.sessions.values()):
                if session.expires_at < monotonic():
                    logger.warning("the lease of %s ran out: freed", session.trainer, extra=about(session.run))
                    self.close_session(session.id)

    # Programs and tensors

    async def put_program(self, session: SessionState, encoded: bytes) -> bytes:
        """Checks and keeps a program for a session. Returns its address. Raises BudgetError or ProgramError."""
        self._check_draining()
        if len(encoded) > MAX_PROGRAM_BYTES:
            raise ProgramError(f"a program of {len(encoded)} bytes, at most {MAX_PROGRAM_BYTES} are taken")
        # Both take long for a large one: in a thread. Short ones don't wait for those of others.
        is_long = len(encoded) > _LONG_BYTES
        address = await asyncio.to_thread(address_of_program, encoded) if is_long else address_of_program(encoded)
        if self.store.missing(session.id, [address]):
            size = _PROGRAM_BYTES + DECODED_FACTOR * len(encoded)
            self.store.expect(size)
            try:
                if is_long:
                    async with self._reading:  # one at a time: they slow all other threads down
                        program = await asyncio.to_thread(decode_program, encoded, self.device)
                else:
                    program = decode_program(encoded, self.device)
                self.session(session.id)  # which may have ended meanwhile
            except BaseException:
                self.store.abandon(size)
                raise
            self.store.arrived(session.id, address, ReadProgram(program, sha256(encoded).digest()), size)
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
        session: SessionState,
        segment_id: int,
        program_address: bytes,
        addresses: Sequence[bytes],
        transient: Sequence[int],
        generator_states: Sequence[bytes],
        name: str,
        wants_sketches: bool,
        predecessors: Mapping[int, tuple[int, int]] = {},
        *,
        is_predicted: bool = False,
    ) -> tuple[bool, list[bytes]]:
        """Saves a segment and starts to replay it, as far as room allows. A repeated save changes nothing.

        One that is predicted can't be asked for before another save has confirmed it, or replaced it.

        Returns:
            Whether the program is missing, and which tensors are; saved only if neither.

        Raises:
            BudgetError: No room.
            ProgramError: The lists do not fit the program.
        """
        self._check_draining()
        present = session.segments.get(segment_id)
        if present is not None and (is_predicted or present.is_confirmed):
            return False, []
        if present is None:
            SEGMENTS.check(len(session.segments) + 1)
            ALL_SEGMENTS.check(len(self.segments) + 1)
            NAMED.check(session.named + len(addresses))
        made_of = (program_address, *addresses)
        if present is not None and (present.made_of != made_of or wants_sketches):
            self.segments.wasted += 1
            self.segments.release(present)
            present = None
        missing = self.store.missing(session.id, addresses)
        program_missing = bool(self.store.missing(session.id, [program_address]))
        if program_missing or missing:
            return program_missing, missing
        program, sources = self._held(program_address, addresses)
        if len(addresses) != len(program.sources) or max(transient, default=-1) >= len(addresses):
            raise ProgramError(f"{len(addresses)} tensors are named for a program of {len(program.sources)} sources")
        if len(generator_states) != program.draws:
            raise ProgramError(f"{len(generator_states)} generator states came for {program.draws} draws")
        if not is_predicted and b"" in generator_states:
            raise ProgramError("a generator state is empty")
        if max(predecessors, default=-1) >= len(addresses):
            raise ProgramError(f"predecessors are named for sources {sorted(predecessors)} of {len(addresses)}")
        own_bytes = _SEGMENT_BYTES + 4 * len(name) + sum(map(len, generator_states))
        own_bytes += _NAMED_BYTES * (len(addresses) + len(generator_states) + len(predecessors))
        if present is not None:
            self.store.resize(present.key, own_bytes)
            self.segments.confirm(present, generator_states, predecessors)
            return False, []
        layouts = [layout_of(tensor) for tensor in sources]
        need = program.run_bytes([layout.gradient_bytes for layout in layouts])
        kind = sha256(program_address + b"".join(layout.full_header for layout in layouts)).digest()
        bounds = Bounds(self._run_limit_s, self._run_memory)
        work = SegmentInputs(program, sources, generator_states, wants_sketches, kind, bounds, self._known)
        segment = Segment(session, segment_id, work, name, predecessors, made_of, not is_predicted, bounds=bounds)
        passing = [addresses[position] for position in transient]
        remembered = _PASS_BYTES if len(session.segments) == session.most_segments else 0
        added = self.store.attach(segment.key, session.id, made_of, passing, need, own_bytes + remembered)
        if remembered:  # also when the segment is gone
            self.store.resize(segment.key, own_bytes)
            self._charge(session, remembered)
        session.segments[segment_id] = segment
        session.named += len(addresses)
        session.most_segments = max(session.most_segments, len(session.segments))
        self.segments.add(segment, need, added)
        if not is_predicted or program_address not in session.unpredictable:
            self.segments.ahead(segment)
        return False, []

    def segment(self, session: SessionState, segment_id: int) -> Segment:
        """A saved segment. Raises SegmentUnknownError."""
        segment = session.segments.get(segment_id)
        if segment is None or not segment.is_confirmed:
            raise SegmentUnknownError(f"this worker has no segment {segment_id} of this session")
        return segment

    def gradients(self, session: SessionState, addresses: Mapping[int, bytes]) -> dict[int, Tensor]:
        """The tensors a backward starts from. Raises TensorsMissingError."""
        missing = self.store.missing(session.id, addresses.values())
        if missing:
            raise TensorsMissingError(
                f"{len(missing)} gradients are named that this worker does not hold for this session: send them"
            )
        found = {}
        for output, address in addresses.items():
            value = self.store.value(address)
            if not isinstance(value, Tensor):
                raise ProgramError("a program is named where a gradient is expected")
            found[output] = value
        self.segments.remember(session, addresses.values())
        return found

    def _held(self, program_address: bytes, addresses: Sequence[bytes]) -> tuple[Program, list[Tensor]]:
        """A program and tensors that are here. Raises ProgramError where one is named in the place of the other."""
        read = self.store.value(program_address)
        values = [self.store.value(address) for address in addresses]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not isinstance(read, ReadProgram) or len(tensors) < len(values):
            raise ProgramError("a segment names a tensor as its program, or a program as a source")
        return read.program, tensors

    def replay_ahead(self, session: SessionState, segment_ids: Sequence[int]) -> None:
        """Starts on segments that will be asked for, as far as room allows. Unknown ones are passed over."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self.segments.ahead(segment)

    def release(self, session: SessionState, segment_ids: Sequence[int]) -> None:
        """Frees segments. Unknown ones are gone already."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self.segments.release(segment)

    @contextmanager
    def streaming(self, session: SessionState) -> Iterator[None]:
        """Around a stream that stays open. Raises LimitError for too many."""
        STREAMS.check(session.streams + 1)
        ALL_STREAMS.check(self.streams + 1)
        session.streams += 1
        self.streams += 1
        try:
            yield
        finally:
            session.streams -= 1
            self.streams -= 1

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the time until an open stream names its session. Raises LimitError if too many wait for that."""
        UNNAMED_STREAMS.check(self.unnamed_streams + 1)
        self.unnamed_streams += 1
        try:
            yield
        finally:
            self.unnamed_streams -= 1

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, waits to or to be collected, or is being sent."""
        is_answering = any(session.answers for session in self.sessions.values())
        return len(self.segments.executor) > 0 or self.segments.has_sums or is_answering

    def _check_draining(self) -> None:
        if self.draining:
            raise DrainingError("this worker is shutting down: it finishes what it has and takes nothing new")
