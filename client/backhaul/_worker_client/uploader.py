"""Uploads segments while forward continues, and sends releases.

One thread per connection sends everything in order. So a segment is released after it was saved, and tensors arrive
before the segment that names them. Copies of arguments that wait to be sent are bounded in bytes and number; forward
blocks at the bound.
"""

import itertools
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from torch import Tensor

from backhaul._worker_client.accumulation import UncollectedGradients
from backhaul._worker_client.backward_chains import Predecessor
from backhaul._worker_client.compression import Compression, CopyMemory, TensorDifference
from backhaul._worker_client.connection import Connection, WorkerSession
from backhaul._worker_client.deadlines import LANE_LOST, SLICE_S, Liveness, call_unary, with_liveness
from backhaul._worker_client.request_stream import RequestStream
from backhaul._worker_client.shared_memory import sending
from backhaul._worker_client.striped_upload import StripedUpload
from backhaul_proto.v1 import program_pb2, segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, SegmentUnknownError, TransferError, WorkerError, WorkerLostError
from backhaul_runtime.process.death_queue import DeathNotice, DeathQueue
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import DeviceMoment, on_side_stream
from backhaul_runtime.wire.protocol import MAX_NAME
from backhaul_runtime.wire.splicing import Batch, encode_all
from backhaul_runtime.wire.stripes import can_stripe
from backhaul_runtime.wire.tensor_stream import OutgoingTensor, batches, encode_layout

logger = logging.getLogger("backhaul")
MAX_KNOWN = 1 << 16
MAX_ATTEMPTS = 3
GATHER_S = 0.005
"""Seconds within which releases are sent together. In backward there would otherwise be one call per segment."""
MOST_GATHERED = 16
MEASURED_BYTES = 64 << 10
"""Sending fewer bytes takes no longer than a round trip, so it says nothing about the link's rate."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor that a segment names.

    Attributes:
        address: The address of its contents in forward; empty if its contents at the time of sending count.
        layout: The layout of the tensor in forward.
        value: The tensor to send. The worker rejects it if it has changed since forward. None if the worker stores the
            tensor and its memory here may be freed at any time.
        is_copy: Whether `value` is a copy that waits to be sent.
        is_transient: Whether no later segment will name it.
    """

    address: Digest
    layout: Layout
    value: Tensor | None
    is_copy: bool
    is_transient: bool

    def to_read(self) -> Tensor:
        """Returns the value. Raises WorkerLostError if it is None."""
        if self.value is None:
            raise WorkerLostError(
                "the worker evicted a parameter that FSDP has freed on the trainer as well: give the worker more "
                "--memory",
                status="BUSY",
            )
        return self.value


