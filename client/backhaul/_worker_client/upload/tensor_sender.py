"""Uploads tensors to a worker, over one connection or several."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import Liveness, with_liveness
from backhaul._worker_client.connection.lanes import LANE_LOST
from backhaul._worker_client.connection.shared_memory import can_share, sending
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.stored_tensors import StoredTensors
from backhaul._worker_client.upload.striped_upload import StripedUpload
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import WorkerLostError
from backhaul_runtime.process.logs import about
from backhaul_runtime.wire.splicing import Batch, encode_all
from backhaul_runtime.wire.stripes import can_stripe
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches

logger = logging.getLogger("backhaul")


class TensorSender:
    """Sends tensors to a worker, without a segment. Any thread may call it.

    Args:
        connection: The connection to the worker.
        stored: What the worker stores. What it takes is added.
        watch: The signs of life of the worker during uploads.
    """

    def __init__(self, connection: Connection, stored: StoredTensors, watch: Liveness) -> None:
        self._connection = connection
        self._stored = stored
        self._watch = watch

    def put(
        self, worker_session: WorkerSession, outgoing_tensors: Sequence[OutgoingTensor], count: Callable[[int], None]
    ) -> None:
        """Sends tensors, and waits until the worker has them.

        Raises:
            WorkerError: The worker rejected the tensors.
            WorkerLostError: The worker was silent, or the connection broke.
        """
        addresses = self.put_striped(worker_session, outgoing_tensors, count)
        if addresses is None:
            with sending(worker_session.memory, count) as write:
                addresses = self.put_alone(worker_session, batches(outgoing_tensors, write), count)
        self._stored.learn(worker_session, addresses)

    def put_striped(
        self, worker_session: WorkerSession, outgoing_tensors: Sequence[OutgoingTensor], count: Callable[[int], None]
    ) -> list[bytes] | None:
        """Sends tensors over several connections. Returns None if they must be sent over the main one alone.

        Raises as `put` does.
        """
        lanes = self._connection.lanes
        joined = lanes.joined(worker_session.session)
        if not joined or not can_stripe(outgoing_tensors) or can_share(worker_session.memory, outgoing_tensors):
            return None

        def note(size_bytes: int) -> None:
            self._watch.sign()
            count(size_bytes)

        method = self._connection.stubs(worker_session).tensors.PutTensors
        upload = StripedUpload(method, joined, lanes.broke, self._connection.silence_s, note)
        began = perf_counter()
        try:
            addresses = upload.put(worker_session.session, lanes.number(), outgoing_tensors)
        except WorkerLostError as error:
            if error.status != LANE_LOST or not self._connection.recovered(worker_session):
                raise
            logger.debug("An upload is repeated: %s", error, extra=about(self._connection.run))
            return None
        if len(addresses) != len(outgoing_tensors):
            raise WorkerLostError(f"the worker has taken {len(addresses)} tensors of {len(outgoing_tensors)}")
        lanes.sent(1 + len(joined), outgoing_tensors, perf_counter() - began)
        return addresses

    def put_alone(
        self, worker_session: WorkerSession, sent: Iterable[Batch], count: Callable[[int], None]
    ) -> list[bytes]:
        """Sends batches of tensors over the main connection. Returns their addresses. Raises as `put` does."""

        def encoded() -> Iterator[bytes]:
            named = tensor_pb2.PutTensorsRequest(session=worker_session.session)
            for message in encode_all(sent, named.TENSORS_FIELD_NUMBER, named):
                count(len(message))
                yield message

        messages = with_liveness(encoded(), self._watch)
        method = self._connection.stubs(worker_session).tensors.PutTensors
        return list(call_unary(method, messages, self._connection.silence_s, self._watch).addresses)
