"""A session's connection to one worker: opened, kept, lost, and opened again with back-off.

NOTE [Generations]
1. A link is up or down. A thread of its own keeps the lease, notices trouble and reconnects.
2. What the worker holds for us belongs to a generation: one session on one worker process. After a short cut the worker
   still knows the session, and the generation goes on. If it does not, all segments of the old one are lost.
3. While the link is down nothing waits for it: segments run on the trainer.
4. A worker keeps its token for life. One that takes ours no longer is another process, and the generation is lost.
"""

import logging
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time

import grpc

from backhaul._worker_client.deadlines import AuthenticatedMethod, call_unary, close_channel
from backhaul._worker_client.pushed_results import PushedResults
from backhaul._worker_client.request_stream import RequestStream
from backhaul._worker_client.shared_memory import TrainerSharedMemory
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.errors import (
    BackhaulError,
    ConnectError,
    CredentialError,
    ProtocolVersionError,
    SessionClosedError,
    SessionUnknownError,
    SettingError,
    WorkerLostError,
)
from backhaul_runtime.process.addresses import Address, is_private
from backhaul_runtime.process.credentials import bearer, read_token
from backhaul_runtime.process.logs import about
from backhaul_runtime.version import version
from backhaul_runtime.wire.protocol import CHANNEL_OPTIONS, PROTOCOL_VERSION
from backhaul_runtime.wire.stubs import stub

logger = logging.getLogger("backhaul")
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
KEEP_INTERVAL_S = 1.0
RECOVERY_S = 0.5
KEPT_COMPARISONS = 32


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """One session on one worker process, and what the worker said of itself.

    Attributes:
        number: Counted by the link.
        session: The worker's name for the session.
        budget_bytes: The memory budget of the worker.
        fingerprint: What its numbers depend on.
        lease_s: The session ends after so much silence.
        memory: What is shared with the worker, if that is on this machine.
    """

    number: int
    session: str
    budget_bytes: int
    fingerprint: Mapping[str, str]
    lease_s: float
    memory: TrainerSharedMemory | None = None


def trainer_name() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Stubs:
    """The services at the other end of a channel.

    Args:
        channel: The gRPC channel to a worker.
        token: Shown with every call.
        silence_s: Longer than any answer on the streams of NOTE [Short] may take.
    """

    def __init__(self, channel: grpc.Channel, token: str, silence_s: float) -> None:
        self.sessions = stub(channel, session_pb2.DESCRIPTOR.services_by_name["SessionService"])
        self.programs = stub(channel, program_pb2.DESCRIPTOR.services_by_name["ProgramService"])
        self.tensors = stub(channel, tensor_pb2.DESCRIPTOR.services_by_name["TensorService"])
        self.segments = stub(channel, segment_pb2.DESCRIPTOR.services_by_name["SegmentService"])
        self.telemetry = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"])
        if token:
            for service in list(vars(self).values()):
                for name, method in list(vars(service).items()):
                    setattr(service, name, AuthenticatedMethod(method, bearer(token)))
        self.short_saves = RequestStream(self.segments.ShortSaves, silence_s)
        self.short_backwards = RequestStream(self.segments.ShortBackwards, silence_s)
        self.pushed_results = PushedResults(self.segments.Ahead)

    def close(self) -> None:
        """Ends what is open and idle."""
        self.short_saves.close()
        self.short_backwards.close()
        self.pushed_results.close()


class ClockOffset:
    """How far a worker's clock is from ours, by the quickest of the last answers: it can be off by half their time.

    After D. Mills' Network Time Protocol, RFC 5905, section 10.
    """

    def __init__(self) -> None:
        self._comparisons: deque[tuple[float, float]] = deque(maxlen=KEPT_COMPARISONS)

    def compare(self, asked_at_s: float, theirs_s: float, answered_at_s: float) -> None:
        """Takes what a worker's clock showed between two moments of ours."""
        self._comparisons.append((answered_at_s - asked_at_s, theirs_s - (asked_at_s + answered_at_s) / 2))

    @property
    def clock_offset_s(self) -> float:
        """Its clock less ours, 0 before the first answer."""
        return min(self._comparisons, default=(0.0, 0.0))[1]


