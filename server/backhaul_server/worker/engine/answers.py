"""What the answers of a worker take while they are sent: their number, their memory, and the tensors in them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from backhaul_runtime.errors import BudgetError
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import last_moment
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_machine import Key
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue
from backhaul_server.worker.limits import ANSWERS

SENDING_BYTES = 2 << 20
"""Upper bound of the memory that one answer takes while it is sent: a written message, and one in gRPC's buffers."""


class Answers:
    """Counts and charges the answers that are being sent to all sessions. Event loop only.

    Args:
        store: The worker's memory accounts, and the tensors that answers are read from.
        has_room: Called when an answer was sent: an execution may have waited for its memory.
    """

    def __init__(self, store: Store[StoredValue], has_room: Callable[[], None]) -> None:
        self._store = store
        self._has_room = has_room

    @contextmanager
    def answering(self, segment: Segment, key: Key) -> Iterator[None]:
        """Keeps the result of a request while its answer is sent. Raises BudgetError for too many answers at once."""
        result = segment.key, key
        with self.collecting(segment.session):
            self._store.pin_result(result)
            try:
                yield
            finally:
                self._store.unpin_result(result)

    @contextmanager
    def reading(self, session: SessionState, addresses: Iterable[bytes]) -> Iterator[list[OutgoingTensor]]:
        """Keeps tensors while they are sent. Raises BudgetError for too many answers at once.

        Yields:
            Those of the addressed tensors that segments of the session name, each once.
        """
        named = [address for address in dict.fromkeys(addresses) if self._store.is_named(session, address)]
        values = {address: self._store.value(session, address) for address in named}
        tensors = {address: value for address, value in values.items() if isinstance(value, Tensor)}
        reader = object()
        with self.collecting(session):
            self._store.attach(reader, session, list(tensors), list(tensors), 0)
            try:
                # A stored tensor was complete before its address was known: no queued run needs to be waited for.
                yield [
                    OutgoingTensor(tensor, layout_of(tensor), address, last_moment(tensor.device))
                    for address, tensor in tensors.items()
                ]
            finally:
                self._store.detach(reader)

    @contextmanager
    def sending(self, session: SessionState, size_bytes: int) -> Iterator[None]:
        """Charges a session with the messages of an answer, of so many bytes in all, while they are sent.

        Raises BudgetError.
        """
        charged = min(size_bytes, SENDING_BYTES)
        self._store.start_sending(session, charged)
        try:
            yield
        finally:
            self._store.end_sending(session, charged)
            self._has_room()

    @contextmanager
    def collecting(self, session: SessionState) -> Iterator[None]:
        """Counts an answer to the session while it is sent. Raises BudgetError for too many answers at once."""
        if session.answers >= ANSWERS.most:
            raise BudgetError(
                f"{session.answers} answers are being sent to this trainer already: read them before the next request",
                needed_bytes=0,
                budget_bytes=self._store.budget_bytes,
                retry_after_s=1.0,
            )
        session.answers += 1
        try:
            yield
        finally:
            session.answers -= 1
            self._has_room()
