"""The worker without its RPCs: sessions, and the programs and tensors that they have sent.

Everything here runs in the event loop's thread.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from time import monotonic

import torch
from torch import Tensor

from backhaul_runtime.errors import (
    BudgetError,
    DrainingError,
    ProgramError,
    SegmentUnknownError,
    SessionUnknownError,
    TensorsMissingError,
)
from backhaul_runtime.process.logs import about
from backhaul_runtime.program.codec import DECODED_FACTOR, MAX_PROGRAM_BYTES, address_of_program, decode_program
from backhaul_runtime.program.custom.names import OfferedNames
from backhaul_runtime.replay.schedule import Schedule
from backhaul_runtime.tensors.layout import Layout
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.config import EXECUTION_LIMIT_S
from backhaul_server.worker.engine.answers import Answers
from backhaul_server.worker.engine.bounds import ExecutionMemory
from backhaul_server.worker.engine.compiler import Compiler
from backhaul_server.worker.engine.device_memory import DeviceMemory
from backhaul_server.worker.engine.device_waits import DeviceWaits
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.heap import return_freed_memory
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_engine import SegmentEngine
from backhaul_server.worker.engine.segment_saver import SegmentSaver
from backhaul_server.worker.engine.store import ENTRY_BYTES, Store
from backhaul_server.worker.engine.stored_values import ReadProgram, StoredValue, is_same_at_once
from backhaul_server.worker.limits import ALL_STREAMS, SESSIONS, STREAMS, UNNAMED_STREAMS

logger = logging.getLogger("backhaul.worker")
_SESSION_BYTES = 12 << 10
"""Bytes of a session without its names."""

_PROGRAM_BYTES, _LONG_BYTES = 4 << 10, 16 << 10
"""Bytes of a program beside its decoded form, and the encoded size above which a thread decodes it."""


class Worker:
    """The state of one worker. Construct it in a running event loop; `close` ends it.

    Args:
        device: The device on which programs run.
        budget_bytes: Upper bound of everything that the worker holds, see `Store`.
        lease_s: Seconds without a request after which a session is closed.
        execution_limit_s: Seconds that an execution may take.
        overdue: Called with a job that runs on past its limit. Only the end of the process stops such a job.
        execution_memory: The memory of executions on the device; None to leave it to the store's accounts.
        is_trainers_own: Whether the only trainer has started this worker.

    Attributes:
        engine: Runs requests for segments, and keeps their results.
        answers: Counts and charges the answers that are being sent.
        saver: Checks the segments that trainers send, and saves them.
        store: The worker's memory accounts, and the tensors and programs that sessions have sent.
        sessions: Open sessions by id.
        epoch: A random name of this worker process, new with each start.
        draining: Whether the worker finishes its work and accepts nothing new.
        memory_path: Path of the socket that hands out shared memory, empty if there is none.
        socket_path: Path of a Unix socket beside a TCP address, empty if there is none.
        last_error: Message of the last request that failed by a fault of the worker, and when, in seconds since 1970.
        spared_bytes: Bytes of tensors that trainers did not send, because they sent differences from earlier ones.
        allowed: What programs may name beside torch's ops. Set once, before the worker serves anyone.
        compiler: What compiles the programs of trainers that use Inductor.
        anyone: The account of sessions that no credential has opened.
        streams: Number of open long-lived streams of all sessions.
        unnamed_streams: Number of further open streams that have not named their session yet.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        lease_s: float,
        execution_limit_s: float = EXECUTION_LIMIT_S,
        overdue: Callable[[Job], None] = lambda _: None,
        execution_memory: ExecutionMemory | DeviceMemory | None = None,
        *,
        is_trainers_own: bool = False,
    ) -> None:
        self.device = device
        self.lease_s = lease_s
        self.epoch = secrets.token_hex(8)
        schedule = Schedule()
        self.store: Store[StoredValue] = Store(budget_bytes, schedule.last_needed, is_same=is_same_at_once)
        if isinstance(execution_memory, DeviceMemory):
            self.store.measure_reserve = execution_memory.reserve_bytes
        self.engine = SegmentEngine(self.store, schedule, execution_limit_s, overdue)
        self.answers = Answers(self.store, self.engine.look_for_work)
        self.saver = SegmentSaver(
            self.store, self.engine, device, execution_limit_s, execution_memory, self._check_draining
        )
        self.sessions: dict[str, SessionState] = {}
        self.draining = False
        self.memory_path = self.socket_path = ""
        self.last_error = ("", 0.0)
        self.spared_bytes = 0
        self.allowed = OfferedNames()
        self.streams = self.unnamed_streams = 0
        self.device_waits = DeviceWaits(device)
        self.anyone = Account()
        self.compiler = Compiler(device, self.store, self.engine.executor, is_trainers_own=is_trainers_own)
        self._decoding = asyncio.Lock()  # guards the decoding of long programs, of which one runs at a time
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Cancels the execution in progress, waits until it has ended, and frees everything."""
        self._expiry.cancel()
        await asyncio.gather(self._expiry, return_exceptions=True)
        for session in self.sessions.values():
            for segment in session.segments.values():
                segment.bounds.set(DrainingError("this worker has ended"))
        await self.engine.close()
        await self.compiler.close()
        await self.device_waits.close()
        for session_id in list(self.sessions):
            self.close_session(session_id)

    # Sessions

    def open_session(
        self, trainer: str, run: str = "", client_version: str = "", account: Account | None = None
    ) -> SessionState:
        """Opens a session, for the account of a credential. Raises BudgetError, DrainingError or LimitError."""
        self._check_draining()
        account = account or self.anyone
        account.check_sessions()
        SESSIONS.check(len(self.sessions) + 1)
        expires_at = monotonic() + self.lease_s
        session = SessionState(
            secrets.token_hex(16), account, trainer, expires_at, run=run, client_version=client_version
        )
        # A character of a str takes up to 4 bytes.
        self._charge(session, _SESSION_BYTES + 4 * (len(trainer) + len(run) + len(client_version)))
        self.sessions[session.id] = session
        account.sessions += 1
        logger.info("%s opened a session with backhaul %s.", trainer, client_version, extra=about(run))
        return session

    def session(self, session_id: str) -> SessionState:
        """Returns the session of that id, and renews its lease. Raises SessionUnknownError."""
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionUnknownError(
                f"this worker has no session {session_id[:8]}…: its lease of {self.lease_s:g} s ran out, or the worker "
                "was restarted. Open a new one"
            )
        session.expires_at = monotonic() + self.lease_s
        return session

    def close_session(self, session_id: str) -> None:
        """Closes a session and frees all it holds. Does nothing for an unknown session."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            logger.info("The session of %s is closed.", session.trainer, extra=about(session.run))
            session.is_closed = True
            session.account.sessions -= 1
            for segment in list(session.segments.values()):
                self.engine.release(segment)
            self.engine.close_session(session)
            self.store.remove_owner(session)
            self.store.refund(session, session.own_bytes)
            session.close_push_queue()
            if session.memory is not None:
                session.memory.close()
        if not self.sessions:
            return_freed_memory()

    def close_revoked(self, accepts: Callable[[bytes], bool]) -> int:
        """Closes the sessions whose token is not accepted any more. Returns how many these were."""
        revoked = [session for session in self.sessions.values() if session.token and not accepts(session.token)]
        for session in revoked:
            logger.warning(
                "The token of %s was revoked: its session is closed.", session.trainer, extra=about(session.run)
            )
            self.close_session(session.id)
        return len(revoked)

    def _charge(self, session: SessionState, size_bytes: int) -> None:
        self.store.charge(session, f"{size_bytes} bytes of a session", size_bytes)
        session.own_bytes += size_bytes

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for session in list(self.sessions.values()):
                if session.expires_at < monotonic():
                    logger.warning(
                        "The lease of %s ran out: its session is closed.", session.trainer, extra=about(session.run)
                    )
                    self.close_session(session.id)

    # Programs and tensors

    async def put_program(self, session: SessionState, encoded: bytes) -> bytes:
        """Checks a program and stores it for a session. Returns its address.

        Raises:
            BudgetError: The store has no room for the program.
            CompilingError: The program is still being compiled.
            ProgramError: The program is too long, malformed or not allowed.
            SessionUnknownError: The session ended while the program was decoded.
        """
        self._check_draining()
        if len(encoded) > MAX_PROGRAM_BYTES:
            raise ProgramError(f"a program has {len(encoded)} bytes, but the limit is {MAX_PROGRAM_BYTES}")
        # Hashing and decoding a long program would block the event loop, so a thread does both. Short programs are
        # decoded here, so that they need not wait for the long programs of others.
        is_long = len(encoded) > _LONG_BYTES
        address = await asyncio.to_thread(address_of_program, encoded) if is_long else address_of_program(encoded)
        if self.store.missing(session, [address]):
            size = _PROGRAM_BYTES + DECODED_FACTOR * len(encoded)
            self.store.expect(session, size)
            try:
                if is_long:
                    async with self._decoding:  # several decoding threads would slow the event loop down
                        program = await asyncio.to_thread(decode_program, encoded, self.device)
                else:
                    program = decode_program(encoded, self.device)
                self.session(session.id)  # raises if the session ended during the decoding
                digest = sha256(encoded).digest()
                if (program.compilation is not None or program.holds_attention) and not self.allowed.compiles:
                    raise ProgramError("this worker compiles no programs: start it with --compile")
                if program.compilation is not None:
                    self.compiler.check(session.account, digest, encoded, program)
            except BaseException:
                self.store.abandon(session, size)
                raise
            self.store.arrived(session, address, ReadProgram(program, digest), size)
        return address

    def expect_tensor(self, session: SessionState, layout: Layout) -> int:
        """Reserves memory for a tensor that a session has declared. Returns the charged bytes. Raises BudgetError."""
        self._check_draining()
        # A tensor with gaps between its elements arrives packed, and is then copied into its strides.
        gaps = layout.payload_bytes if layout.payload_bytes < layout.span_bytes else 0
        charged = ENTRY_BYTES + layout.span_bytes + gaps
        self.store.expect(session, charged)
        return charged

    def lend(self, session: SessionState, address: bytes, reader: Hashable) -> Tensor:
        """Returns a tensor that a session possesses, from which another one differs.

        It is not evicted until `reader` is detached from the store, and is cached afterwards.

        Raises:
            TensorsMissingError: The session does not possess the tensor, or the store has no room for both.
        """
        if not self.store.missing(session, [address]):
            tensor = self.store.value(session, address)
            if isinstance(tensor, Tensor):
                try:
                    self.store.attach(reader, session, [address], (), 0)
                    return tensor
                except BudgetError:
                    pass
        raise TensorsMissingError(
            f"this worker does not hold the tensor {address.hex()}, from which another one differs, or has no room to "
            "keep it meanwhile: send the whole tensor"
        )

    # Segments

    def segment(self, session: SessionState, segment_id: int) -> Segment:
        """Returns a confirmed segment. Raises SegmentUnknownError."""
        segment = session.segments.get(segment_id)
        if segment is None or not segment.is_confirmed:
            raise SegmentUnknownError(f"this worker has no segment {segment_id} of this session")
        return segment

    def gradients(self, session: SessionState, addresses: Mapping[int, bytes]) -> dict[int, Tensor]:
        """Returns the gradients that a backward starts from, by output.

        Raises:
            ProgramError: An address is that of a program.
            TensorsMissingError: The session does not possess a gradient.
        """
        missing = self.store.missing(session, addresses.values())
        if missing:
            raise TensorsMissingError(
                f"{len(missing)} gradients are named that this worker does not hold for this session: send them"
            )
        gradients = {}
        for output, address in addresses.items():
            value = self.store.value(session, address)
            if not isinstance(value, Tensor):
                raise ProgramError("a program is named where a gradient is expected")
            gradients[output] = value
        self.engine.keep_gradients(session, addresses.values())
        return gradients

    def release(self, session: SessionState, segment_ids: Sequence[int], number: int = 0) -> None:
        """Frees segments. Ignores unknown segments.

        Args:
            session: The session of the trainer.
            segment_ids: The trainer's numbers for the segments.
            number: The number of the release request. Saves that were sent before it are refused from now on.
        """
        session.last_release = max(session.last_release, number)
        for segment in filter(None, map(session.segments.get, segment_ids)):
            self.engine.release(segment)

    @contextmanager
    def streaming(self, session: SessionState) -> Iterator[None]:
        """Counts a long-lived stream of a session while it is open. Raises LimitError for too many streams."""
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
        """Counts an open stream that has not named its session. Raises LimitError for too many of them."""
        UNNAMED_STREAMS.check(self.unnamed_streams + 1)
        self.unnamed_streams += 1
        try:
            yield
        finally:
            self.unnamed_streams -= 1

    @property
    def is_busy(self) -> bool:
        """Whether a job runs or waits, an answer is being sent, or gradient sums wait to be collected."""
        is_answering = any(session.answers for session in self.sessions.values())
        return self.engine.is_busy or is_answering

    def _check_draining(self) -> None:
        if self.draining:
            raise DrainingError("this worker is shutting down: it finishes its work and accepts nothing new")