def _is_beside(address: Address, path: str, kind: str) -> bool:
    """Whether a path is that of the worker at an address: behind a proxy, which one wants to use, it is not."""
    name = Path(address.unix_path).name if address.unix_path else str(address.port)
    return Path(path).name == f"{name}.{kind}"


class Connection:
    """A connection to one worker.

    Args:
        find: Gives the worker's address; an embedded worker that died is started again. Called by one thread at a time.
        silence_s: A worker silent for so long is taken for lost.
        run: Names the trainer's session, which may have other links.
        token_file: With the token that the worker wants to see, empty for none. It is read when the link opens, and
            again after it was denied.
        shares_memory: Whether to share memory with a worker on this machine.
        takes_socket: Whether to go on over such a worker's Unix socket.

    Attributes:
        name: The address of the worker, for messages.
        run: The id of the session.
        drift: The largest drift measured for this worker, which is sent to it with each keep-alive.
    """

    def __init__(
        self,
        find: Callable[[], Address],
        silence_s: float,
        run: str = "",
        token_file: str = "",
        *,
        shares_memory: bool = True,
        takes_socket: bool = True,
    ) -> None:
        self._find = find
        self.run = run
        self._token_file = token_file
        self._shares_memory = shares_memory
        self._takes_socket = takes_socket
        self._has_switched = False
        self._token = ""
        self.silence_s = silence_s
        self.name = ""
        self.drift = 0.0
        self._clock = ClockOffset()
        self._worker_session: WorkerSession | None = None
        self._session_count = 0
        self._why_down = "not connected yet"
        self._up = False
        self._going_down = threading.Lock()
        self._draining = False
        self._closed = False
        self._channel: grpc.Channel | None = None
        self._stubs: Stubs
        self._memory: TrainerSharedMemory | None = None
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="backhaul-keeper", daemon=True)

    def open(self, timeout_s: float) -> None:
        """Connects for the first time.

        Raises:
            ConnectError: Nobody answers, or not a worker, with the address and what to start.
            CredentialError: The worker wants another token than it is shown.
            ProtocolVersionError: A worker of another version answers.
            SettingError: The token file can't be read.
        """
        address = self._find()
        try:
            self._connect(address, timeout_s)
        except (ProtocolVersionError, ConnectError, CredentialError, SettingError):
            self.close()
            raise
        except BackhaulError as error:
            self.close()
            cause = str(error.fields.get("details", "")).rpartition("last error: ")[2] or error.message
            where = address.text if address.is_local else f"0.0.0.0:{address.port} --token-file FILE"
            raise ConnectError(
                f'nobody answers as a worker at "{address.text}" ({cause}). Start one there with `backhaul worker '
                f"--listen {where}`, or call connect() without an address to have one started on this machine",
                address=address.text,
            ) from error
        self._keeper.start()

    @property
    def clock_offset_s(self) -> float:
        """The worker's clock less ours."""
        return self._clock.clock_offset_s

    @property
    def up(self) -> WorkerSession | None:
        """What new segments can be sent to, None while there is nothing."""
        return self._worker_session if self._up and not self._draining else None

    @property
    def why_down(self) -> str:
        """Why there is nothing to send to."""
        return "the worker is shutting down" if self._up and self._draining else self._why_down

    def stubs(self, worker_session: WorkerSession) -> Stubs:
        """The services of a generation. Raises WorkerLostError where it is gone or out of reach (Rules 2 and 3)."""
        if self._worker_session is not worker_session:
            raise WorkerLostError("the worker lost what it held", status="LOST")
        if not self._up:
            raise WorkerLostError("the worker is out of reach", status="DOWN")
        return self._stubs

    def trouble(self, worker_session: WorkerSession, error: WorkerLostError) -> None:
        """A call met silence or a broken connection: down until the keeper has looked."""
        if self._worker_session is worker_session and error.status not in {"BUSY", "SLOW", "DOWN", "LOST", "DAMAGED"}:
            self._down(error.message)
            self._wake.set()

    def recovered(self, worker_session: WorkerSession) -> bool:
        """Whether a generation goes on after `trouble`. Asks the worker once, and not for long."""
        if self._worker_session is not worker_session or self._closed:
            return False
        try:
            self._ask(worker_session, RECOVERY_S)
        except BackhaulError:
            return False
        self._up = True
        return True

    def forked(self) -> None:
        """In the child of a fork: the connection is the parent's. Takes no lock, for its holder may not exist here."""
        self._worker_session, self._up, self._closed = None, False, True
        if self._memory is not None:
            self._memory.forget()
        self._why_down = "the session belongs to the parent of this forked process"

    def close(self) -> None:
        """Ends the session on the worker and the link's threads. Does not wait for a worker that is out of reach."""
        self._closed = True
        self._wake.set()
        worker_session, up = self._worker_session, self._up
        self._worker_session, self._up, self._why_down = None, False, "the session is closed"
        if worker_session is not None and up:
            try:
                request = session_pb2.CloseSessionRequest(session=worker_session.session)
                call_unary(self._stubs.sessions.CloseSession, request, self.silence_s)
            except BackhaulError as error:
                logger.debug("closing the session on %s: %s", self.name, error, extra=about(self.run))
        self._end_memory()
        if self._channel is not None:
            self._stubs.close()
            close_channel(self._channel)  # ends what the keeper waits for
        if self._keeper.ident is not None:
            self._keeper.join()

    def _connect(self, address: Address, timeout_s: float) -> None:
        if self._closed:
            raise SessionClosedError("the session is closed")
        if self._token_file and not self._token:
            self._token = read_token(self._token_file)
        self._end_memory()
        self.name = address.text
        self._use(self._channel_to(address.target), has_switched=False)
        request = session_pb2.OpenSessionRequest(
            protocol_version=PROTOCOL_VERSION,
            client_version=version(),
            trainer=trainer_name(),
            run=self.run,
        )
        asked_at_s = time()
        try:
            answer = call_unary(self._stubs.sessions.OpenSession, request, timeout_s)
        except CredentialError as error:
            self._token = ""
            raise self._denied() from error
        if answer.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"the worker at {address.text} speaks protocol {answer.protocol_version} (backhaul "
                f"{answer.worker_version}), this trainer {PROTOCOL_VERSION} (backhaul {version()}): install the same "
                "version on both",
                trainer=PROTOCOL_VERSION,
                worker=answer.protocol_version,
            )
        if self._takes_socket and _is_beside(address, answer.socket_path, "sock"):
            self._switch(answer)
        self._clock = ClockOffset()
        self._clock.compare(asked_at_s, answer.clock_s, time())
        self._session_count += 1
        self._worker_session = WorkerSession(
            self._session_count,
            answer.session,
            answer.budget_bytes,
            dict(answer.fingerprint),
            answer.lease_s,
            self._share(address, answer),
        )
        self._ask(self._worker_session)  # opening takes longer, so the clocks are better compared by this
        self._up = True

    def _channel_to(self, target: str) -> grpc.Channel:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)

    def _use(self, channel: grpc.Channel, *, has_switched: bool) -> None:
        if self._channel is not None:
            self._stubs.close()
            close_channel(self._channel)
        self._channel, self._has_switched = channel, has_switched
        self._stubs = Stubs(channel, self._token, self.silence_s)

    def _switch(self, answer: session_pb2.OpenSessionResponse) -> None:
        """Goes on over the worker's Unix socket, if that worker is who answers there.

        The worker may be on another machine. Here, whoever could make that path would be shown the token.
        """
        if not is_private(Path(answer.socket_path).parent):
            return
        channel = self._channel_to(f"unix:{answer.socket_path}")
        request = session_pb2.KeepSessionRequest(session=answer.session)
        try:
            call_unary(Stubs(channel, self._token, self.silence_s).sessions.KeepSession, request, self.silence_s)
        except BackhaulError as error:  # it is in another container, for one
            logger.debug("no worker at %s: %s", answer.socket_path, error, extra=about(self.run))
            close_channel(channel)
        else:
            self._use(channel, has_switched=True)

    def _share(self, address: Address, answer: session_pb2.OpenSessionResponse) -> TrainerSharedMemory | None:
        if self._shares_memory and _is_beside(address, answer.memory_path, "memory"):
            self._memory = TrainerSharedMemory(answer.memory_path, answer.session)
        return self._memory

    def _end_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _denied(self) -> CredentialError:
        how = f'does not take the token in "{self._token_file}"' if self._token_file else "wants a token"
        return CredentialError(
            f'the worker at "{self.name}" {how}: give the token file that it was started with as token_file, or as '
            "BACKHAUL_TOKEN_FILE",
            address=self.name,
        )

    def _ask(
        self, worker_session: WorkerSession, silence_s: float = 0.0, check: Callable[[], object] = lambda: None
    ) -> None:
        request = session_pb2.KeepSessionRequest(session=worker_session.session, drift=self.drift)
        method = self._stubs.sessions.KeepSession
        asked_at_s = time()
        answer = call_unary(method, request, silence_s or self.silence_s, wait_for_ready=True, check=check)
        self._clock.compare(asked_at_s, answer.clock_s, time())
        self._draining = answer.draining

    def _down(self, why: str) -> None:
        with self._going_down:  # all callers of a dying worker get here at once, and one of them logs it
            was_up, self._up, self._why_down = self._up, False, why
        if was_up:
            extra = about(self.run)
            logger.warning("worker %s: %s. Segments run on the trainer until it is back", self.name, why, extra=extra)

    def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed:
            worker_session, was_up = self._worker_session, self._up
            if was_up and worker_session is not None:
                self._wake.wait(min(KEEP_INTERVAL_S, worker_session.lease_s / 4))
            else:
                self._wake.wait(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)
            self._wake.clear()
            if self._closed:
                return
            try:
                self._look(worker_session)
                if was_up:  # and stays so: a worker that dies as often as it comes back is asked ever less often
                    backoff_s = FIRST_BACKOFF_S
            except BackhaulError as error:
                if isinstance(error, CredentialError) and error.message != self._why_down:
                    logger.warning(
                        "%s", error.message, extra=about(self.run)
                    )  # unlike a lost worker, this needs an action of the user
                self._down(error.message)
            except Exception as error:  # a bug of ours, or a system without processes or files to spare
                logger.exception("looking after the connection to %s failed", self.name, extra=about(self.run))
                self._down(f"{type(error).__name__}: {error}")

    def _look(self, worker_session: WorkerSession | None) -> None:
        """Keeps the generation, or starts another."""
        was_up = self._up
        address = self._find()
        if worker_session is not None:
            try:
                # The connection ends before the process does: a worker of our own may be found dead only now.
                self._ask(worker_session, check=self._find)
                self._up = True
            except (SessionUnknownError, CredentialError) as error:  # Rules 2 and 4
                self._down(error.message)
                self._worker_session = worker_session = None
            except WorkerLostError:
                if self._has_switched:  # the socket may be gone while the worker is not
                    self._use(self._channel_to(address.target), has_switched=False)
                raise
        if worker_session is None:
            self._connect(address, self.silence_s)
        if not was_up and not self._closed:
            logger.warning("worker %s is back", self.name, extra=about(self.run))
