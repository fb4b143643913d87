"""Uploads segments while forward continues, and sends releases.

One thread per connection sends everything in order. So a segment is released after it was saved, and tensors arrive
before the segment that names them. Copies of arguments that wait to be sent are bounded in bytes and number; forward
blocks at the bound. Two segments may wait however large they are, so that one is computed while another is sent. Any
number may wait whose copies are small: each has a round trip of its own, which may take longer than its forward.

NOTE [Releases]
1. A release is sent until the worker has answered it, or has lost the session. It may be repeated, because numbers of
   segments are not used twice.
2. A save that was given up may still arrive, over a connection that broke, after the release of its segment. So release
   requests are numbered, and each save names the last one before it. The worker refuses a save that a later release has
   overtaken.
"""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from backhaul._worker_client.answers.uncollected_gradients import UncollectedGradients
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import SLICE_S, Liveness
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.compression import Compression, CopyMemory
from backhaul._worker_client.upload.segment_sender import SegmentSender
from backhaul._worker_client.upload.segment_upload import SegmentUpload, SourceTensor
from backhaul._worker_client.upload.stored_tensors import StoredTensors
from backhaul._worker_client.upload.tensor_sender import TensorSender
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, SegmentUnknownError, TransferError, WorkerLostError, log_once
from backhaul_runtime.process.death_queue import DeathNotice, DeathQueue
from backhaul_runtime.process.latch import Latch
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in

logger = logging.getLogger("backhaul")
GATHER_S = 0.005
"""Seconds within which releases are sent together. In backward there would otherwise be one call per segment."""
MOST_GATHERED = 16
ALWAYS_INFLIGHT = 2
"""Number of segments whose copies may wait to be sent whatever their bytes, if `inflight_boundaries` allows them."""
SMALL_BYTES = 1 << 20
"""Bytes of copies up to which any number of segments may wait to be sent."""
REPEAT_S = 1.0
"""Seconds after which releases without an answer are sent again (Rule 1 of NOTE [Releases])."""


@dataclass(frozen=True, slots=True)
class _Release:
    worker_session: WorkerSession
    segment: int


_Item = SegmentUpload | _Release | Callable[[], None]


