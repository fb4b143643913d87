"""Waiting for a worker within deadlines, and the mapping of gRPC's errors to ours.

NOTE [Bounds]
1. Every wait ends: when the worker is silent for too long, when the run takes too long, or when the worker's queue
   takes longer than the work would take here.
2. Silence is counted in slices during which the waiting thread was awake. So a trainer that was itself stopped or
   starved does not blame the worker.
3. The contents of a message that does not fit its checksum are unknown. A damaged answer becomes a WorkerLostError with
   the status DAMAGED; a damaged request becomes a TransferError of the worker. Either way a request of a single message
   is repeated once, and the worker joins it to the first one.
4. Limits of time begin when the worker has everything that it needs: the request follows the upload of its segment.
   The upload itself has no limit but the silence that its own calls notice. So weights may take minutes to send, and an
   upload that waits for the trainer's own device does not blame the worker.
5. The expected time of a run follows from what forward took. As long as an accelerator has not done that forward, and
   none before it, the time is unknown and limits nothing.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from backhaul._worker_client.lanes import NO_LANES, Lane, LaneOffer
from backhaul._worker_client.shared_memory import TrainerSharedMemory, receiving
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    BackhaulError,
    LimitError,
    TransferError,
    WorkerError,
    WorkerLostError,
    from_bytes,
)
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

T = TypeVar("T")
R = TypeVar("R")
SLICE_S = 0.1
MAX_WAITING_MESSAGES = 4
LANE_LOST = "LANE_LOST"
"""The status of a WorkerLostError after which the transfer is to be repeated on the main connection alone."""
LONGEST_S = 3600.0
"""The deadline passed to gRPC for calls whose end the rules above decide."""
SHORTEST_RUN_LIMIT_S = 5.0
"""The limit of a run that should take less than a quarter of it. Tests that are not about it set it higher."""
SHORTEST_QUEUE_LIMIT_S = 1.0
"""The limit of the worker's queue for a run that should take less than half of it, set higher likewise."""
_CLOSE_S = 2.0


def forget_stack(error: Exception) -> None:
    """Lets go of the stack of an error of gRPC.

    gRPC raises the call itself, to which the stack refers. So the stack would live until Python collects cycles, and
    with it the trainer's segments and tensors.
    """
    error.__traceback__ = None


