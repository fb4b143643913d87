"""The stream of requests and answers of one worker session.

NOTE [Exchange]
1. Both sides number the requests from 1, in the order in which they are written. So a request that was damaged on its
   way has a number too, and fails alone. Answers name the number of their request, and arrive in any order.
2. One thread reads the answers. It hands each to the thread that waits for it, after a check that the answer is of the
   request's kind and about the same segment and backward: an answer never reaches another request.
3. Anything else that arrives ends the stream: a damaged answer, which may be anyone's, or one that Rule 2 refuses. So
   does a broken connection, and a worker that is silent for too long. All requests in flight fail. Their callers may
   repeat them, because keys make both the same request to the worker. The next request opens another stream.
4. A caller that stops waiting takes its request out. An answer that arrives later is dropped, because numbers are not
   used twice.
5. Short answers share one stream, which is read at all times, so none waits behind another. A request whose answer is
   large has a stream of its own. The worker sends on it no faster than the caller takes, and the end of the wait
   cancels it.
6. On the shared stream a worker also pushes results, under the number 0: see NOTE [Pushes].
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Any, Self

import grpc

from backhaul._worker_client.connection.deadlines import SLICE_S
from backhaul._worker_client.connection.grpc_errors import closed_error, damaged_error, error_of, is_damage
from backhaul._worker_client.connection.pushed_results import PushedResults
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, LimitError, TransferError, WorkerError, WorkerLostError, from_bytes
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES
from backhaul_runtime.wire.splicing import Batch, TensorMessage, encode_all

AnswerMessage = TensorMessage[segment_pb2.Answer]
MOST_WAITING = 4
"""Messages of a large answer that wait for its caller. The worker sends no faster than the caller takes them."""


class PendingAnswer:
    """A request in flight, whose answer one thread takes. A context manager: its end takes the request out (Rule 4).

    Args:
        stream: The stream that the request is written to.
        request: The request that is written, without its tensors.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        sent_bytes: The size of the request on the wire.
        most_waiting: The number of messages that may wait until the caller takes them; 0 for any.

    Attributes:
        number: The number of the request; 0 until it is written.
        sent_bytes: The size of the request on the wire.
    """

    def __init__(
        self,
        stream: "_Stream",
        request: segment_pb2.Request,
        silence_s: float,
        sent_bytes: int,
        most_waiting: int = 0,
    ) -> None:
        self._stream = stream
        self._kind = request.WhichOneof("request") or ""
        self._key = getattr(getattr(request, self._kind, None), "key", segment_pb2.OperationKey())
        self._silence_s = silence_s
        self.number = 0
        self.sent_bytes = sent_bytes
        # Has an item for each message that may come: NOTE [Interrupts].
        self._room: queue.SimpleQueue[None] | None = queue.SimpleQueue() if most_waiting else None
        for _ in range(most_waiting):
            self._make_room()
        self._is_closed = False
        self._messages: queue.SimpleQueue[AnswerMessage | BackhaulError] = queue.SimpleQueue()

    def next(self, check: Callable[[], object] = lambda: None) -> AnswerMessage:
        """Returns the next message of the answer.

        Args:
            check: Called every SLICE_S seconds during the wait. An error that it raises ends the wait.

        Raises:
            WorkerError: The worker refused the request.
            WorkerLostError: The worker was silent, or the stream ended.
        """
        silent = 0.0
        while True:
            before = monotonic()
            try:
                message = self._messages.get(timeout=SLICE_S)
            except queue.Empty:
                silent += min(SLICE_S, monotonic() - before)  # NOTE [Bounds], Rule 2
            else:
                if isinstance(message, BackhaulError):
                    raise message
                self._make_room()
                if message.message.WhichOneof("answer") == "error":
                    raise decoded_error(message.message.error)
                return message
            if silent >= self._silence_s:
                error = WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
                self._stream.end(error)
                raise error
            check()

    def result(self) -> segment_pb2.Answer:
        """Returns the answer to a request that is answered with a result alone. Raises as `next` does."""
        while (answer := self.next().message).WhichOneof("answer") == "progress":
            pass
        if answer.WhichOneof("answer") != self._kind:
            raise TransferError("the worker has sent tensors of an answer, but no result")
        return answer

    def deliver(self, message: AnswerMessage) -> None:
        """Hands a message to the thread that waits, once there is room for it. Called by the reading thread."""
        while self._room is not None:
            try:
                self._room.get(timeout=SLICE_S)
                break
            except queue.Empty:
                if self._is_closed:
                    return
        self._messages.put(message)

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.put(None)

    def fail(self, error: BackhaulError) -> None:
        """Ends the wait with an error, after the messages that have arrived."""
        self._messages.put(error)

    def accepts(self, message: AnswerMessage) -> bool:
        """Whether a message with the request's number answers the request (Rule 2)."""
        kind = message.message.WhichOneof("answer")
        is_part = kind in {self._kind, "progress"} or (kind is None and message.tensors is not None)
        return kind == "error" or (is_part and message.message.key == self._key)

    def close(self) -> None:
        """Takes the request out (Rule 4). It may be called twice."""
        self._is_closed = True
        self._stream.take_out(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Exchange:
    """The stream of one worker session. The first request opens it, also after it broke. Thread-safe.

    Args:
        method: The method of a stub.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
    """

    def __init__(self, method: Any, silence_s: float) -> None:
        self._method = method
        self._silence_s = silence_s
        self._lock = threading.Lock()  # guards `_shared`
        self._shared: _Stream | None = None
        self._takes_pushes = False

    def ask(self, request: segment_pb2.Request, batch: Batch | None = None, *, is_large: bool = False) -> PendingAnswer:
        """Sends a request, with tensors that fit into one message.

        Args:
            request: The request. Its `pushes_taken` is set.
            batch: The tensors that are sent with it; None for none.
            is_large: Whether the answer is expected to be large (Rule 5).

        Raises:
            LimitError: The message is too large.
            WorkerError: The request could not be encoded.
            WorkerLostError: The connection is closed.
        """
        if is_large:
            request.ClearField("pushes_taken")
            encoded = _encoded(request, batch)
            stream = _Stream(self._method, is_shared=False)
            return stream.write(PendingAnswer(stream, request, self._silence_s, len(encoded), MOST_WAITING), encoded)
        with self._lock:
            if self._shared is None or self._shared.has_ended:
                self._shared = _Stream(self._method)
            stream = self._shared
        if self._takes_pushes:
            request.pushes_taken = stream.pushed.taken
        encoded = _encoded(request, batch)
        return stream.write(PendingAnswer(stream, request, self._silence_s, len(encoded)), encoded)

    def take_pushed(self, segment: int, start: segment_pb2.Start) -> AnswerMessage | None:
        """Returns the pushed result of a segment's backward from a start; None if there is none: NOTE [Pushes]."""
        self._takes_pushes, stream = True, self._shared
        return stream.pushed.take(segment, start) if stream is not None else None

    def expect(self, segments: Iterable[int]) -> None:
        """Notes the segments whose results are pushed next, as a requested result named them."""
        stream = self._shared
        if stream is not None:
            stream.pushed.expect(segments)

    def call(self, request: segment_pb2.Request) -> segment_pb2.Answer:
        """Sends a request without tensors that has a short answer, and waits for it. Raises as `PendingAnswer.next`.

        Repeats it once if it or its answer was damaged: NOTE [Bounds], Rule 3.
        """
        try:
            return self._called(request)
        except (TransferError, WorkerLostError) as error:
            if not is_damage(error):
                raise
        return self._called(request)

    def _called(self, request: segment_pb2.Request) -> segment_pb2.Answer:
        with self.ask(request) as pending:
            return pending.result()

    def close(self) -> None:
        """Ends the stream and its thread."""
        with self._lock:
            stream, self._shared = self._shared, None
        if stream is not None:
            stream.end(closed_error())


def _encoded(request: segment_pb2.Request, batch: Batch | None) -> bytes:
    try:
        (encoded,) = encode_all([] if batch is None else [batch], request.TENSORS_FIELD_NUMBER, request)
    except Exception as error:  # a bug of ours, or no memory: the trainer does without the worker
        raise WorkerError(f"a request could not be sent: {type(error).__name__}: {error}") from None
    if len(encoded) > MAX_MESSAGE_BYTES:
        what = f"bytes of a {request.DESCRIPTOR.name}"
        raise LimitError(
            f"a message is larger than the worker accepts: {len(encoded)} {what} exceed {MAX_MESSAGE_BYTES}",
            limit=what,
            most=MAX_MESSAGE_BYTES,
            found=len(encoded),
        )
    return encoded


class _Stream:
    """One call of the RPC. Thread-safe.

    Args:
        method: The method of a stub.
        is_shared: Whether it carries several requests (Rule 5).

    Attributes:
        has_ended: Whether it takes no further requests.
        pushed: The results that the worker has pushed on it.
    """

    def __init__(self, method: Any, *, is_shared: bool = True) -> None:
        self._lock = threading.Lock()  # guards `has_ended` and `_in_flight`
        self.has_ended = False
        self.pushed = PushedResults()
        self._is_shared = is_shared
        self._in_flight: set[PendingAnswer] = set()
        # Only gRPC's thread that writes assigns numbers. Ctrl-C in a caller can't separate a number from its request.
        self._by_number: dict[int, PendingAnswer] = {}
        self._count = 0
        self._requests: queue.SimpleQueue[tuple[PendingAnswer, bytes] | None] = queue.SimpleQueue()
        try:
            self._call = method(self._numbered())
        except ValueError:
            raise closed_error() from None
        threading.Thread(target=self._read, name="backhaul-exchange", daemon=True).start()

    def write(self, pending: PendingAnswer, encoded: bytes) -> PendingAnswer:
        """Queues a request. One that can't be written fails with the stream."""
        with self._lock:
            if self.has_ended:
                pending.fail(WorkerLostError("the stream has ended", status="UNAVAILABLE"))
                return pending
            self._in_flight.add(pending)
            self._requests.put((pending, encoded))
            if not self._is_shared:
                self._requests.put(None)
        return pending

    def take_out(self, pending: PendingAnswer) -> None:
        """Forgets a request that nobody waits for any more."""
        with self._lock:
            self._in_flight.discard(pending)
        self._by_number.pop(pending.number, None)
        if not self._is_shared:
            self.end(closed_error())

    def end(self, error: BackhaulError) -> None:
        """Ends the stream: all requests in flight fail. Only the first call counts."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            failed, self._in_flight = self._in_flight, set()
        for pending in failed:
            pending.fail(copy(error))  # several threads raise it
        self.pushed.end()
        self._requests.put(None)
        self._call.cancel()

    def _numbered(self) -> Iterator[bytes]:
        """Yields the requests to gRPC. Each has its number before it can be answered."""
        while (item := self._requests.get()) is not None:
            pending, encoded = item
            self._count += 1
            pending.number = self._count
            self._by_number[self._count] = pending
            del item, pending  # nothing of the last request stays alive while this waits
            yield encoded
            del encoded

    @only_in("backhaul-exchange")
    def _read(self) -> None:
        error: BackhaulError = WorkerLostError("the worker has ended the stream", status="UNAVAILABLE")
        try:
            for received in self._call:
                if isinstance(received, TransferError):
                    raise damaged_error(received)
                self._deliver(received)
                del received  # nothing of the last answer stays alive while this thread waits
        except grpc.RpcError as broken:
            error = error_of(broken)
        except BackhaulError as wrong:
            error = wrong.with_traceback(None)
        finally:
            self.end(error)

    @only_in("backhaul-exchange")
    def _deliver(self, received: AnswerMessage) -> None:
        """Hands an answer to the thread that waits for it. Raises TransferError for one to no request (Rule 2)."""
        number = received.message.number
        if not number and received.message.HasField("start") and self._is_shared:
            self.pushed.arrived(_unpacked(received))
            return
        if not 0 < number <= self._count:
            raise TransferError(f"the worker has answered request {number}, but there were {self._count}")
        pending = self._by_number.get(number)
        if pending is None or pending not in self._in_flight:
            self._by_number.pop(number, None)  # Rule 4
        elif pending.accepts(received):
            pending.deliver(received)
        else:
            raise TransferError(f"the answer to request {number} is one to another request")


def _unpacked(carried: AnswerMessage) -> Iterator[AnswerMessage]:
    """Yields the pushed results in a message."""
    more = [
        TensorMessage(pushed, pushed.tensors if pushed.HasField("tensors") else None, pushed.ByteSize())
        for pushed in carried.message.more
    ]
    yield replace(carried, size_bytes=carried.size_bytes - sum(pushed.size_bytes for pushed in more))
    yield from more


def decoded_error(encoded: bytes) -> BackhaulError:
    """Returns the error that an answer carries."""
    return from_bytes(encoded) or TransferError("the worker refused a request with an error that can't be read")
