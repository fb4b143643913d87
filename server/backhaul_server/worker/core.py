"""The worker without its wire: who stays, and what they sent. Everything here runs in the event loop's thread."""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from backhaul_runtime.layout import Layout, layout_of
from backhaul_runtime.logs import about
from backhaul_runtime.program import Program
from backhaul_runtime.program_codec import address_of_program, decode_program
from backhaul_runtime.schedule import Schedule
from backhaul_server.worker.heap import return_freed_memory
from backhaul_server.worker.runs import Work
from backhaul_server.worker.segment import Segment, Session
from backhaul_server.worker.segments import ENTRY_BYTES, Segments
from backhaul_server.worker.store import Store

logger = logging.getLogger("backhaul.worker")
MAX_GENERATOR_BYTES = 16 << 10  # of a state; torch's largest has 5 KiB
_LEAST_PROGRAM_BYTES = 4 << 20


class Worker:
    """Construct it in a running event loop; `close` ends it.

    Args:
        device: Programs run there.
        budget_bytes: For everything held, see `Store`.
        lease_s: A session silent for longer is freed.

    Attributes:
        memory_path: Of the socket that hands out shared memory, empty without one.
        socket_path: Of a Unix socket beside a TCP address, empty without one.
        last_error: Of the last request that failed by a fault of the worker's own, and when, in seconds since 1970.
    """

    def __init__(self, device: torch.device, budget_bytes: int, lease_s: float) -> None:
        self.device = device
        self.lease_s = lease_s
        self.epoch = secrets.token_hex(8)
        schedule = Schedule()
        self.store: Store[Tensor] = Store(budget_bytes, schedule.last_needed)
        self.segments = Segments(self.store, schedule)
        self.sessions: dict[str, Session] = {}
        self.draining = False
        self.memory_path = self.socket_path = ""
        self.last_error = ("", 0.0)
        self._programs: OrderedDict[bytes, tuple[Program, int]] = OrderedDict()
        self._program_bytes = 0
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Frees everything. What the executor runs is waited for."""
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        await self.segments.executor.close()
        for session_id in list(self.sessions):
            self.close_session(session_id)

    # Sessions

    def open_session(self, trainer: str, run: str = "", client_version: str = "") -> Session:
        """A new session. Raises DrainingError."""
        self._check_draining()
        expires_at = monotonic() + self.lease_s
        session = Session(secrets.token_hex(16), trainer, expires_at, run=run, client_version=client_version)
        self.sessions[session.id] = session
        logger.info("%s (backhaul %s) opened a session", trainer, client_version, extra=about(run))
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
            logger.info("the session of %s is closed", session.trainer, extra=about(session.run))
            for segment in list(session.segments.values()):
                self.segments.release(segment)
            self.segments.closed(session)
            self.store.uncache(session.gradients)
            session.stop_telling()
            if session.memory is not None:
                session.memory.close()
        if not self.sessions:
            self.store.clear_cache()
            return_freed_memory()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for session in list(self.sessions.values()):
                if session.expires_at < monotonic():
                    logger.warning("the lease of %s ran out: freed", session.trainer, extra=about(session.run))
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
            most = max(_LEAST_PROGRAM_BYTES, self.store.budget_bytes // 256)
            while self._program_bytes > most and len(self._programs) > 1:
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
        made_of = (program_address, *addresses)
        if present is not None and (present.made_of != made_of or wants_sketches):
            self.segments.wasted += 1
            self.segments.release(present)
            present = None
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
        if not is_predicted and b"" in generator_states:
            raise ProgramError("a generator state is empty")
        if max(predecessors, default=0) >= max(1, len(addresses)):
            raise ProgramError(f"predecessors are named for sources {sorted(predecessors)} of {len(addresses)}")
        if present is not None:
            self.segments.confirm(present, generator_states, predecessors)
            return False, []
        sources = [self.store.tensor(address) for address in addresses]
        source_bytes = tuple([layout_of(tensor).gradient_bytes for tensor in sources])
        need = program.run_bytes(source_bytes) + sum(map(len, generator_states))
        work = Work(program, sources, generator_states, wants_sketches, (program_address, source_bytes))
        segment = Segment(session, segment_id, work, name, predecessors, made_of, not is_predicted)
        added = self.store.attach(segment.key, addresses, [addresses[position] for position in transient], need)
        session.segments[segment_id] = segment
        self.segments.add(segment, need, added)
        if not is_predicted or program_address not in session.unpredictable:
            self.segments.ahead(segment)
        return False, []

    def segment(self, session: Session, segment_id: int) -> Segment:
        """A saved segment. Raises SegmentUnknownError."""
        segment = session.segments.get(segment_id)
        if segment is None or not segment.is_confirmed:
            raise SegmentUnknownError(f"this worker has no segment {segment_id} of this session")
        return segment

    def gradients(self, session: Session, addresses: Mapping[int, bytes]) -> dict[int, Tensor]:
        """The tensors a backward starts from. Raises TensorsMissingError."""
        missing = self.store.missing(addresses.values())
        if missing:
            raise TensorsMissingError(f"{len(missing)} gradients are named that this worker does not hold: send them")
        found = {output: self.store.tensor(address) for output, address in addresses.items()}
        self.segments.remember(session, addresses.values())
        return found

    def replay_ahead(self, session: Session, segment_ids: Sequence[int]) -> None:
        """Starts on segments that will be asked for, as far as room allows. Unknown ones are passed over."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self.segments.ahead(segment)

    def release(self, session: Session, segment_ids: Sequence[int]) -> None:
        """Frees segments. Unknown ones are gone already."""
        for segment_id in segment_ids:
            segment = session.segments.get(segment_id)
            if segment is not None:
                self.segments.release(segment)

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, waits to or to be collected, or is being sent."""
        is_answering = any(session.answers for session in self.sessions.values())
        return len(self.segments.executor) > 0 or self.segments.has_sums or is_answering

    def _check_draining(self) -> None:
        if self.draining:
            raise DrainingError("this worker is shutting down: it finishes what it has and takes nothing new")
