"""The stream of a worker's answer: progress, a result, then tensors; within the deadlines of NOTE [Bounds]."""

import math
import queue
import threading
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import torch
from torch import Tensor

from backhaul._worker_client.connection.deadlines import LONGEST_S, SLICE_S, Expected, longest_queue_s, longest_run_s
from backhaul._worker_client.connection.grpc_errors import closed_error, damaged_error, error_of, unsent_error
from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory, receiving
from backhaul_runtime.errors import TransferError, WorkerLostError
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

R = TypeVar("R")
MAX_WAITING_MESSAGES = 4


_Message: TypeAlias = TensorMessage[Any] | TransferError | grpc.RpcError | None
"""An item of a stream: a message or a rejected one; then an error, or None at the end."""


class AnswerStream(Generic[R]):
    """A call that is answered with progress, a result, and then tensors.

    A thread receives messages. The caller's thread assembles the tensors while it waits for them, so their memory
    belongs to the caller, and the worker sends no faster than the caller takes them. `close` ends the call.

    Args:
        method: A method of a stub.
        request: The message to call the method with.
        expected_s: Returns the seconds that the work should take.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        memory: Shared memory in which tensors may arrive; None for none.
        answer: The number of the answer in shared memory.
        is_lent: Whether tensors stay in shared memory instead of being copied out.
        device: The device of the tensors; None for the host.
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
    ) -> None:
        self._silence_s = silence_s
        self._expected_s = expected_s
        self._running_since: float | None = None
        self._messages: queue.Queue[_Message] = queue.Queue(MAX_WAITING_MESSAGES)
        self._closed = threading.Event()
        self._memory = memory
        self._answer = answer
        self._receiver = receiving(memory, device, is_lent=is_lent)
        self._has_ended = False
        self.received_bytes = 0
        try:
            self._call = method(request, timeout=LONGEST_S)
        except ValueError:
            raise closed_error() from None
        except grpc.RpcError as error:
            raise unsent_error(error) from None
        threading.Thread(target=self._pump, name="backhaul-receive", daemon=True).start()

    def result(self) -> R:
        """Waits for the result. Raises WorkerError, or WorkerLostError if a deadline passes."""
        asked = monotonic()
        while (carried := self._next()) is not None:
            message = carried.message
            if message.HasField("result"):
                self._running_since = None
                self._add(carried)
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
        self._call.cancel()  # has no effect on a call that has ended
        if self._memory is not None and self._answer:
            self._memory.ended(self._answer)

    def _receive(self) -> bool:
        carried = self._next()
        if carried is not None:
            self._add(carried)
        return carried is not None

    def _add(self, carried: TensorMessage[Any]) -> None:
        self._receiver.add_carried(carried)
        self.received_bytes += shared_bytes(carried.tensors)

    def _next(self) -> TensorMessage[Any] | None:
        """Returns the next message, None at the end."""
        silent = 0.0
        while not self._has_ended:
            before = monotonic()
            try:
                message = self._messages.get(timeout=SLICE_S)
            except queue.Empty:
                silent += min(SLICE_S, monotonic() - before)  # NOTE [Bounds], Rule 2
            else:
                if isinstance(message, grpc.RpcError):
                    raise error_of(message) from None
                if isinstance(message, TransferError):
                    raise damaged_error(message)
                if message is None:
                    self._has_ended = True
                else:
                    self.received_bytes += message.size_bytes
                return message
            if silent >= self._silence_s:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
            self._check_run()
        return None

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
    def _pump(self) -> None:
        """Receives messages in a thread, until the call ends or `close` is called."""
        end: grpc.RpcError | None = None
        try:
            for message in self._call:
                if not self._hand_over(message):
                    return
        except grpc.RpcError as error:
            end = error
        self._hand_over(end)

    def _hand_over(self, message: _Message) -> bool:
        while not self._closed.is_set():
            try:
                self._messages.put(message, timeout=SLICE_S)
            except queue.Full:
                continue
            return True
        return False
