"""Uploads tensors to a worker."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import Liveness, with_liveness
from backhaul._worker_client.connection.shared_memory import sending
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.stored_tensors import StoredTensors
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.wire.splicing import Batch, encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches


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
        with sending(worker_session.memory, count) as write:
            addresses = self.put_batches(worker_session, batches(outgoing_tensors, write), count)
        self._stored.learn(worker_session, addresses)

    def put_batches(
        self, worker_session: WorkerSession, sent: Iterable[Batch], count: Callable[[int], None]
    ) -> list[bytes]:
        """Sends batches of tensors. Returns their addresses. Raises as `put` does."""

        def encoded() -> Iterator[bytes]:
            named = tensor_pb2.PutTensorsRequest(session=worker_session.session)
            for message in encode_all(sent, named.TENSORS_FIELD_NUMBER, named):
                count(len(message))
                yield message

        messages = with_liveness(encoded(), self._watch)
        method = self._connection.stubs(worker_session).tensors.PutTensors
        return list(call_unary(method, messages, self._connection.silence_s, self._watch).addresses)
