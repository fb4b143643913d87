"""Waiting for a worker within bounds, and its errors as ours.

NOTE [Bounds]
1. Every wait ends: when the worker is silent too long, when it runs too long, when its queue is longer than doing the
   work here.
2. Silence is counted in slices the waiting thread was awake for. So a trainer that was itself stopped or starved does
   not blame the worker.
3. Nobody knows what a message said that does not fit its checksum. A refused answer is no answer: WorkerLostError
   with the status DAMAGED. A refused request is a TransferError from the worker. Either way the request is sent once
   more, if it is a single message: the worker joins a repeated request to the first.
"""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from backhaul._worker_client.shared_memory import TrainerSharedMemory, receiving
from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    BackhaulError,
    LimitError,
    TransferError,
    WorkerError,
    WorkerLostError,
    from_bytes,
)
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_stream import TensorReceiver

T = TypeVar("T")
R = TypeVar("R")
SLICE_S = 0.1
MAX_WAITING_MESSAGES = 4
LONGEST_S = 3600.0
"""Deadline given to gRPC for calls whose end the rules above decide."""
_CLOSE_S = 2.0


def error_of(error: grpc.RpcError) -> BackhaulError:
    """The error the worker raised, or WorkerLostError where gRPC itself gave up."""
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else {}
    detail = metadata.get(ERROR_METADATA_KEY)
    if isinstance(detail, bytes) and (decoded := from_bytes(detail)) is not None:
        return decoded
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WorkerError(f"what answers there is no Backhaul worker, or one of another version: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # of gRPC itself, on either side; the worker is well
        return LimitError(f"a message is larger than a worker takes: {details}", limit="bytes of a message")
    status = code.name if code else ""
    return WorkerLostError("the worker is gone", status=status, details=details)


class AuthenticatedMethod:
    """A method of a stub that shows a credential with each call.

    Made for the stubs' methods themselves: an interceptor takes 40 us more of a call of 600, and hides which error
    beginning it met.
    """

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._method(request, metadata=self._metadata, **options)

    def future(self, request: Any, **options: Any) -> Any:
        """As the stub's."""
        return self._method.future(request, metadata=self._metadata, **options)


class Liveness:
    """Counts signs of life of one call."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._signs = 0

    def sign(self) -> None:
        """The worker did something: a message came, or one of ours was taken. Called by any thread."""
        self._signs += 1

    def wait(self, future: "Future[T]", check: Callable[[], object] = lambda: None) -> T:
        """The future's result. Raises WorkerLostError after too much silence, and what `check` raises (Rule 1)."""
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
    """What a call on a channel meets that was closed under it; gRPC itself raises ValueError there."""
    return WorkerLostError("the connection was closed", status="CANCELLED")


def damaged_error(refused: TransferError) -> WorkerLostError:
    """What stands for an answer that a deserializer refused (Rule 3)."""
    return WorkerLostError(f"an answer of the worker was refused: {refused.message}", status="DAMAGED")


def is_damage(error: BackhaulError) -> bool:
    """Whether a request, or its answer, was damaged on the way (Rule 3)."""
    return isinstance(error, TransferError) or (isinstance(error, WorkerLostError) and error.status == "DAMAGED")


def close_channel(channel: grpc.Channel) -> None:
    """Closes a channel without waiting for a worker that is stopped: gRPC waits for what it is just writing."""
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
    """One answer to a message, or to a stream of them whose progress counts as a sign of life.

    Args:
        method: The method of a stub.
        request: A message, or an iterator of them.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        watch: Counts the signs of life of a stream.
        wait_for_ready: Wait for the connection instead of failing while there is none.
        check: Called every SLICE_S seconds while the answer is awaited. What it raises ends the call.
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
        future.cancel()  # after silence or Ctrl-C nothing must be left behind; of a finished call it does nothing
    if isinstance(answer, TransferError):
        raise damaged_error(answer)
    return answer


def with_liveness(messages: Iterable[T], watch: Liveness) -> Iterator[T]:
    """Passes messages on; gRPC taking one is a sign of life."""
    for message in messages:
        watch.sign()
        yield message


def longest_run_s(expected_s: float) -> float:
    """How long work is waited for that was expected to take so long."""
    return max(5.0, 4 * expected_s)


_Message: TypeAlias = TensorMessage[Any] | TransferError | grpc.RpcError | None
"""What comes of a stream: a message or one that was refused, then an error or None at its end."""


class AnswerStream(Generic[R]):
    """A call that is answered by progress, a result, and tensors after it.

    A thread takes messages off the wire; the caller's thread puts the tensors together while it waits for them. So
    their memory is the caller's, and the worker sends no faster than they are asked for. `close` it.

    Args:
        method: The method of a stub.
        request: The message that the method is called with.
        expected_s: What the work should take.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        memory: Through which tensors may come.
        answer: What the request names it there.
        is_lent: Tensors stay where they came in shared memory.
        device: Where tensors of an accelerator go, the host if None.
    """

    def __init__(
        self,
        method: Any,
        request: Any,
        expected_s: float,
        silence_s: float,
        memory: TrainerSharedMemory | None = None,
        answer: int = 0,
        device: torch.device | None = None,
        *,
        is_lent: bool = False,
    ) -> None:
        self._silence_s = silence_s
        self._longest_run_s = longest_run_s(expected_s)
        self._longest_queue_s = max(1.0, 2 * expected_s)
        self._running_since: float | None = None
        self._messages: queue.Queue[_Message] = queue.Queue(MAX_WAITING_MESSAGES)
        self._closed = threading.Event()
        self._memory = memory
        self._answer = answer
        self._receiver = receiving(memory, device, is_lent=is_lent)
        self.received_bytes = 0
        try:
            self._call = method(request, timeout=LONGEST_S)
        except ValueError:
            raise closed_error() from None
        threading.Thread(target=self._pump, name="backhaul-receive", daemon=True).start()

    def result(self) -> R:
        """The result. Raises WorkerError, or WorkerLostError where a bound was met (Rule 1)."""
        asked = monotonic()
        while (carried := self._next()) is not None:
            message = carried.message
            if message.HasField("result"):
                self._running_since = None
                self._receiver.add_carried(carried)
                self.received_bytes += shared_bytes(carried.tensors)
                answer: R = message.result
                return answer
            self._check_queue(message.progress.ahead_s)
            if message.progress.running and self._running_since is None:
                self._running_since = monotonic()
            if self._running_since is None and monotonic() - asked > self._longest_run_s:
                raise WorkerLostError(
                    f"the worker has not begun with the segment after {self._longest_run_s:.1f} s", status="BUSY"
                )
        raise TransferError("the worker's answer ended before its result")

    def tensor(self, index: int) -> Tensor:
        """The `index`-th tensor after the result, owned by the caller. Raises as `result` does."""
        while not self._receiver.is_complete(index) and self._receive():
            pass
        return self._receiver.tensor(index)

    def forget(self, index: int) -> None:
        """Drops the `index`-th tensor. It cannot be requested again."""
        self._receiver.forget(index)

    def rest(self, deadline: float = math.inf) -> TensorReceiver:
        """Has received all of them. Raises as `result` does, and WorkerLostError for what comes after a deadline."""
        while self._receive():
            if monotonic() > deadline:
                raise WorkerLostError("the worker takes too long to send what it has", status="SLOW")
        return self._receiver

    def close(self) -> None:
        """Cancels the rest of the answer."""
        self._closed.set()
        self._call.cancel()  # of a call that has ended this does nothing
        if self._memory is not None and self._answer:
            self._memory.ended(self._answer)

    def _receive(self) -> bool:
        carried = self._next()
        if carried is not None:
            self._receiver.add_carried(carried)
            self.received_bytes += shared_bytes(carried.tensors)
        return carried is not None

    def _next(self) -> TensorMessage[Any] | None:
        """The next message, None at the end."""
        silent = 0.0
        while True:
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
                self.received_bytes += message.size_bytes if message is not None else 0
                return message
            if silent >= self._silence_s:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
            if self._running_since is not None and monotonic() - self._running_since > self._longest_run_s:
                raise WorkerLostError(
                    f"the worker has run the segment for more than {self._longest_run_s:.1f} s", status="SLOW"
                )

    def _check_queue(self, queued_s: float) -> None:
        if queued_s > self._longest_queue_s:
            raise WorkerLostError(
                f"the worker has {queued_s:.1f} s of other work first, longer than doing it here", status="BUSY"
            )

    def _pump(self) -> None:
        """Runs in a thread. Ends with the call, or with `close`."""
        end: grpc.RpcError | None = None
        try:
            for message in self._call:
                if not self._offer(message):
                    return
        except grpc.RpcError as error:
            end = error
        self._offer(end)

    def _offer(self, message: _Message) -> bool:
        while not self._closed.is_set():
            try:
                self._messages.put(message, timeout=SLICE_S)
            except queue.Full:
                continue
            return True
        return False
