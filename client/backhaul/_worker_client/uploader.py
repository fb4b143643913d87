"""Sends segments behind the forward, and tells workers what is no longer needed.

One thread per link sends in order: so a segment is released after it was saved, and tensors arrive before what names
them. Copies of arguments that wait to be sent are bounded in bytes and in number; a forward that gets ahead waits.
"""

import itertools
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from backhaul._worker_client.accumulation import UncollectedGradients
from backhaul._worker_client.backward_chains import Predecessor
from backhaul._worker_client.connection import Connection, WorkerSession
from backhaul._worker_client.deadlines import SLICE_S, Liveness, call_unary, with_liveness
from backhaul._worker_client.request_stream import RequestStream
from backhaul._worker_client.shared_memory import sending
from backhaul_proto.v1 import program_pb2, segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, SegmentUnknownError, TransferError, WorkerLostError
from backhaul_runtime.process.death_queue import DeathNotice, DeathQueue
from backhaul_runtime.process.logs import about
from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import DeviceMoment, on_side_stream
from backhaul_runtime.wire.protocol import MAX_NAME
from backhaul_runtime.wire.splicing import Batch, encode_all
from backhaul_runtime.wire.tensor_stream import OutgoingTensor, batches

logger = logging.getLogger("backhaul")
MAX_KNOWN = 1 << 16
MAX_ATTEMPTS = 3
GATHER_S = 0.005
"""Releases that follow each other so closely go together: in backward each would be a call per segment."""
MOST_GATHERED = 16


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor a segment names.

    Attributes:
        address: The address of its contents in forward; empty if its contents at the time of sending are meant.
        layout: The layout of the tensor in forward.
        value: Read when it is sent; if it has changed by then the worker refuses it. None if the worker is known to
            hold the tensor and the memory here may be freed at any time.
        is_copy: Whether `value` is a copy that waits to be sent.
        is_transient: No later segment will name it.
    """

    address: Digest
    layout: Layout
    value: Tensor | None
    is_copy: bool
    is_transient: bool

    def to_read(self) -> Tensor:
        """The value. Raises WorkerLostError if it is None."""
        if self.value is None:
            raise WorkerLostError(
                "the worker evicted a parameter that FSDP has freed on the trainer as well: give the worker more "
                "--memory",
                status="BUSY",
            )
        return self.value


@dataclass(eq=False)
class SegmentUpload:
    """A segment to be saved.

    Attributes:
        worker_session: It goes there or nowhere.
        segment: Number of the segment in its session.
        program: The encoded program of the segment.
        program_address: The content address of the program.
        sources: In program order; empty once the worker has them.
        generator_states: One per node that draws.
        name: The name of the segment in messages.
        queued_bytes: Copies of arguments it holds until it is sent.
        saved: Done when the worker has it; holds the error where it has not.
        count: Told of bytes sent.
        sent: Told what sending its tensors took, once that has ended.
        wants_sketches: The worker computes other bits.
        predecessors: Segments saved before whose outputs are sources of this one.
        is_predicted: Its call has not run yet.
        superseded: Gives addresses that need not be kept for later.
        made: When the sources were, on their accelerators.
        owner: The object that will request the segment. If it has died, the upload is skipped.
    """

    worker_session: WorkerSession
    segment: int
    program: bytes
    program_address: bytes
    sources: Sequence[SourceTensor]
    generator_states: Sequence[bytes]
    name: str
    queued_bytes: int
    count: Callable[[int], None]
    sent: Callable[[float], None]
    wants_sketches: bool = False
    predecessors: Sequence[Predecessor] = ()
    is_predicted: bool = False
    superseded: Callable[[], Sequence[bytes]] = tuple
    made: Sequence[DeviceMoment] = ()
    saved: "Future[None]" = field(default_factory=Future)
    owner: DeathNotice | None = None


@dataclass(frozen=True, slots=True)
class _Release:
    worker_session: WorkerSession
    segment: int


_Item = SegmentUpload | _Release | Callable[[], None]


class _UnansweredError(Exception):
    """Nobody knows what the worker took of a message."""


class Uploader:
    """The sending side of a link.

    Args:
        connection: The connection to the worker.
        inflight_bytes: Bound of what waits to be sent.
        inflight_boundaries: Bound of the segments whose inputs are among it.

    Attributes:
        watch: Sees every message that the worker takes.
        uncollected: Gradients that the worker keeps. What was committed travels with releases, before them.
    """

    def __init__(self, connection: Connection, inflight_bytes: int, inflight_boundaries: int) -> None:
        self._connection = connection
        self._limit_bytes = inflight_bytes
        self._limit_boundaries = inflight_boundaries
        self.watch = Liveness(connection.silence_s)
        self.uncollected = UncollectedGradients(connection)
        # put() of a SimpleQueue may be called by the garbage collector during another put().
        self._queue: queue.SimpleQueue[_Item | DeathNotice | None] = queue.SimpleQueue()
        self._endings = DeathQueue(self._queue.put)
        self._waiting: set[SegmentUpload] = set()  # those with copies
        self._sent: queue.SimpleQueue[Sequence[SourceTensor]] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._known_lock = threading.Lock()
        self._known_of: WorkerSession | None = None
        self._thread = threading.Thread(target=self._serve, name="backhaul-upload", daemon=True)
        self._thread.start()

    def save(self, save: SegmentUpload) -> None:
        """Queues a segment; waits for room while the worker is there to make some."""
        self.free_sent()
        with self._room:
            while save.queued_bytes and self._is_full(save):
                if self._connection.up is not save.worker_session:
                    break
                self._room.wait(SLICE_S)
            try:
                if save.queued_bytes:
                    self._waiting.add(save)
                self._queue.put(save)
            except BaseException:  # Ctrl-C, also after it was put
                self._waiting.discard(save)
                raise

    def _is_full(self, save: SegmentUpload) -> bool:
        queued_bytes = sum(waiting.queued_bytes for waiting in self._waiting)
        too_large = queued_bytes and queued_bytes + save.queued_bytes > self._limit_bytes
        return bool(too_large) or len(self._waiting) >= self._limit_boundaries

    def free_sent(self) -> None:
        """Frees what has been sent. Called by the trainer's threads: a profiler does not see what others free."""
        with suppress(queue.Empty):
            while True:
                self._sent.get_nowait()

    def release(self, worker_session: WorkerSession, segment: int) -> None:
        """Queues the release of a segment."""
        self._queue.put(_Release(worker_session, segment))

    def release_after(self, owner: object, worker_session: WorkerSession, segment: int) -> DeathNotice:
        """Releases a segment when its owner has died. NOTE [Endings]."""
        return self._endings.watch(owner, _Release(worker_session, segment))

    def call_after(self, owner: object, then: Callable[[], None]) -> DeathNotice:
        """Has the sending thread do something when its owner has died. NOTE [Endings]."""
        return self._endings.watch(owner, then)

    def cancel_notice(self, ending: DeathNotice) -> None:
        """Nothing more is to be done when the owner dies."""
        self._endings.take(ending)

    def segments(self) -> list[int]:
        """The numbers of the segments whose owners are there."""
        return [then.segment for then in self._endings.to_come() if isinstance(then, _Release)]

    def close(self) -> None:
        """Sends nothing more and ends the thread. Call it after the link was closed."""
        self._queue.put(None)
        self._thread.join()

    def put(
        self, worker_session: WorkerSession, outgoing_tensors: Iterable[OutgoingTensor], count: Callable[[int], None]
    ) -> None:
        """Sends tensors. Called by any thread, waits until they are there.

        Raises:
            WorkerError: The worker refuses them.
            WorkerLostError: Silence, or the connection broke.
        """
        with sending(worker_session.memory, count) as write:
            addresses = self._put(worker_session, batches(outgoing_tensors, write), count)
        self.learn(worker_session, addresses)

    def _put(self, worker_session: WorkerSession, sent: Iterable[Batch], count: Callable[[int], None]) -> list[bytes]:
        def encoded() -> Iterator[bytes]:
            named = tensor_pb2.PutTensorsRequest(session=worker_session.session)
            for message in encode_all(sent, named.TENSORS_FIELD_NUMBER, named):
                count(len(message))
                yield message

        messages = with_liveness(encoded(), self.watch)
        method = self._connection.stubs(worker_session).tensors.PutTensors
        return list(call_unary(method, messages, self._connection.silence_s, self.watch).addresses)

    def missing(
        self, worker_session: WorkerSession, outgoing_tensors: Iterable[OutgoingTensor]
    ) -> list[OutgoingTensor]:
        """Those that the worker does not have, as far as is known."""
        return [outgoing for outgoing in outgoing_tensors if not self.knows(worker_session, outgoing.address)]

    def learn(self, worker_session: WorkerSession, addresses: Iterable[bytes]) -> None:
        """Notes what the worker holds. It may give some up; then it says what is missing."""
        with self._known_lock:
            if self._known_of is not worker_session:
                self._known.clear()
                self._known_of = worker_session
            for address in addresses:
                self._known[address] = None
                self._known.move_to_end(address)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def unlearn(self, addresses: Iterable[bytes]) -> None:
        """Notes what the worker no longer holds."""
        with self._known_lock:
            for address in addresses:
                self._known.pop(address, None)

    def holder_of(self, address: bytes) -> WorkerSession | None:
        """The generation that holds a tensor, as far as is known."""
        with self._known_lock:
            return self._known_of if address in self._known else None

    def knows(self, worker_session: WorkerSession, address: bytes) -> bool:
        """Whether the worker holds a tensor or program, as far as is known."""
        with self._known_lock:
            return self._known_of is worker_session and address in self._known

    def _serve(self) -> None:
        held: list[_Release] = []
        while True:
            item: _Item | DeathNotice | None = None  # nothing of the last one stays until the next comes
            is_soon = True
            try:
                item = self._queue.get(timeout=GATHER_S if held else None)
            except queue.Empty:
                is_soon = False
            if isinstance(item, DeathNotice):
                item = self._endings.take(item)
            if isinstance(item, _Release):
                held.append(item)
            if held and (not isinstance(item, _Release) or len(held) == MOST_GATHERED):
                self._release(held)
                held = []
            if isinstance(item, SegmentUpload):
                self._save(item)
            elif callable(item):
                self._do(item)
            elif item is None and is_soon:
                return

    def _do(self, then: Callable[[], None]) -> None:
        try:
            then()
        except Exception:  # a bug of ours must not end the thread that forward waits for
            logger.exception("letting go failed", extra=about(self._connection.run))

    def _save(self, save: SegmentUpload) -> None:
        try:
            if save.owner is not None and save.owner() is None:
                raise SegmentUnknownError("released before it was sent")
            self._send(save)
            self._sent.put(save.sources)
            save.sources = ()
            save.saved.set_result(None)
        except BackhaulError as error:
            if isinstance(error, WorkerLostError):
                self._connection.trouble(save.worker_session, error)
            error.__traceback__ = None  # leads to tensors, and the future keeps the error
            save.saved.set_exception(error)
        except Exception as error:  # a bug of ours must end in a fallback, not in a thread that is gone
            logger.exception("sending a segment failed", extra=about(self._connection.run, save.name))
            save.saved.set_exception(WorkerLostError(f"sending failed: {type(error).__name__}: {error}"))
        finally:
            if save.is_predicted:  # its copies are not used for recomputation
                self._sent.put(save.sources)
                save.sources = ()
            with self._room:
                self._waiting.discard(save)
                self._room.notify_all()

    def _send(self, save: SegmentUpload) -> None:
        worker_session = save.worker_session
        with on_side_stream(save.made):
            addresses = [
                address
                if (address := read(source.address)) or source.layout.device == "cpu"
                else address_of(source.to_read())
                for source in save.sources
            ]
        request = segment_pb2.SaveSegmentRequest(
            key=segment_pb2.OperationKey(
                session=worker_session.session, segment=save.segment, operation=segment_pb2.OPERATION_SAVE
            ),
            program=save.program_address,
            transient_sources=[i for i, source in enumerate(save.sources) if source.is_transient],
            generator_states=save.generator_states,
            name=save.name[:MAX_NAME],
            wants_sketches=save.wants_sketches,
            predecessors=[
                segment_pb2.Predecessor(source=predecessor.source, segment=segment.number, output=predecessor.output)
                for predecessor in save.predecessors
                if (segment := predecessor.segment()) is not None
            ],
            predicted=save.is_predicted,
            superseded=save.superseded(),
        )
        for _ in range(MAX_ATTEMPTS):
            if not self.knows(worker_session, save.program_address):
                self._put_program(save)
            answer = self._ask_to_save(save, request, addresses)
            if not answer.program_missing and not answer.missing_tensors:
                if worker_session.memory is not None and not save.is_predicted:
                    worker_session.memory.make_room()
                return
            self.unlearn([*answer.missing_tensors, *([save.program_address] if answer.program_missing else [])])
        raise WorkerLostError(
            f"the worker gave up tensors of segment {save.name} as fast as they came: give it more --memory",
            status="BUSY",
        )

    def _ask_to_save(
        self, save: SegmentUpload, request: segment_pb2.SaveSegmentRequest, addresses: list[bytes]
    ) -> segment_pb2.SaveSegmentResponse:
        stubs = self._connection.stubs(save.worker_session)
        try:
            answer = self._send_missing(save, request, addresses, stubs.short_saves)
            if answer is not None and not answer.refused:
                return answer
        except (TransferError, _UnansweredError) as error:  # what is wrong the call says
            logger.debug("saving on the open stream: %r", error, extra=about(self._connection.run, save.name))
        self._send_missing(save, request, addresses)
        request.sources[:] = addresses
        save.count(request.ByteSize())
        response: segment_pb2.SaveSegmentResponse = call_unary(
            stubs.segments.SaveSegment, request, self._connection.silence_s
        )
        return response

    def _send_missing(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveSegmentRequest,
        addresses: list[bytes],
        short: RequestStream | None = None,
    ) -> segment_pb2.SaveSegmentResponse | None:
        """Sends what the worker does not have, with the request if that goes on a stream and all fits one message.

        The worker says which addresses the sources have that came without. Returns its answer if the request was sent.
        """
        worker_session = save.worker_session
        outgoing_tensors: dict[bytes | int, OutgoingTensor] = {}
        with on_side_stream(save.made):
            for index, (address, source) in enumerate(zip(addresses, save.sources, strict=True)):
                if not self.knows(worker_session, address):
                    outgoing_tensors[address or index] = OutgoingTensor(source.to_read(), source.layout, address)
        began, missing, answer = perf_counter(), list[bytes](), None
        with sending(worker_session.memory, save.count) as write:
            sent = batches(outgoing_tensors.values(), write)
            begin = list(itertools.islice(sent, 2))
            if short is not None and not begin[1:]:
                request.sources[:] = addresses
                (encoded,) = encode_all(begin, request.TENSORS_FIELD_NUMBER, request)
                save.count(len(encoded))
                answer = short.try_call(encoded)
                if answer is None:
                    raise _UnansweredError
                missing = list(answer.stored)
                if outgoing_tensors and not missing:
                    raise TransferError("the worker did not take what came with a segment")
                self.watch.sign()
            elif begin:
                missing = self._put(worker_session, itertools.chain(begin, sent), save.count)
            if len(missing) != len(outgoing_tensors):
                raise WorkerLostError(f"the worker says that it took {len(missing)} tensors of {len(outgoing_tensors)}")
        for key, address in zip(outgoing_tensors, missing, strict=True):
            if isinstance(key, int):
                addresses[key] = address
        if outgoing_tensors:
            save.sent(perf_counter() - began)
            self.learn(worker_session, missing)
        return answer

    def _put_program(self, save: SegmentUpload) -> None:
        request = program_pb2.PutProgramRequest(session=save.worker_session.session, program=save.program)
        save.count(request.ByteSize())
        call_unary(self._connection.stubs(save.worker_session).programs.PutProgram, request, self._connection.silence_s)
        self.learn(save.worker_session, [save.program_address])

    def _release(self, releases: Sequence[_Release]) -> None:
        for worker_session, group in itertools.groupby(releases, lambda release: release.worker_session):
            keys = [
                segment_pb2.OperationKey(
                    session=worker_session.session, segment=release.segment, operation=segment_pb2.OPERATION_RELEASE
                )
                for release in group
            ]
            commits = self.uncollected.commits(worker_session)
            request = segment_pb2.ReleaseSegmentsRequest(keys=keys, commits=commits)
            try:
                stubs = self._connection.stubs(worker_session)
                call_unary(stubs.segments.ReleaseSegments, request, self._connection.silence_s)
                self.uncollected.taken(commits)
            except WorkerLostError as error:
                self._connection.trouble(worker_session, error)  # what it held goes with the session's lease
            except BackhaulError as error:
                logger.debug("releasing segments: %s", error, extra=about(self._connection.run))
            except Exception:  # a bug of ours must not end the thread that forward waits for
                logger.exception("releasing segments failed", extra=about(self._connection.run))