def error_of(error: grpc.RpcError) -> BackhaulError:
    """Returns the error that the worker raised, or WorkerLostError if gRPC itself failed."""
    forget_stack(error)
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else {}
    detail = metadata.get(ERROR_METADATA_KEY)
    if isinstance(detail, bytes) and (decoded := from_bytes(detail)) is not None:
        return decoded
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WorkerError(f"the server is not a Backhaul worker, or has another version: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # from gRPC itself, on either side; the worker is well
        return LimitError(f"a message is larger than the worker accepts: {details}", limit="bytes of a message")
    status = code.name if code else ""
    return WorkerLostError("the worker is gone", status=status, details=details)


class AuthenticatedMethod:
    """A method of a stub that sends a credential with each call.

    It wraps the method itself, because an interceptor adds 40 us to a call of 600 us, and hides an error that occurs
    when the call begins.
    """

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._method(request, metadata=self._metadata, **options)

    def future(self, request: Any, **options: Any) -> Any:
        """Starts the call without waiting, as the method of the stub does."""
        return self._method.future(request, metadata=self._metadata, **options)


class Liveness:
    """Tracks the signs of life of one call. Thread-safe: a lost increment only delays the notice of a sign."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._signs = 0

    def sign(self) -> None:
        """Notes a sign of life: a message arrived, or gRPC took one of ours. Any thread may call it."""
        self._signs += 1

    def wait(self, future: "Future[T]", check: Callable[[], object] = lambda: None) -> T:
        """Returns the result of a future. Raises WorkerLostError after too much silence, and any error of `check`."""
        if future.done():
            return future.result()
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        seen, silent = self._signs, 0.0
        while not done.is_set():
            before = monotonic()
            if done.wait(SLICE_S):
                break
            check()
            if self._signs != seen:
                seen, silent = self._signs, 0.0
            else:
                silent += min(SLICE_S, monotonic() - before)  # Rule 2
            if silent >= self._silence_s:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
        return future.result()


def closed_error() -> WorkerLostError:
    """Returns the error of a call whose channel was closed. gRPC itself raises ValueError then."""
    return WorkerLostError("the connection was closed", status="CANCELLED")


def damaged_error(refused: TransferError) -> WorkerLostError:
    """Returns the error of an answer that the deserializer rejected (Rule 3)."""
    return WorkerLostError(f"an answer of the worker was damaged: {refused.message}", status="DAMAGED")


def is_damage(error: BackhaulError) -> bool:
    """Whether a request or its answer was damaged in transit (Rule 3)."""
    return isinstance(error, TransferError) or (isinstance(error, WorkerLostError) and error.status == "DAMAGED")


def close_channel(channel: grpc.Channel) -> None:
    """Closes a channel without waiting for a stopped worker. gRPC would wait for the message that it is writing."""
    closing = threading.Thread(target=channel.close, name="backhaul-close", daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


def call_unary(
    method: Any,
    request: Any,
    silence_s: float,
    watch: Liveness | None = None,
    *,
    wait_for_ready: bool = False,
    check: Callable[[], object] = lambda: None,
) -> Any:
    """Calls a method with one answer, and waits within the deadlines of NOTE [Bounds]. Returns the answer.

    Args:
        method: A method of a stub.
        request: A message, or an iterator of messages whose progress counts as a sign of life.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        watch: The signs of life of a stream of messages.
        wait_for_ready: Whether to wait for the connection instead of failing at once.
        check: Called every SLICE_S seconds during the wait. An error that it raises ends the call.
    """
    try:
        return _called(method, request, silence_s, watch, wait_for_ready, check)
    except (TransferError, WorkerLostError) as error:
        if not isinstance(request, Message) or not is_damage(error):
            raise
    return _called(method, request, silence_s, watch, wait_for_ready, check)


def _called(
    method: Any,
    request: Any,
    silence_s: float,
    watch: Liveness | None,
    wait_for_ready: bool,
    check: Callable[[], object],
) -> Any:
    try:
        future = method.future(request, timeout=LONGEST_S, wait_for_ready=wait_for_ready)
    except ValueError:
        raise closed_error() from None
    try:
        answer = (watch or Liveness(silence_s)).wait(future, check)
    except grpc.RpcError as error:
        raise error_of(error) from None
    except grpc.FutureCancelledError:
        raise closed_error() from None
    finally:
        future.cancel()  # cancels the call after silence or Ctrl-C; has no effect on a finished call
    if isinstance(answer, TransferError):
        raise damaged_error(answer)
    return answer


def with_liveness(messages: Iterable[T], watch: Liveness) -> Iterator[T]:
    """Passes messages on, and counts each message that gRPC takes as a sign of life."""
    for message in messages:
        watch.sign()
        yield message


Expected: TypeAlias = Callable[[], float | None]
"""Returns the seconds that work should take; None while they are unknown (Rule 5)."""


def longest_run_s(expected_s: float | None) -> float:
    """Returns the seconds to wait for work that should take `expected_s`; infinity while that is unknown (Rule 5)."""
    return math.inf if expected_s is None else max(SHORTEST_RUN_LIMIT_S, 4 * expected_s)


def longest_queue_s(expected_s: float | None) -> float:
    """Returns the seconds that other work may take before work that should take `expected_s`; see `longest_run_s`."""
    return math.inf if expected_s is None else max(SHORTEST_QUEUE_LIMIT_S, 2 * expected_s)


@dataclass(frozen=True, slots=True)
class _LaneEnd:
    """The end of the pieces that a lane carries."""

    lane: Lane
    has_failed: bool


_Message: TypeAlias = TensorMessage[Any] | TransferError | grpc.RpcError | _LaneEnd | None
"""An item of a stream: a message or a rejected one; then an error, or None at the end. A lane ends with `_LaneEnd`."""


class AnswerStream(Generic[R]):
    """A call that is answered with progress, a result, and then tensors.

    A thread receives messages. The caller's thread assembles the tensors while it waits for them, so their memory
    belongs to the caller, and the worker sends no faster than the caller takes them. `close` ends the call. Lanes may
    carry a part of the tensors: NOTE [Stripes] in backhaul_runtime.wire.stripes.

    Args:
        method: A method of a stub.
        request: The message to call the method with.
        expected_s: Returns the seconds that the work should take.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        memory: Shared memory in which tensors may arrive; None for none.
        answer: The number of the answer in shared memory.
        is_lent: Whether tensors stay in shared memory instead of being copied out.
        device: The device of the tensors; None for the host.
        offer: The lanes that may carry a part of the tensors. The request names its number.
    """

    def __init__(
        self,
        method: Any,
        request: Any,
        expected_s: Expected,
        silence_s: float,
        memory: TrainerSharedMemory | None = None,
        answer: int = 0,
        device: torch.device | None = None,
        *,
        is_lent: bool = False,
        offer: LaneOffer = NO_LANES,
    ) -> None:
        self._silence_s = silence_s
        self._expected_s = expected_s
        self._running_since: float | None = None
        self._messages: queue.Queue[_Message] = queue.Queue(MAX_WAITING_MESSAGES)
        self._closed = threading.Event()
        self._memory = memory
        self._answer = answer
        self._receiver = receiving(memory, device, is_lent=is_lent)
        self._offer = offer
        self._lane_calls: dict[Lane, Any] = {}  # of the lanes whose pieces have not ended
        self._has_ended = False
        self.received_bytes = 0
        try:
            self._call = method(request, timeout=LONGEST_S)
        except ValueError:
            raise closed_error() from None
        self._receive_in_thread(self._call, None)

    def _receive_in_thread(self, call: Any, lane: Lane | None) -> None:
        threading.Thread(target=self._pump, args=(call, lane), name="backhaul-receive", daemon=True).start()

    def result(self) -> R:
        """Waits for the result. Raises WorkerError, or WorkerLostError if a deadline of Rule 1 passes."""
        asked = monotonic()
        while (carried := self._next()) is not None:
            message = carried.message
            if message.HasField("result"):
                self._running_since = None
                is_striped = self._offer.number > 0 and message.striped
                self._receiver.is_striped = is_striped
                self._receiver.add_carried(carried)
                if is_striped:
                    self._join_lanes()
                self.received_bytes += shared_bytes(carried.tensors)
                answer: R = message.result
                return answer
            self._check_queue(message.progress.ahead_s)
            if message.progress.running and self._running_since is None:
                self._running_since = monotonic()
            most_s = longest_run_s(self._expected_s())
            if self._running_since is None and monotonic() - asked > most_s:
                raise WorkerLostError(f"the worker has not started the segment after {most_s:.1f} s", status="BUSY")
        raise TransferError("the worker's answer ended before its result")

    def tensor(self, index: int) -> Tensor:
        """Returns the `index`-th tensor after the result, owned by the caller. Waits and raises as `result` does."""
        while not self._receiver.is_complete(index) and self._receive():
            pass
        return self._receiver.tensor(index)

    def forget(self, index: int) -> None:
        """Drops the `index`-th tensor. It cannot be requested again."""
        self._receiver.forget(index)

    def rest(self, deadline: float = math.inf) -> TensorReceiver:
        """Receives all tensors.

        Raises as `result` does, and WorkerLostError if they are not complete at the deadline.
        """
        while self._receive():
            if monotonic() > deadline:
                raise WorkerLostError("the worker takes too long to send its answer", status="SLOW")
        return self._receiver

    def close(self) -> None:
        """Cancels the rest of the answer."""
        self._closed.set()
        for call in (self._call, *self._lane_calls.values()):
            call.cancel()  # has no effect on a call that has ended
        if self._memory is not None and self._answer:
            self._memory.ended(self._answer)

    def _receive(self) -> bool:
        carried = self._next()
        if carried is not None:
            self._receiver.add_carried(carried)
            self.received_bytes += shared_bytes(carried.tensors)
        return carried is not None

    def _join_lanes(self) -> None:
        request = tensor_pb2.GetStripesRequest(session=self._offer.session, stripes=self._offer.number)
        for lane in self._offer.lanes:
            try:
                call = lane.get(request, timeout=LONGEST_S)
            except ValueError:  # another thread has closed the channel; the other connections carry everything
                continue
            self._lane_calls[lane] = call
            self._receive_in_thread(call, lane)

    def _next(self) -> TensorMessage[Any] | None:
        """Returns the next message of any connection, None at the end."""
        silent = 0.0
        while not self._has_ended or (self._lane_calls and not self._receiver.are_complete):
            before = monotonic()
            try:
                message = self._messages.get(timeout=SLICE_S)
            except queue.Empty:
                silent += min(SLICE_S, monotonic() - before)  # Rule 2
            else:
                if isinstance(message, grpc.RpcError):
                    raise error_of(message) from None
                if isinstance(message, TransferError):
                    raise damaged_error(message)
                if isinstance(message, TensorMessage):
                    self.received_bytes += message.size_bytes
                    return message
                if isinstance(message, _LaneEnd):
                    if message.has_failed:
                        raise self._lanes_lost([message.lane])
                    del self._lane_calls[message.lane]
                else:
                    self._has_ended = True
                silent = 0.0
            if silent >= self._silence_s:
                if self._has_ended:
                    raise self._lanes_lost(list(self._lane_calls))
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
            self._check_run()
        return None

    def _lanes_lost(self, lanes: Sequence[Lane]) -> WorkerLostError:
        for lane in lanes:
            self._offer.broke(lane)
        return WorkerLostError(f"{len(lanes)} of {len(self._offer.lanes)} further connections broke", status=LANE_LOST)

    def _check_run(self) -> None:
        if self._running_since is not None:
            most_s = longest_run_s(self._expected_s())
            if monotonic() - self._running_since > most_s:
                raise WorkerLostError(f"the worker has run the segment for more than {most_s:.1f} s", status="SLOW")

    def _check_queue(self, queued_s: float) -> None:
        if queued_s > longest_queue_s(self._expected_s()):
            raise WorkerLostError(
                f"the worker has {queued_s:.1f} s of other work queued, which takes longer than recomputing the "
                "segment here",
                status="BUSY",
            )

    @only_in("backhaul-receive")
    def _pump(self, call: Any, lane: Lane | None) -> None:
        """Receives messages of one connection in a thread, until the call ends or `close` is called."""
        end: grpc.RpcError | None = None
        try:
            for message in call:
                if not self._hand_over(message):
                    return
        except grpc.RpcError as error:
            end = error
        if lane is None:
            self._hand_over(end)
            return
        if end is not None:
            forget_stack(end)
        self._hand_over(_LaneEnd(lane, end is not None))

    def _hand_over(self, message: _Message) -> bool:
        while not self._closed.is_set():
            try:
                self._messages.put(message, timeout=SLICE_S)
            except queue.Full:
                continue
            return True
        return False
