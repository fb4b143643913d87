"""The stream of a worker's answer: progress, a result, then tensors; within the deadlines of NOTE [Bounds]."""

import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import torch
from torch import Tensor

from backhaul._worker_client.connection.deadlines import LONGEST_S, SLICE_S, Expected, longest_queue_s, longest_run_s
from backhaul._worker_client.connection.grpc_errors import (
    closed_error,
    damaged_error,
    error_of,
    forget_stack,
    unsent_error,
)
from backhaul._worker_client.connection.lanes import LANE_LOST, NO_LANES, Lane, LaneOffer
from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory, receiving
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import TransferError, WorkerLostError
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

R = TypeVar("R")
MAX_WAITING_MESSAGES = 4


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
        except grpc.RpcError as error:
            raise unsent_error(error) from None
        self._receive_in_thread(self._call, None)

    def _receive_in_thread(self, call: Any, lane: Lane | None) -> None:
        threading.Thread(target=self._pump, args=(call, lane), name="backhaul-receive", daemon=True).start()

    def result(self) -> R:
        """Waits for the result. Raises WorkerError, or WorkerLostError if a deadline passes."""
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
                silent += min(SLICE_S, monotonic() - before)  # NOTE [Bounds], Rule 2
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