class Uploader:
    """The sending side of a connection. Thread-safe.

    Args:
        connection: The connection to the worker.
        inflight_bytes: Bound of the bytes of copies that wait to be sent, from the third segment on.
        inflight_boundaries: Bound of the number of segments with such copies, if these have more than SMALL_BYTES.
        compression: Decides which tensors are sent as differences; None to send all of them whole.

    Attributes:
        watch: The signs of life of the worker during uploads.
        uncollected: Gradients that the worker keeps. Their commits are sent with releases, before those.
        stored: What the worker stores, as far as is known.
        tensors: Sends tensors without a segment.
        sender: Sends segments with what the worker lacks of them.
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
        self.stored = StoredTensors()
        self.tensors = TensorSender(connection, self.stored, self.watch)
        self.sender = SegmentSender(connection, self.tensors, self.stored, self._compression, self.watch)
        # The garbage collector may call put() of a SimpleQueue during another put().
        self._queue: queue.SimpleQueue[_Item | DeathNotice | None] = queue.SimpleQueue()
        self._endings = DeathQueue(self._queue.put)
        self._waiting: set[SegmentUpload] = set()  # the segments with copies
        self._sent: queue.SimpleQueue[Sequence[SourceTensor]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards `_waiting` and `_room`
        self._room = Latch()  # set when the next segment leaves `_waiting`: NOTE [Interrupts]
        self._thread = threading.Thread(target=self._serve, name="backhaul-upload", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The address of the worker."""
        return self._connection.name

    def save(self, save: SegmentUpload) -> None:
        """Queues a segment. Blocks while the queue is full and the worker is up."""
        self.free_sent()
        while (room := self._full(save)) is not None:
            room.wait(SLICE_S)

    def _full(self, save: SegmentUpload) -> Latch | None:
        """Queues a segment. While the queue is full and the worker is up, returns what is set when one leaves it."""
        with self._lock:
            if save.queued_bytes and self._is_full(save) and self._connection.up is save.worker_session:
                return self._room
            try:
                if save.queued_bytes:
                    self._waiting.add(save)
                self._queue.put(save)
            except BaseException:  # Ctrl-C, also after the segment was queued
                self._waiting.discard(save)
                raise
        return None

    def _is_full(self, save: SegmentUpload) -> bool:
        queued_bytes = sum([waiting.queued_bytes for waiting in self._waiting]) + save.queued_bytes
        if queued_bytes <= min(SMALL_BYTES, self._limit_bytes):
            return False
        is_over = queued_bytes > self._limit_bytes and len(self._waiting) >= ALWAYS_INFLIGHT
        return is_over or len(self._waiting) >= self._limit_boundaries

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

    @only_in("backhaul-upload")
    def _serve(self) -> None:
        releases, pause_s = list[_Release](), GATHER_S
        while True:
            item: _Item | DeathNotice | None = None  # nothing of the last item stays alive while this thread waits
            is_soon = True
            # Without a release that waits for others or is due again, there is nothing to wake up for.
            try:
                item = self._queue.get(timeout=pause_s if releases else None)
            except queue.Empty:  # no further release has come to share a request, or a repetition is due
                is_soon = False
            try:
                if isinstance(item, DeathNotice):  # NOTE [Endings]
                    item = self._endings.take(item)
                if isinstance(item, _Release):
                    self.stored.release(item.segment)
                    releases.append(item)
                # Releases in a row share a request. A segment that follows them may need the room that they free.
                if releases and (not isinstance(item, _Release) or len(releases) >= MOST_GATHERED):
                    pause_s = REPEAT_S  # also after an error
                    releases = self._release(releases)
                    pause_s = REPEAT_S if releases else GATHER_S
                if isinstance(item, SegmentUpload):
                    self._save(item)
                elif callable(item):
                    item()
            except Exception as error:  # a bug of ours must not end the thread that forward waits for
                log_once(error)
                if isinstance(item, SegmentUpload) and not item.saved.is_done:  # it causes a fallback instead
                    item.saved.set_error(WorkerLostError(f"sending failed: {type(error).__name__}: {error}"))
            finally:
                if isinstance(item, SegmentUpload):
                    self._leave(item)
            if item is None and is_soon:  # from `close`, which waits for the end whatever failed here
                return

    @only_in("backhaul-upload")
    def _save(self, save: SegmentUpload) -> None:
        try:
            if save.owner is not None and save.owner() is None:
                raise SegmentUnknownError("the segment was released before it was sent")
            self.sender.send(save)
            self._sent.put(save.sources)
            save.sources = ()
            save.saved.set_result(None)
        except BackhaulError as error:
            if isinstance(error, WorkerLostError):
                self._connection.trouble(save.worker_session, error)
            error.__traceback__ = None  # the traceback leads to tensors, and the promise keeps the error
            save.saved.set_error(error)

    def _leave(self, save: SegmentUpload) -> None:
        """Makes room in the queue. Whatever happened to the segment, or forward would block for ever."""
        if save.is_predicted:  # the copies of a predicted segment are not used for recomputation
            self._sent.put(save.sources)
            save.sources = ()
        with self._lock:
            self._waiting.discard(save)
            room, self._room = self._room, Latch()
        room.set()

    @only_in("backhaul-upload")
    def _release(self, releases: Sequence[_Release]) -> list[_Release]:
        """Releases segments. Returns the releases that are due again (Rule 1 of NOTE [Releases])."""
        due: list[_Release] = []
        for worker_session, group in itertools.groupby(releases, lambda release: release.worker_session):
            left = list(group)
            try:
                while left:
                    self._send_releases(worker_session, left[:MOST_GATHERED])
                    del left[:MOST_GATHERED]
            except WorkerLostError as error:
                self._connection.trouble(worker_session, error)
                due += left if error.status != "LOST" else []
            except TransferError:  # damaged in transit, twice
                due += left
            except BackhaulError as error:
                logger.debug("Segments were not released: %s", error, extra=about(self._connection.run))
            except Exception:  # a bug of ours must not keep the other groups from being released
                logger.exception("Segments could not be released.", extra=about(self._connection.run))
        return due

    @only_in("backhaul-upload")
    def _send_releases(self, worker_session: WorkerSession, releases: Sequence[_Release]) -> None:
        exchange = self._connection.stubs(worker_session).exchange
        commits = self.uncollected.commits(worker_session)
        self.sender.last_release += 1
        request = segment_pb2.Request(
            session=worker_session.session,
            release=segment_pb2.ReleaseRequest(
                keys=[segment_pb2.OperationKey(segment=release.segment) for release in releases],
                commits=commits,
                number=self.sender.last_release,
            ),
        )
        exchange.call(request)
        self.uncollected.taken(commits)
