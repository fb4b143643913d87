"""A worker's answer as it arrives: progress, a result, then tensors; within the deadlines of NOTE [Bounds]."""

import math
from collections.abc import Callable
from time import monotonic
from typing import Protocol

import torch
from torch import Tensor

from backhaul._worker_client.connection.deadlines import Expected, longest_execution_s, longest_queue_s
from backhaul._worker_client.connection.exchange import AnswerMessage
from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory, receiving
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError, WorkerLostError
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.tensor_receiver import TensorReceiver


class Messages(Protocol):
    """The messages of an answer, as a `PendingAnswer` receives them."""

    def next(self, check: Callable[[], object] = ...) -> AnswerMessage:
        """Returns the next message. Calls `check` during the wait."""
        ...

    def close(self) -> None:
        """Ends the wait."""
        ...


class PushedAnswer:
    """An answer that has arrived whole, before it was requested."""

    def __init__(self, message: AnswerMessage) -> None:
        self._messages = [message]

    def next(self, check: Callable[[], object] = lambda: None) -> AnswerMessage:
        """See `Messages`. Raises TransferError if the worker has pushed less than a whole answer."""
        if not self._messages:
            raise TransferError("the worker has pushed a part of an answer")
        return self._messages.pop()

    def close(self) -> None:
        """See `Messages`."""


class AnswerStream:
    """An answer with progress, a result, and then tensors. `close` ends it.

    The caller's thread assembles the tensors while it waits for them, so their memory belongs to the caller.

    Args:
        messages: The messages of the answer.
        expected_s: Returns the seconds that the work should take.
        memory: Shared memory in which tensors may arrive; None for none.
        answer: The number of the answer in shared memory.
        is_lent: Whether tensors stay in shared memory instead of being copied out.
        device: The device of the tensors; None for the host.

    Attributes:
        received_bytes: The bytes of what has arrived.
    """

    def __init__(
        self,
        messages: Messages,
        expected_s: Expected,
        memory: TrainerSharedMemory | None = None,
        answer: int = 0,
        device: torch.device | None = None,
        *,
        is_lent: bool = False,
    ) -> None:
        self._messages = messages
        self._expected_s = expected_s
        self._running_since: float | None = None
        self._memory = memory
        self._answer = answer
        self._receiver = receiving(memory, device, is_lent=is_lent)
        self._tensor_count = 0
        self.received_bytes = 0

    def result(self) -> segment_pb2.Answer:
        """Waits for the message with the result. Raises WorkerError, or WorkerLostError if a deadline passes."""
        asked = monotonic()
        while (message := self._next()).WhichOneof("answer") == "progress":
            self._check_queue(message.progress.ahead_s)
            if message.progress.running and self._running_since is None:
                self._running_since = monotonic()
            most_s = longest_execution_s(self._expected_s())
            if self._running_since is None and monotonic() - asked > most_s:
                raise WorkerLostError(f"the worker has not started the segment after {most_s:.1f} s", status="BUSY")
        if message.WhichOneof("answer") is None:
            raise TransferError("tensors of an answer came before its result")
        self._running_since = None
        self._tensor_count = message.tensor_count
        return message

    def tensor(self, index: int) -> Tensor:
        """Returns the `index`-th tensor after the result, owned by the caller. Waits and raises as `result` does."""
        while not self._receiver.is_complete(index) and not self._is_whole:
            self._next()
        return self._receiver.tensor(index)

    def forget(self, index: int) -> None:
        """Drops the `index`-th tensor. It cannot be requested again."""
        self._receiver.forget(index)

    def rest(self, deadline: float = math.inf) -> TensorReceiver:
        """Receives all tensors.

        Raises as `result` does, and WorkerLostError if they are not complete at the deadline.
        """
        while not self._is_whole:
            self._next()
            if monotonic() > deadline:
                raise WorkerLostError("the worker takes too long to send its answer", status="SLOW")
        return self._receiver

    def close(self) -> None:
        """Cancels the rest of the answer."""
        self._messages.close()
        if self._memory is not None and self._answer:
            self._memory.ended(self._answer)

    @property
    def _is_whole(self) -> bool:
        return self._receiver.has_all(self._tensor_count)

    def _next(self) -> segment_pb2.Answer:
        carried = self._messages.next(self._check_execution)
        self.received_bytes += carried.size_bytes + shared_bytes(carried.tensors)
        self._receiver.add_carried(carried)
        return carried.message

    def _check_execution(self) -> None:
        if self._running_since is not None:
            most_s = longest_execution_s(self._expected_s())
            if monotonic() - self._running_since > most_s:
                raise WorkerLostError(f"the worker has run the segment for more than {most_s:.1f} s", status="SLOW")

    def _check_queue(self, queued_s: float) -> None:
        if queued_s > longest_queue_s(self._expected_s()):
            raise WorkerLostError(
                f"the worker has {queued_s:.1f} s of other work queued, which takes longer than recomputing the "
                "segment here",
                status="BUSY",
            )
