"""The connection of a session to one worker: opened, kept alive, lost, and opened again with back-off.

NOTE [Worker sessions]
1. A connection is up or down. The keeper thread renews the lease, notices failures and reconnects.
2. What the worker stores for the trainer belongs to a worker session: one session on one worker process. After a short
   interruption the worker still knows the session, and it continues. Otherwise all segments of the worker session are
   lost.
3. Nothing waits for a connection that is down: segments run on the trainer.
4. A worker process never changes its token. If our token is rejected, another process is listening, and the worker
   session is lost.
"""

import logging
import math
import os
import queue
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time

import grpc

from backhaul._observe.run_events import EventKind, RunEvents
from backhaul._worker_client.connection.calls import call_unary, close_channel
from backhaul._worker_client.connection.link_traffic import LinkTraffic
from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory
from backhaul._worker_client.connection.stubs import Stubs
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_proto.v1 import session_pb2, telemetry_pb2
from backhaul_runtime.errors import (
    AddressError,
    BackhaulError,
    BudgetError,
    ConnectError,
    CredentialError,
    LimitError,
    ProtocolVersionError,
    SessionClosedError,
    SessionUnknownError,
    SettingError,
    TransferError,
    WorkerLostError,
)
from backhaul_runtime.process.addresses import Address, is_private, socket_address
from backhaul_runtime.process.credentials import read_token
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.process.tls import TlsFiles, why_refused
from backhaul_runtime.program.custom.names import OfferedNames
from backhaul_runtime.version import version
from backhaul_runtime.wire.clock import ClockOffset
from backhaul_runtime.wire.protocol import CHANNEL_OPTIONS, PROTOCOL_VERSION, options_to

logger = logging.getLogger("backhaul")
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
KEEP_INTERVAL_S = 1.0
RECOVERY_S = 0.5
_RESTART_POLL_S = 0.05
LAST_EXECUTION = 0.1
"""The part of a worker's speed that its last execution determines."""
_HARMLESS = frozenset({"BUSY", "SLOW", "DOWN", "LOST", "DAMAGED"})
"""The statuses of errors that say nothing against the connection."""
_REPEATABLE = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "DAMAGED", ""})
"""The statuses of errors after which the worker may still have the session, and answer."""
FULL = (LimitError, BudgetError)
"""The errors of a worker that has no room for another session."""