@dataclass(eq=False)
class SegmentUpload:
    """A segment to be saved on a worker.

    Attributes:
        worker_session: The worker session to send it to.
        segment: Number of the segment in its session.
        program: The encoded program of the segment.
        program_address: The content address of the program.
        sources: The sources in the order of the program; empty once the worker has them.
        generator_states: One state for each node that draws.
        name: The checkpointed call's name, for messages.
        queued_bytes: Bytes of copies of arguments that it holds until it has been sent.
        saved: Completes when the worker has saved the segment, or with the error that prevented that.
        count: Called with the number of sent bytes.
        sent: Called with the times of sending its tensors, after that has ended.
        spared: Called with the number of bytes that differences have spared.
        wants_sketches: Whether the worker computes other bits, so that random projections are compared.
        predecessors: Earlier segments on the same worker whose outputs are sources of this one.
        boundaries: Sources that are outputs of other earlier segments.
        is_predicted: Whether its call has not ended yet.
        superseded: Returns the addresses of cached tensors that will not be named again.
        made: For each accelerator, the moment at which the sources were complete.
        owner: The death notice of the object that will request the segment. If it has died, the upload is skipped.
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
    boundaries: Sequence[int] = ()
    spared: Callable[[int], None] = lambda _: None
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


def _payload_bytes(outgoing_tensors: Iterable[OutgoingTensor]) -> int:
    return sum(outgoing.layout.payload_bytes for outgoing in outgoing_tensors)


class _UnansweredError(Exception):
    """It is unknown which tensors of a message the worker took."""


class Uploader:
    """The sending side of a connection. Thread-safe.

    Args:
        connection: The connection to the worker.
        inflight_bytes: Bound of the bytes of copies that wait to be sent.
        inflight_boundaries: Bound of the number of segments with such copies.
        compression: Decides which tensors are sent as differences; None to send all of them whole.

    Attributes:
        watch: The signs of life of the worker during uploads.
        uncollected: Gradients that the worker keeps. Their commits are sent with releases, before those.
        bytes_per_s: The rate at which large tensors have been sent lately; 0 until one was sent.
    """

    def __init__(
        self,
        connection: Connection,
        inflight_bytes: int,
        inflight_boundaries: int,
        compression: Compression | None = None,
    ) -> None:
        self._connection = connection
        self._compression = compression or Compression("off", CopyMemory(0))
        self._limit_bytes = inflight_bytes
        self._limit_boundaries = inflight_boundaries
        self.watch = Liveness(connection.silence_s)
        self.uncollected = UncollectedGradients(connection)
        self.bytes_per_s = 0.0
        # The garbage collector may call put() of a SimpleQueue during another put().
        self._queue: queue.SimpleQueue[_Item | DeathNotice | None] = queue.SimpleQueue()
        self._endings = DeathQueue(self._queue.put)
        self._waiting: set[SegmentUpload] = set()  # the segments with copies
        self._sent: queue.SimpleQueue[Sequence[SourceTensor]] = queue.SimpleQueue()
        self._room = threading.Condition()  # guards `_waiting`; notified when a segment leaves it
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._known_lock = threading.Lock()  # guards `_known` and `_known_of`
        self._known_of: WorkerSession | None = None
        self._thread = threading.Thread(target=self._serve, name="backhaul-upload", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The address of the worker."""
        return self._connection.name

    def save(self, save: SegmentUpload) -> None:
        """Queues a segment. Blocks while the queue is full and the worker is up."""
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
            except BaseException:  # Ctrl-C, also after the segment was queued
                self._waiting.discard(save)
                raise

    def _is_full(self, save: SegmentUpload) -> bool:
        queued_bytes = sum(waiting.queued_bytes for waiting in self._waiting)
        too_large = queued_bytes and queued_bytes + save.queued_bytes > self._limit_bytes
        return bool(too_large) or len(self._waiting) >= self._limit_boundaries

    def free_sent(self) -> None:
        """Frees what has been sent.

        The trainer's threads call it, because a profiler does not see other threads' frees.
        """
        with suppress(queue.Empty):
            while True:
                self._sent.get_nowait()

    def release(self, worker_session: WorkerSession, segment: int) -> None:
        """Queues the release of a segment."""
        self._queue.put(_Release(worker_session, segment))

    def release_after(self, owner: object, worker_session: WorkerSession, segment: int) -> DeathNotice:
        """Releases a segment when its owner has died: NOTE [Endings]."""
        return self._endings.watch(owner, _Release(worker_session, segment))

    def call_after(self, owner: object, then: Callable[[], None]) -> DeathNotice:
        """Calls a function in the sending thread when the owner has died: NOTE [Endings]."""
        return self._endings.watch(owner, then)

    def cancel_notice(self, ending: DeathNotice) -> None:
        """Cancels a notice, so that nothing happens when the owner dies."""
        self._endings.take(ending)

    def segments(self) -> list[int]:
        """Returns the numbers of the segments whose owners live."""
        return [then.segment for then in self._endings.to_come() if isinstance(then, _Release)]

    def close(self) -> None:
        """Ends the thread. Call it after the connection was closed, so that queued items fail at once."""
        self._queue.put(None)
        self._thread.join()
        self._compression.close()

    def put(
        self, worker_session: WorkerSession, outgoing_tensors: Sequence[OutgoingTensor], count: Callable[[int], None]
    ) -> None:
        """Sends tensors, and waits until the worker has them. Any thread may call it.

        Raises:
            WorkerError: The worker rejected the tensors.
            WorkerLostError: The worker was silent, or the connection broke.
        """
        addresses = self._put_striped(worker_session, outgoing_tensors, count)
        if addresses is None:
            with sending(worker_session.memory, count) as write:
                addresses = self._put(worker_session, batches(outgoing_tensors, write), count)
        self.learn(worker_session, addresses)

    def _put_striped(
        self, worker_session: WorkerSession, outgoing_tensors: Sequence[OutgoingTensor], count: Callable[[int], None]
    ) -> list[bytes] | None:
        """Sends tensors over several connections. Returns None if they must be sent over the main one alone.

        Raises as `put` does.
        """
        lanes = self._connection.lanes
        joined = lanes.joined(worker_session.session) if worker_session.memory is None else ()
        if not joined or not can_stripe(outgoing_tensors):
            return None

        def note(size_bytes: int) -> None:
            self.watch.sign()
            count(size_bytes)

        method = self._connection.stubs(worker_session).tensors.PutTensors
        upload = StripedUpload(method, joined, lanes.broke, self._connection.silence_s, note)
        began = perf_counter()
        try:
            addresses = upload.put(worker_session.session, lanes.number(), outgoing_tensors)
        except WorkerLostError as error:
            if error.status != LANE_LOST or not self._connection.recovered(worker_session):
                raise
            logger.debug("An upload is repeated: %s", error, extra=about(self._connection.run))
            return None
        if len(addresses) != len(outgoing_tensors):
            raise WorkerLostError(f"the worker has taken {len(addresses)} tensors of {len(outgoing_tensors)}")
        lanes.choice.sent(1 + len(joined), _payload_bytes(outgoing_tensors), perf_counter() - began)
        return addresses

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
        """Returns the tensors that the worker does not store, as far as is known."""
        return [outgoing for outgoing in outgoing_tensors if not self.knows(worker_session, outgoing.address)]

    def learn(self, worker_session: WorkerSession, addresses: Iterable[bytes]) -> None:
        """Notes that the worker stores tensors. It may evict some, and reports them as missing later."""
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
        """Notes that the worker no longer stores tensors."""
        with self._known_lock:
            for address in addresses:
                self._known.pop(address, None)

    def holder_of(self, address: bytes) -> WorkerSession | None:
        """Returns the worker session that stores a tensor, as far as is known."""
        with self._known_lock:
            return self._known_of if address in self._known else None

    def knows(self, worker_session: WorkerSession, address: bytes) -> bool:
        """Whether the worker stores a tensor or program, as far as is known."""
        with self._known_lock:
            return self._known_of is worker_session and address in self._known

    @only_in("backhaul-upload")
    def _serve(self) -> None:
        held: list[_Release] = []
        while True:
            item: _Item | DeathNotice | None = None  # nothing of the last item stays alive while this thread waits
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

    @only_in("backhaul-upload")
    def _do(self, then: Callable[[], None]) -> None:
        try:
            then()
        except Exception:  # a bug of ours must not end the thread that forward waits for
            logger.exception("A notice could not be handled.", extra=about(self._connection.run))

    @only_in("backhaul-upload")
    def _save(self, save: SegmentUpload) -> None:
        try:
            if save.owner is not None and save.owner() is None:
                raise SegmentUnknownError("the segment was released before it was sent")
            self._send(save)
            self._sent.put(save.sources)
            save.sources = ()
            save.saved.set_result(None)
        except BackhaulError as error:
            if isinstance(error, WorkerLostError):
                self._connection.trouble(save.worker_session, error)
            error.__traceback__ = None  # the traceback leads to tensors, and the future keeps the error
            save.saved.set_exception(error)
        except Exception as error:  # a bug of ours must cause a fallback instead of ending the thread
            logger.exception("A segment could not be sent.", extra=about(self._connection.run, save.name))
            save.saved.set_exception(WorkerLostError(f"sending failed: {type(error).__name__}: {error}"))
        finally:
            # Whatever happened, forward must not wait for this segment any longer, or it would block for ever.
            if save.is_predicted:  # the copies of a predicted segment are not used for recomputation
                self._sent.put(save.sources)
                save.sources = ()
            with self._room:
                self._waiting.discard(save)
                self._room.notify_all()

    @only_in("backhaul-upload")
    def _send(self, save: SegmentUpload) -> None:
        worker_session = save.worker_session
        with on_side_stream(save.made):
            # Forward does not wait for digests of an accelerator, so they may be missing even here. The worker hashes
            # tensors of the CPU as they arrive.
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
                *(
                    segment_pb2.Predecessor(
                        source=predecessor.source,
                        segment=segment.number,
                        output=predecessor.output,
                        derived=None if predecessor.derived is None else encode_layout(predecessor.derived),
                    )
                    for predecessor in save.predecessors
                    if (segment := predecessor.segment()) is not None
                ),
                *(segment_pb2.Predecessor(source=source) for source in save.boundaries),
            ],
            predicted=save.is_predicted,
            superseded=save.superseded(),
        )
        derived = {before.source for before in request.predecessors if before.HasField("derived")}
        for _ in range(MAX_ATTEMPTS):
            if not self.knows(worker_session, save.program_address):
                self._put_program(save)
            answer = self._ask_to_save(save, request, addresses, derived)
            derived = set()  # a second attempt sends what the worker could not derive
            if not answer.program_missing and not answer.missing_tensors:
                if worker_session.memory is not None and not save.is_predicted:
                    worker_session.memory.make_room()
                return
            # The worker has evicted them since it named them. What it no longer has must be sent again.
            self.unlearn([*answer.missing_tensors, *([save.program_address] if answer.program_missing else [])])
        raise WorkerLostError(
            f"the worker evicted tensors of segment {save.name} as fast as they arrived: start it with more --memory",
            status="BUSY",
        )

    @only_in("backhaul-upload")
    def _ask_to_save(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveSegmentRequest,
        addresses: list[bytes],
        derived: Collection[int],
    ) -> segment_pb2.SaveSegmentResponse:
        stubs = self._connection.stubs(save.worker_session)
        try:
            answer = self._send_missing(save, request, addresses, derived, stubs.short_saves)
            if answer is not None and not answer.refused:
                return answer
        except (TransferError, _UnansweredError) as error:  # the RPC reports what is wrong
            logger.debug(
                "The open stream did not save a segment: %r", error, extra=about(self._connection.run, save.name)
            )
        self._send_missing(save, request, addresses, derived)  # whatever failed, whole tensors
        request.sources[:] = addresses
        save.count(request.ByteSize())
        response: segment_pb2.SaveSegmentResponse = call_unary(
            stubs.segments.SaveSegment, request, self._connection.silence_s
        )
        return response

    @only_in("backhaul-upload")
    def _send_missing(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveSegmentRequest,
        addresses: list[bytes],
        derived: Collection[int],
        short: RequestStream | None = None,
    ) -> segment_pb2.SaveSegmentResponse | None:
        """Sends missing tensors, together with the request if there is a stream for it and all fit into one message.

        The worker computes the addresses of tensors without one. Returns its answer if the request was sent.
        """
        worker_session = save.worker_session
        outgoing_tensors = self._missing_of(save, addresses, derived, may_differ=short is not None)
        differences = [
            outgoing.difference
            for outgoing in outgoing_tensors.values()
            if isinstance(outgoing.difference, TensorDifference)
        ]
        began, answer = perf_counter(), None
        missing = (
            None if differences else self._put_striped(worker_session, list(outgoing_tensors.values()), save.count)
        )
        if missing is None:
            try:
                missing, answer = self._send_alone(save, request, addresses, outgoing_tensors, short)
            except WorkerError as error:
                if not differences:
                    raise
                self._compression.failed(error)
                raise _UnansweredError from error
        for key, address in zip(outgoing_tensors, missing, strict=True):
            if isinstance(key, int):
                addresses[key] = address
        if outgoing_tensors:
            took_s = perf_counter() - began
            save.sent(took_s)
            spared_bytes = sum(difference.spared_bytes for difference in differences)
            save.spared(spared_bytes)
            sent_bytes = _payload_bytes(outgoing_tensors.values()) - spared_bytes
            encoded_s = sum(difference.took_s for difference in differences)
            self._compression.sent(sent_bytes, took_s - encoded_s, has_differences=bool(differences))
            if sent_bytes >= MEASURED_BYTES:
                rate = sent_bytes / took_s
                self.bytes_per_s = (3 * self.bytes_per_s + rate) / 4 if self.bytes_per_s else rate
            self.learn(worker_session, missing)
        return answer

    @only_in("backhaul-upload")
    def _send_alone(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveSegmentRequest,
        addresses: list[bytes],
        outgoing_tensors: Mapping[bytes | int, OutgoingTensor],
        short: RequestStream | None,
    ) -> tuple[list[bytes], segment_pb2.SaveSegmentResponse | None]:
        """Sends tensors over the main connection. Returns their addresses, and the answer if the request was sent."""
        began, missing, answer = perf_counter(), list[bytes](), None
        worker_session = save.worker_session
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
                    raise TransferError("the worker did not accept the tensors of a segment")
                self.watch.sign()
            elif begin:
                missing = self._put(worker_session, itertools.chain(begin, sent), save.count)
                if worker_session.memory is None and all(o.difference is None for o in outgoing_tensors.values()):
                    sent_bytes = _payload_bytes(outgoing_tensors.values())
                    self._connection.lanes.choice.sent(1, sent_bytes, perf_counter() - began)
            if len(missing) != len(outgoing_tensors):  # inside: shared memory is given up
                raise WorkerLostError(f"the worker has taken {len(missing)} tensors of {len(outgoing_tensors)}")
        return missing, answer

    @only_in("backhaul-upload")
    def _missing_of(
        self, save: SegmentUpload, addresses: list[bytes], derived: Collection[int], *, may_differ: bool
    ) -> dict[bytes | int, OutgoingTensor]:
        """Returns the sources that the worker lacks, by address or else by position.

        Args:
            save: The upload of the segment.
            addresses: The addresses of its sources. Those of differences are added.
            derived: The positions of sources that the worker computes itself.
            may_differ: Whether tensors may be sent as differences.
        """
        worker_session, outgoing_tensors = save.worker_session, dict[bytes | int, OutgoingTensor]()
        self._compression.begin()
        with on_side_stream(save.made):
            for index, (address, source) in enumerate(zip(addresses, save.sources, strict=True)):
                if index in derived or address in outgoing_tensors or self.knows(worker_session, address):
                    continue
                outgoing = OutgoingTensor(source.to_read(), source.layout, address)
                if may_differ and not source.is_copy and not source.is_transient:
                    outgoing = self._compression.outgoing(
                        outgoing, partial(self.knows, worker_session), crosses_network=worker_session.crosses_network
                    )
                    addresses[index] = outgoing.address
                outgoing_tensors[outgoing.address or index] = outgoing
        return outgoing_tensors

    @only_in("backhaul-upload")
    def _put_program(self, save: SegmentUpload) -> None:
        request = program_pb2.PutProgramRequest(session=save.worker_session.session, program=save.program)
        save.count(request.ByteSize())
        call_unary(self._connection.stubs(save.worker_session).programs.PutProgram, request, self._connection.silence_s)
        self.learn(save.worker_session, [save.program_address])

    @only_in("backhaul-upload")
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
                self._connection.trouble(worker_session, error)  # the worker frees the segments when the lease runs out
            except BackhaulError as error:
                logger.debug("Segments were not released: %s", error, extra=about(self._connection.run))
            except Exception:  # a bug of ours must not end the thread that forward waits for
                logger.exception("Segments could not be released.", extra=about(self._connection.run))
