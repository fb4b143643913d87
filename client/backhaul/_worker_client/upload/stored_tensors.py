"""What a worker stores, as far as its trainer knows."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_runtime.wire.tensor_batches import OutgoingTensor

MAX_KNOWN = 1 << 16


class StoredTensors:
    """The addresses of tensors and programs that a worker session stores. Thread-safe.

    The worker may evict each of them, and then reports it as missing when a request names it. Of more than 65,536
    addresses those are forgotten that were noted longest ago; what they stand for is sent again.

    The worker frees a transient tensor with the last segment that names it. If such a tensor counted as stored from
    then on, the next segment with equal contents would be sent twice: once without the tensor, in vain.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._known_of: WorkerSession | None = None
        self._transient: dict[int, list[bytes]] = {}  # by the number of the segment that names them
        self._named: Counter[bytes] = Counter()  # how often segments name each of them

    def missing(
        self, worker_session: WorkerSession, outgoing_tensors: Iterable[OutgoingTensor]
    ) -> list[OutgoingTensor]:
        """Returns the tensors that the worker does not store, as far as is known."""
        return [outgoing for outgoing in outgoing_tensors if not self.knows(worker_session, outgoing.address)]

    def unknown(self, worker_session: WorkerSession, addresses: Iterable[bytes]) -> set[bytes]:
        """Returns those of these addresses that the worker does not store, as far as is known."""
        with self._lock:
            known = self._known if self._known_of is worker_session else {}
            return {address for address in addresses if address not in known}

    def learn(self, worker_session: WorkerSession, addresses: Iterable[bytes]) -> None:
        """Notes that the worker stores tensors."""
        with self._lock:
            if self._known_of is not worker_session:
                self._known.clear()
                self._known_of = worker_session
            for address in addresses:
                self._known[address] = None
                self._known.move_to_end(address)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def unlearn(self, addresses: Iterable[bytes]) -> None:
        """Notes that the worker no longer stores tensors."""
        with self._lock:
            for address in addresses:
                self._known.pop(address, None)

    def name_transient(self, segment: int, addresses: Iterable[bytes]) -> None:
        """Notes the transient tensors that a saved segment names. The confirmation of a prediction may add some."""
        with self._lock:
            named = self._transient.setdefault(segment, [])
            for address in addresses:
                named.append(address)
                self._named[address] += 1

    def release(self, segment: int) -> None:
        """Forgets the transient tensors that no segment names any more once this one is released."""
        with self._lock:
            for address in self._transient.pop(segment, ()):
                self._named[address] -= 1
                if not self._named[address]:
                    del self._named[address]
                    self._known.pop(address, None)

    def holder_of(self, address: bytes) -> WorkerSession | None:
        """Returns the worker session that stores a tensor, as far as is known."""
        with self._lock:
            return self._known_of if address in self._known else None

    def knows(self, worker_session: WorkerSession, address: bytes) -> bool:
        """Whether the worker stores a tensor or program, as far as is known."""
        with self._lock:
            return self._known_of is worker_session and address in self._known