def trainer_name() -> str:
    """Returns the host and process id of this trainer, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _is_beside(address: Address, path: str, kind: str) -> bool:
    """Whether a path belongs to the worker at an address. Behind a proxy, which must be used, it does not."""
    name = Path(address.unix_path).name if address.unix_path else str(address.port)
    return Path(path).name == f"{name}.{kind}"


class Connection:
    """A connection to one worker. Thread-safe.

    Args:
        find: Returns the worker's address, and restarts an embedded worker that died. Only one thread at a time calls
            it.
        silence_s: Seconds without a message after which the worker counts as lost.
        run: The id of the trainer's session, which may have other workers too.
        token_file: File with the worker's token; empty for no token. It is read when the connection is opened, and
            again after the token was rejected.
        shares_memory: Whether to share memory with a worker on this machine.
        takes_socket: Whether to continue over the Unix socket of a worker on this machine.
        events: Gets what happens to the worker.
        is_embedded: Whether the session has started the worker itself.

    Attributes:
        name: The address of the worker, for messages.
        run: The id of the session.
        drift: The largest drift measured for this worker, which is sent to it with each keep-alive.
        is_expelled: Whether the worker was wrong, so that it gets nothing more.
        traffic: The bytes of all messages with segments, since the session began.
        speed: The mean ratio of expected to actual durations of executions, which compares workers; 0 before the first
            execution.
    """

    def __init__(
        self,
        find: Callable[[], Address],
        silence_s: float,
        run: str = "",
        token_file: str = "",
        tls: TlsFiles | None = None,
        *,
        shares_memory: bool = True,
        takes_socket: bool = True,
        events: RunEvents | None = None,
        is_embedded: bool = False,
    ) -> None:
        self._find = find
        self._is_embedded = is_embedded
        self.run = run
        self._token_file, self._tls = token_file, tls
        self._shares_memory = shares_memory
        self._takes_socket = takes_socket
        self._has_switched = False
        self._token = ""
        self.silence_s = silence_s
        self.name = ""
        self.drift = self.speed = 0.0
        self.traffic = LinkTraffic()
        self._events = events if events is not None else RunEvents()
        self._clock = ClockOffset()
        self._worker_session: WorkerSession | None = None
        self._session_count = 0
        self._why_down = "not connected yet"
        self._last_error: BackhaulError | None = None
        self._up = False
        self._going_down = threading.Lock()  # guards the change from up to down
        self._draining = False
        self._closed = self.is_expelled = False
        self._channel: grpc.Channel | None = None
        self._stubs: Stubs
        self._memory: TrainerSharedMemory | None = None
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # wake the keeper: NOTE [Interrupts]
        self._keeper = threading.Thread(target=self._keep, name="backhaul-keeper", daemon=True)

    def open(self, timeout_s: float, *, strict: bool = False) -> None:
        """Connects for the first time. A worker that has no room for another session is asked again in the background.

        Args:
            timeout_s: Seconds to wait for the worker.
            strict: Raise an error if the worker has no room.

        Raises:
            BudgetError: Under `strict`: the worker's memory has no room for another session.
            ConnectError: No worker answers at the address. The message says what to start.
            CredentialError: The worker rejected the token, or requires one.
            LimitError: Under `strict`: the worker, or the credential, has as many sessions as it may have.
            ProtocolVersionError: The worker speaks another protocol version.
            SettingError: The token file or the files of TLS cannot be used.
        """
        address = self._find()
        try:
            self._connect(address, timeout_s)
        except FULL as error:
            if strict:
                self.close()
                raise
            self._why_down = error.message
            logger.warning("%s", error.message, extra=about(self.run))
        except (ProtocolVersionError, ConnectError, CredentialError, SettingError):
            self.close()
            raise
        except BackhaulError as error:
            self.close()
            raise self._unanswered(address, error, timeout_s) from error
        self._keeper.start()

    def start(self) -> None:
        """Connects in the background, as often as it takes."""
        self.name = self._find().text
        self._keeper.start()

    def restarted(self, why: str, timeout_s: float) -> None:
        """Waits until a worker that was ended to be started anew has a session again, or can't be started.

        Args:
            why: Why it was ended, for segments that find it down.
            timeout_s: Seconds after which this gives up. The keeper goes on.
        """
        count, deadline = self._session_count, monotonic() + timeout_s
        with self._going_down:
            self._up, self._why_down, self._last_error = False, why, None
        while not self._closed and monotonic() < deadline:
            if (self._up and self._session_count > count) or isinstance(self._last_error, ConnectError):
                return
            self._wakes.put(None)  # without the back-off
            sleep(_RESTART_POLL_S)

    def why_unanswered(self, timeout_s: float) -> BackhaulError:
        """Returns the error that `open` would raise for a worker that has not answered since `start`."""
        error = self._last_error
        if isinstance(error, (ProtocolVersionError, ConnectError, CredentialError, SettingError, *FULL)):
            return error
        return self._unanswered(self._find(), error or ConnectError("it was not tried yet"), timeout_s)

    def _unanswered(self, address: Address, error: BackhaulError, timeout_s: float) -> ConnectError:
        """Returns the error that says why no worker answers, and what to start."""
        cause = str(error.fields.get("details", "")).rpartition("last error: ")[2] or error.message
        if self._is_embedded:
            return ConnectError(
                f'the worker that connect() has started does not answer at "{address.text}" ({cause}). Start one with '
                "`backhaul worker` and give its address to connect(), or raise connect_timeout_s",
                address=address.text,
            )
        name = address.verified_name or address.host
        refused = "" if address.unix_path else why_refused(address.host, address.port, self._tls, timeout_s, name)
        if refused:
            return ConnectError(
                f'the worker at "{address.text}" and this trainer refuse each other: {refused}', address=address.text
            )
        where = address.text if address.is_local else f"0.0.0.0:{address.port} --token-file FILE"
        return ConnectError(
            f'no worker answers at "{address.text}" ({cause}). Start one there with `backhaul worker '
            f"--listen {where}`, or call connect() without an address to have one started on this machine",
            address=address.text,
        )

    @property
    def is_full(self) -> bool:
        """Whether the worker had no room for another session when it was asked last."""
        return self._worker_session is None and isinstance(self._last_error, FULL)

    @property
    def clock_offset_s(self) -> float:
        """The worker's clock minus ours, in seconds; 0 before the first answer."""
        return self._clock.estimate(time()).offset_s

    def link(self) -> telemetry_pb2.Link:
        """Returns the state of the connection, for telemetry."""
        clock, is_connected = self._clock.estimate(time()), self._up and self._worker_session is not None
        up_bytes, down_bytes = self.traffic.totals
        link = telemetry_pb2.Link(worker=self.name, up_bytes=up_bytes, down_bytes=down_bytes, connected=is_connected)
        if clock.error_s < math.inf:
            link.round_trip_s = clock.round_trip_s
            link.clock_offset_s, link.clock_error_s = clock.offset_s, clock.error_s
        return link

    @property
    def up(self) -> WorkerSession | None:
        """The worker session for new segments; None while the connection is down."""
        return self._worker_session if self._up and not self._draining and not self.is_expelled else None

    @property
    def why_down(self) -> str:
        """Why the connection is down."""
        return "the worker is shutting down" if self._up and self._draining else self._why_down

    def ran(self, expected_s: float, took_s: float) -> None:
        """Notes how long an execution took on the worker. If two threads do so at once, one execution may not count."""
        if expected_s > 0 < took_s:
            ratio = expected_s / took_s
            self.speed = self.speed + LAST_EXECUTION * (ratio - self.speed) if self.speed else ratio

    def stubs(self, worker_session: WorkerSession) -> Stubs:
        """Returns the stubs of a worker session.

        Raises WorkerLostError if it is lost or unreachable (Rules 2 and 3).
        """
        if self.is_expelled:
            raise WorkerLostError(self._why_down, status="LOST")
        if self._worker_session is not worker_session:
            raise WorkerLostError("the worker has lost the session", status="LOST")
        if not self._up:
            raise WorkerLostError("the worker is unreachable", status="DOWN")
        return self._stubs

    def trouble(self, worker_session: WorkerSession, error: WorkerLostError) -> None:
        """Notes that a call failed: the connection counts as down until the keeper thread has checked it."""
        if self._worker_session is worker_session and error.status not in _HARMLESS:
            self._down(error.message)
            self._wakes.put(None)

    def expel(self, why: str) -> None:
        """Takes the worker out of the session for good, because it was wrong. Its lease ends by itself."""
        with self._going_down:
            was_expelled, self.is_expelled = self.is_expelled, True
            self._up, self._why_down = False, why
        if not was_expelled:
            text = f"Worker {self.name} is out of the session: {why}"
            self._events.add("worker_expelled", text, worker=self.name)
            logger.error("%s.", text, extra=about(self.run))
        self._wakes.put(None)

    def recovered(self, worker_session: WorkerSession) -> bool:
        """Returns whether a worker session continues after `trouble`.

        Asks the worker once, for `RECOVERY_S` at most. Without an answer the connection counts as down.
        """
        if self._worker_session is not worker_session or self._closed or self.is_expelled:
            return False
        try:
            self._ask(worker_session, RECOVERY_S)
        except BackhaulError as error:
            self._down(error.message)
            self._wakes.put(None)
            return False
        self._up = True
        return True

    def may_repeat(self, worker_session: WorkerSession, error: BackhaulError) -> bool:
        """Returns whether to repeat a request once after an error. Only failures on the way are worth it.

        Notes the trouble. A worker's own error would occur again, and a busy worker stays busy.
        """
        if isinstance(error, WorkerLostError):
            self.trouble(worker_session, error)
            return error.status in _REPEATABLE and self.recovered(worker_session)
        return isinstance(error, TransferError)  # a damaged request, or damaged tensors of the answer

    def forked(self) -> None:
        """Detaches from the parent's connection in the child of a fork.

        Takes no lock, because its holder may not exist.
        """
        self._worker_session, self._up, self._closed = None, False, True
        if self._memory is not None:
            self._memory.forget()
        self.traffic.forked()
        self._events.forked()
        self._why_down = "the session belongs to the parent of this forked process"

    def close(self) -> None:
        """Closes the worker session and ends the threads. Does not wait for an unreachable worker."""
        self._closed = True
        self._wakes.put(None)
        worker_session, up = self._worker_session, self._up
        self._worker_session, self._up, self._why_down = None, False, "the session is closed"
        if worker_session is not None and up:
            try:
                request = session_pb2.CloseSessionRequest(session=worker_session.session)
                call_unary(self._stubs.sessions.CloseSession, request, self.silence_s)
            except BackhaulError as error:
                logger.debug("The session on %s could not be closed: %s", self.name, error, extra=about(self.run))
        self._end_memory()
        if self._channel is not None:
            self._stubs.close()
            close_channel(self._channel)  # ends the request that the keeper thread waits for
        if self._keeper.ident is not None:
            self._keeper.join()

    def _connect(self, address: Address, timeout_s: float) -> None:
        if self._closed:
            raise SessionClosedError("the session is closed")
        if self._token_file and not self._token:
            self._token = read_token(self._token_file)
        self._end_memory()
        self.name = address.text
        self._use(self._channel_to(address), has_switched=False)
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
        except FULL as error:
            raise self._full(error) from error
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
            memory := self._share(address, answer),
            memory is None and not address.unix_path and not self._has_switched,
            answer.worker_version,
            OfferedNames.of(answer.allowed),
        )
        # Opening takes longer than this request, which therefore compares the clocks better.
        self._ask(self._worker_session)
        self._up = True

    def _channel_to(self, address: Address) -> grpc.Channel:
        if self._tls is None or address.unix_path:  # a Unix socket is a matter of this machine's users
            return grpc.insecure_channel(address.target, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(**self._tls.of_channel)
        return grpc.secure_channel(address.target, credentials, options=options_to(address))

    def _use(self, channel: grpc.Channel, *, has_switched: bool) -> None:
        if self._channel is not None:
            self._stubs.close()
            close_channel(self._channel)
        self._channel, self._has_switched = channel, has_switched
        self._stubs = Stubs(channel, self._token, self.silence_s)

    def _switch(self, answer: session_pb2.OpenSessionResponse) -> None:
        """Continues over the worker's Unix socket, if the same worker listens there.

        The worker may be on another machine. Then anyone on this machine who can create that path would receive the
        token.
        """
        if not is_private(Path(answer.socket_path).parent):
            return
        try:
            channel = self._channel_to(socket_address(answer.socket_path))
        except AddressError as error:
            logger.debug("The worker's socket can't be used: %s", error, extra=about(self.run))
            return
        request = session_pb2.KeepSessionRequest(session=answer.session)
        try:
            call_unary(Stubs(channel, self._token, self.silence_s).sessions.KeepSession, request, self.silence_s)
        except BackhaulError as error:  # for example, the worker runs in another container
            logger.debug("No worker answers at %s: %s", answer.socket_path, error, extra=about(self.run))
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

    def _full(self, error: BackhaulError) -> BackhaulError:
        """Returns the error that says that the worker has no room for another session, and what to do."""
        return type(error)(
            f'the worker at "{self.name}" has no room for another session: {error.message}. Each rank of a training '
            "has a session of its own: raise the limit or add workers. With strict=False the trainer computes all "
            "segments itself until there is room",
            **error.fields,
        )

    def _ask(
        self, worker_session: WorkerSession, silence_s: float = 0.0, check: Callable[[], object] = lambda: None
    ) -> None:
        request = session_pb2.KeepSessionRequest(session=worker_session.session, drift=self.drift)
        method = self._stubs.sessions.KeepSession
        asked_at_s = time()
        answer = call_unary(method, request, silence_s or self.silence_s, wait_for_ready=True, check=check)
        self._clock.compare(asked_at_s, answer.clock_s, time())
        if answer.draining and not self._draining:
            text = f"Worker {self.name} is shutting down and takes no new segments"
            self._events.add("worker_draining", text, worker=self.name)
        self._draining = answer.draining

    def _down(self, why: str) -> None:
        with self._going_down:  # all callers of a dying worker fail at once, and only one of them logs it
            was_up, self._up, self._why_down = self._up, False, why
        if was_up:
            extra = about(self.run)
            text = f"Worker {self.name} was lost: {why}. Its segments run on the trainer until it is back"
            self._events.add("worker_lost", text, worker=self.name)
            logger.warning(
                "Worker %s: %s. Segments run on the trainer until the worker is back.", self.name, why, extra=extra
            )

    @only_in("backhaul-keeper")
    def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closed and not self.is_expelled:
            worker_session, was_up = self._worker_session, self._up
            if was_up and worker_session is not None:
                self._sleep(min(KEEP_INTERVAL_S, worker_session.lease_s / 4))
            else:
                self._sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)
            if self._closed or self.is_expelled:
                return
            try:
                self._look(worker_session)
                if was_up:  # the back-off is kept: a worker that dies again and again is retried less often
                    backoff_s = FIRST_BACKOFF_S
            except BackhaulError as error:
                self._last_error = error
                if isinstance(error, CredentialError) and error.message != self._why_down:
                    logger.warning(
                        "%s", error.message, extra=about(self.run)
                    )  # unlike a lost worker, this needs an action of the user
                self._down(error.message)
            except Exception as error:  # a bug of ours, or a system without free processes or files
                logger.exception("The connection to %s could not be maintained.", self.name, extra=about(self.run))
                self._down(f"{type(error).__name__}: {error}")

    def _sleep(self, longest_s: float) -> None:
        """Sleeps until the keeper is woken, and takes all wake-ups."""
        with suppress(queue.Empty):
            self._wakes.get(timeout=longest_s)
            while True:
                self._wakes.get_nowait()

    @only_in("backhaul-keeper")
    def _look(self, worker_session: WorkerSession | None) -> None:
        """Renews the lease of the worker session, or opens another one."""
        was_up, is_first = self._up, not self._session_count
        address = self._find()
        if worker_session is not None:
            try:
                # The connection breaks before the process has ended, so an embedded worker may only now be found dead.
                self._ask(worker_session, check=self._find)
                self._up = True
            except (SessionUnknownError, CredentialError) as error:  # Rules 2 and 4
                self._down(error.message)
                self._worker_session = worker_session = None
            except WorkerLostError:
                if self._has_switched:  # the socket may be gone although the worker is not
                    self._use(self._channel_to(address), has_switched=False)
                raise
        if worker_session is None:
            self._connect(address, self.silence_s)
        if not was_up and not self._closed:
            log = logger.info if is_first else logger.warning
            does = "has joined" if is_first else "is back"
            log("Worker %s %s.", self.name, does, extra=about(self.run))
            kind: EventKind = "worker_joined" if is_first else "worker_back"
            self._events.add(kind, f"Worker {self.name} {does}", worker=self.name)
