"""A worker of a session."""

import logging
from collections.abc import Callable, Mapping
from time import monotonic

import torch
from torch import Tensor

from backhaul._worker_client.answers.answer_stream import AnswerStream
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import longest_execution_s
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.compression import Compression
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, WorkerLostError
from backhaul_runtime.process.logs import about

logger = logging.getLogger("backhaul")


class WorkerHandle:
    """A worker of a session: its connection, its uploader, and the segments that it stores.

    Attributes:
        is_leaving: Whether the worker gets no further segments.
        differences: Why the worker computes other bits, by number of the worker session, device of the trainer,
            and whether the CPU beside it counts.
    """

    def __init__(
        self,
        connection: Connection,
        inflight_bytes: int,
        inflight_boundaries: int,
        compression: Compression | None = None,
    ) -> None:
        self.connection = connection
        self.uploader = Uploader(connection, inflight_bytes, inflight_boundaries, compression)
        self.is_leaving = False
        self.differences: dict[tuple[int, torch.device, bool], Mapping[str, tuple[str, str]]] = {}
        self._failed: WorkerSession | None = None  # the worker session that failed to return a tensor

    @property
    def up(self) -> WorkerSession | None:
        """The worker session for new segments; None while there is none."""
        return None if self.is_leaving else self.connection.up

    def upcoming(self, segment: int) -> list[int]:
        """Returns the segment that backward reaches after this one: the last one saved before it that still exists."""
        earlier = [number for number in self.uploader.segments() if number < segment]
        return [max(earlier)] if earlier else []

    def fetch(self, address: bytes, count: Callable[[int], None]) -> Tensor | None:
        """Fetches a tensor that segments on this worker name. Returns None if it does not arrive.

        The tensor is on the host, owned by the caller and not verified. Waits within the deadlines of NOTE [Bounds].

        Args:
            address: The content address of the tensor.
            count: Called with the number of received bytes.
        """
        worker_session = self.uploader.stored.holder_of(address)
        if worker_session is None or worker_session is self._failed:
            return None
        try:
            return self._fetched(worker_session, address, count)
        except (
            BackhaulError
        ) as error:  # the tensor can be computed again, so the trainer does not wait for this worker twice
            self._failed = worker_session
            if isinstance(error, WorkerLostError):
                self.connection.trouble(worker_session, error)
            logger.debug(
                "fetching a boundary from %s: %s", self.connection.name, error, extra=about(self.connection.run)
            )
            return None

    def _fetched(self, worker_session: WorkerSession, address: bytes, count: Callable[[int], None]) -> Tensor | None:
        memory = worker_session.memory
        answer = memory.answer() if memory is not None else 0
        request = segment_pb2.Request(
            session=worker_session.session,
            fetch_sources=segment_pb2.FetchSourcesRequest(addresses=[address]),
            answer=answer,
        )
        deadline = monotonic() + longest_execution_s(0.0)
        pending = self.connection.stubs(worker_session).exchange.ask(request, is_large=True)
        stream = AnswerStream(pending, lambda: 0.0, memory, answer)
        try:
            stream.result()
            tensors = stream.rest(deadline).tensors()
        finally:
            stream.close()
            count(stream.received_bytes)
            self.connection.traffic.add(down_bytes=stream.received_bytes)
        return tensors[0] if tensors else None
