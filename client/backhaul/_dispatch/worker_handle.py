"""A worker of a session."""

import logging
from collections.abc import Callable, Mapping
from time import monotonic

from torch import Tensor

from backhaul._worker_client.connection import Connection, WorkerSession
from backhaul._worker_client.deadlines import AnswerStream, longest_run_s
from backhaul._worker_client.uploader import Uploader
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, WorkerLostError
from backhaul_runtime.process.logs import about

logger = logging.getLogger("backhaul")


class WorkerHandle:
    """A worker of the session: its link, what sends to it, and the segments it has."""

    def __init__(self, link: Connection, inflight_bytes: int, inflight_boundaries: int) -> None:
        self.link = link
        self.uploader = Uploader(link, inflight_bytes, inflight_boundaries)
        self.differences: dict[tuple[int, str], Mapping[str, tuple[str, str]]] = {}  # by generation and kind of device
        self._failed: WorkerSession | None = None  # to give what it was asked for

    def upcoming(self, segment: int) -> list[int]:
        """The segment that backward reaches after this one: the last saved before it that is still there."""
        earlier = [number for number in self.uploader.segments() if number < segment]
        return [max(earlier)] if earlier else []

    def fetch(self, address: bytes, count: Callable[[int], None]) -> Tensor | None:
        """A tensor that segments on this worker name, not verified; None where it does not come.

        On the host, owned by the caller. Waits within the bounds of `_calls`.

        Args:
            address: The content address of the tensor.
            count: Told of bytes received.
        """
        generation = self.uploader.holder_of(address)
        if generation is None or generation is self._failed:
            return None
        try:
            return self._fetched(generation, address, count)
        except BackhaulError as error:  # what it holds can be computed again, and nobody waits for it twice
            self._failed = generation
            if isinstance(error, WorkerLostError):
                self.link.trouble(generation, error)
            logger.debug("fetching a boundary from %s: %s", self.link.name, error, extra=about(self.link.run))
            return None

    def _fetched(self, generation: WorkerSession, address: bytes, count: Callable[[int], None]) -> Tensor | None:
        memory = generation.memory
        answer = memory.answer() if memory is not None else 0
        request = segment_pb2.FetchSourcesRequest(session=generation.session, addresses=[address], answer=answer)
        method, deadline = self.link.stubs(generation).segments.FetchSources, monotonic() + longest_run_s(0.0)
        stream: AnswerStream[segment_pb2.FetchSourcesResult] = AnswerStream(
            method, request, 0.0, self.link.silence_s, memory, answer
        )
        try:
            stream.result()
            tensors = stream.rest(deadline).tensors()
        finally:
            stream.close()
            count(stream.received_bytes)
        return tensors[0] if tensors else None
