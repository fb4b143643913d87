"""Gradients of parameters that a worker keeps across micro-batches, as the trainer tracks them.

NOTE [Uncollected]
1. The worker keeps the gradients that it was asked to keep. They count only after a commit, which follows the value
   check, so that a backward that ended on the trainer is never counted twice.
2. Commits are numbered within a round, and sent until one was answered, so each is taken once. A collection sends the
   remaining commits and their number. A worker that has not taken all of them returns nothing.
3. Gradients that cannot be collected are lost, and an error says so, because a part of a gradient is a wrong gradient.
   A collection ends its round in any case, so that nothing of it can arrive later.
4. A parameter is named by its id, and kept alive while that name is in use.
5. Each block has a round of its own. A thread of a block that was interrupted may still ask the worker when the next
   block has begun. What the worker keeps for it must not count there, so a commit names the round of its block.
"""

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from backhaul._worker_client.answers.answer_stream import AnswerStream
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import LONGEST_S
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, TransferError, WorkerLostError


class UncollectedGradients:
    """The uncollected gradients on one worker. Thread-safe.

    Args:
        connection: The connection to the worker.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # guards the commits of the round
        self._round = 1
        self._abandoned_on: WorkerSession | None = None  # the worker session that keeps sums of an abandoned round
        self._clear()

    def _clear(self) -> None:
        self._worker_session: WorkerSession | None = None
        self._is_lost = False
        self._parameters: dict[int, Tensor] = {}  # by id
        self._count = 0
        self._untaken: list[segment_pb2.OperationKey] = []  # the last of the commits

    def __bool__(self) -> bool:
        """Whether there are gradients to collect."""
        return bool(self._parameters)

    def begin(self) -> int:
        """Begins the round of a block, and returns its number. The round before ends without being collected."""
        with self._lock:
            self._abandon()
            return self._round

    def commit(
        self,
        worker_session: WorkerSession,
        key: segment_pb2.OperationKey,
        parameters: Iterable[Tensor],
        round_number: int,
    ) -> None:
        """Commits the gradients that a worker kept in a backward. The commit is sent with the next release.

        Args:
            worker_session: The worker session that keeps the gradients.
            key: The key of the backward request.
            parameters: The parameters whose gradients the worker kept.
            round_number: The round of the block that asked.

        Raises:
            WorkerLostError: The round has ended, and nothing is committed (Rule 5).
        """
        with self._lock:
            if round_number != self._round:
                raise WorkerLostError("the block that asked for these gradients has ended", status="LOST")
            self._abandoned_on = None  # the commit itself begins a later round
            self._is_lost |= self._worker_session is not None and self._worker_session is not worker_session
            self._worker_session = worker_session
            self._parameters |= {id(parameter): parameter for parameter in parameters}
            self._count += 1
            self._untaken.append(key)

    def commits(self, worker_session: WorkerSession) -> segment_pb2.Commits | None:
        """Returns the commits that a worker may not have taken yet; None if there are none."""
        with self._lock:
            if self._abandoned_on is worker_session:
                return segment_pb2.Commits(round=self._round, first=1)  # a later round drops the sums of those before
            return self._commits() if self._untaken and self._worker_session is worker_session else None

    def taken(self, commits: segment_pb2.Commits | None) -> None:
        """Notes that the worker has taken these commits."""
        with self._lock:
            if commits is not None and commits.round == self._round:
                self._abandoned_on = None
                last = commits.first + len(commits.backwards) - 1
                del self._untaken[: max(0, last - (self._count - len(self._untaken)))]

    def collect(self, round_number: int, count: Callable[[int], None]) -> list[tuple[Tensor, Tensor]]:
        """Collects the gradients of a round, and ends it. Returns the parameters, each with its sum.

        Args:
            round_number: The round of the block that asks. There is nothing to collect of one that has ended.
            count: Called with the number of received bytes.

        Raises:
            BackhaulError: The worker was lost with its gradients.
        """
        with self._lock:
            if not self or round_number != self._round:
                return []
            try:
                sums = self._collected(count)
            except BackhaulError:
                self._end_round()
                raise
            self._end_round()
            return sums

    def abandon(self) -> None:
        """Ends the round without collecting it. The worker frees its sums with the next release."""
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        if self:
            self._abandoned_on = self._worker_session
        self._end_round()

    def forked(self) -> None:
        """Resets the state in the child of a fork, where the thread that holds the lock may not exist."""
        self._lock = threading.Lock()  # guards the commits of the round

    def _end_round(self) -> None:
        self._round += 1
        self._clear()

    def _collected(self, count: Callable[[int], None]) -> list[tuple[Tensor, Tensor]]:
        worker_session = self._worker_session
        assert worker_session is not None
        if self._is_lost:
            raise WorkerLostError("the worker has lost the session", status="LOST")
        try:
            return self._asked(worker_session, count)
        except (WorkerLostError, TransferError) as error:
            if isinstance(error, WorkerLostError):
                self._connection.trouble(worker_session, error)
            if not self._connection.recovered(worker_session):
                raise
        return self._asked(worker_session, count)

    def _asked(self, worker_session: WorkerSession, count: Callable[[int], None]) -> list[tuple[Tensor, Tensor]]:
        memory = worker_session.memory
        answer = memory.answer() if memory is not None else 0
        request = segment_pb2.Request(
            session=worker_session.session,
            collect_gradients=segment_pb2.CollectGradientsRequest(commits=self._commits(), count=self._count),
            answer=answer,
        )
        devices = {parameter.device for parameter in self._parameters.values()} - {torch.device("cpu")}
        pending = self._connection.stubs(worker_session).exchange.ask(request, is_large=True)
        stream = AnswerStream(pending, lambda: LONGEST_S, memory, answer, next(iter(devices), None))
        try:
            slots = list(stream.result().collect_gradients.slots)
            tensors = stream.rest().tensors()
        finally:
            stream.close()
            count(stream.received_bytes)
            self._connection.traffic.add(down_bytes=stream.received_bytes)
        if set(slots) != self._parameters.keys() or len(slots) != len(tensors):
            raise WorkerLostError("the worker returned gradients of other parameters than it kept", status="LOST")
        parameters = [self._parameters[slot] for slot in slots]
        # The tensors have arrived on one device. Those of a model on several devices go on to theirs.
        sums = [(one, tensor.to(one.device)) for one, tensor in zip(parameters, tensors, strict=True)]
        for parameter, tensor in sums:
            if (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
                raise WorkerLostError("the worker returned gradients of other shapes than it kept", status="LOST")
        return sums

    def _commits(self) -> segment_pb2.Commits:
        first = self._count - len(self._untaken) + 1
        return segment_pb2.Commits(round=self._round, first=first, backwards=self._untaken)
