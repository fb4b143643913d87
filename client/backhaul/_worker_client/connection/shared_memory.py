"""The trainer's side of memory shared with a worker on the same machine.

A missing region or worker is no error and causes no wait: tensors then travel in messages.
"""

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import BackhaulError, TransferError, WorkerLostError
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.wire.region_offers import SharedMemoryRequest, is_same_user, take_offer
from backhaul_runtime.wire.shared_memory import Outbox, Region, Slot, checksum_of
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, SharedWriter
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

logger = logging.getLogger("backhaul")
_CONNECT_S = 1.0


class TrainerSharedMemory:
    """Memory shared with a worker for one session on it. Thread-safe.

    Args:
        path: The path of the worker's Unix socket.
        session: The worker's id of the session.
    """

    def __init__(self, path: str, session: str) -> None:
        self._path = path
        self._session = session
        self._lock = threading.Lock()  # guards the socket and the regions
        self._answers = itertools.count(1)
        self._outbox = Outbox()
        self._inbox: dict[int, Region] = {}
        self._has_asked = False
        self._uploaded_bytes = 0
        self._peer: socket.socket | None = None
        self._connect()

    @contextmanager
    def sending(self, count: Callable[[int], None]) -> Iterator[SharedWriter]:
        """Yields a function that writes the tensors of one upload to shared memory, and counts their bytes.

        If the upload fails without an answer of the worker, it is unknown which tensors the worker took. Then all
        regions are given up, and others are requested.
        """
        self._poll()
        outbox, places = self._outbox, list[Slot]()

        def place(outgoing: OutgoingTensor) -> tensor_pb2.Location | None:
            if not Outbox.takes(outgoing.layout) or outbox is not self._outbox:
                return None
            slot = outbox.put(outgoing)
            if slot is None:
                self._ask_for(outgoing.layout.span_bytes)
                return None
            places.append(slot)
            count(outgoing.layout.span_bytes)
            return slot.location(outgoing.layout)

        try:
            yield place
            self._uploaded_bytes = sum(slot.size_bytes for slot in places) or self._uploaded_bytes
        except BaseException as error:
            if isinstance(error, BackhaulError) and not isinstance(error, WorkerLostError):
                outbox.withdraw(places)
            else:
                self._renew()
            raise
        finally:
            places.clear()  # an error that is kept somewhere must not keep regions alive

    def make_room(self) -> None:
        """Asks for room for another upload like the last one.

        Call when the worker knows what that upload superseded.
        """
        if (lacking := self._outbox.lacks_bytes(self._uploaded_bytes)) > 0:
            self._say(SharedMemoryRequest.ROOM, lacking)

    def answer(self) -> int:
        """Returns a number for an answer whose tensors may use shared memory, 0 if none may.

        Call `ended` afterwards.
        """
        return next(self._answers) if self._peer is not None else 0

    def ended(self, answer: int) -> None:
        """Notes that no further tensors of an answer will be read."""
        self._say(SharedMemoryRequest.ENDED, answer)

    def copied(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        """Returns a function that copies a tensor out of shared memory.

        Raises TransferError for an impossible location.

        The returned function raises TransferError if the tensor is not as the worker wrote it.
        """
        region = self._region(location, layout)
        return lambda: _as_written(region.copy(location, layout), location, layout)

    def in_place(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        """Works as `copied`, but the returned tensor stays in shared memory."""
        region = self._region(location, layout)
        return lambda: _as_written(region.use(location, layout), location, layout)

    def _region(self, location: tensor_pb2.Location, layout: Layout) -> Region:
        if location.region not in self._inbox:
            self._poll()  # the region was handed over before the message was sent
        region = self._inbox.get(location.region)
        if region is None:
            raise TransferError(f"a tensor lies in region {location.region}, which was not handed over")
        region.check(location, layout)
        return region

    def close(self) -> None:
        """Stops sharing memory."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Drops the socket and the regions. Takes no lock: callers hold it, or are the child of a fork."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()
        self._outbox.close()
        self._outbox, self._inbox = Outbox(), {}

    def _connect(self) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.settimeout(_CONNECT_S)
            peer.connect(self._path)
            if not is_same_user(peer):
                raise PermissionError("the socket belongs to another user")
            peer.send(self._session.encode())
            peer.setblocking(False)
        except OSError as error:  # for example, the worker runs in another container
            logger.debug("No memory is shared through %s: %s", self._path, error)
            peer.close()
            return
        self._peer = peer

    def _renew(self) -> None:
        with self._lock:
            was_shared = self._peer is not None
            self.forget()
            self._has_asked = False
            if was_shared:
                self._connect()

    def _ask_for(self, size_bytes: int) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._say(SharedMemoryRequest.MORE, size_bytes)

    def _say(self, ask: SharedMemoryRequest, number: int) -> None:
        with self._lock, suppress(OSError):
            if self._peer is not None:
                self._peer.send(ask.message(number))

    def _poll(self) -> None:
        """Maps the regions that the worker has handed over."""
        with self._lock:
            try:
                while self._peer is not None:
                    offer = take_offer(self._peer)
                    if offer is None:
                        return self.forget()
                    is_down, region = offer
                    if not is_down:
                        self._has_asked = False
                    if region is not None and is_down:
                        self._inbox[region.number] = region
                    elif region is not None:
                        self._outbox.add(region)
            except BlockingIOError:
                pass
            except (OSError, TransferError) as error:
                logger.warning("Memory is no longer shared through %s: %s", self._path, error)
                self.forget()


def _as_written(tensor: Tensor, location: tensor_pb2.Location, layout: Layout) -> Tensor:
    """Returns the tensor. Raises TransferError if it does not fit its checksum: Rule 5 of NOTE [Regions]."""
    if checksum_of(tensor, layout) != location.checksum:
        raise TransferError(f"a tensor in region {location.region} of shared memory differs from what the worker wrote")
    return tensor


@contextmanager
def sending(memory: TrainerSharedMemory | None, count: Callable[[int], None]) -> Iterator[SharedWriter]:
    """Calls `TrainerSharedMemory.sending`; without shared memory, all tensors travel in messages."""
    if memory is None:
        yield lambda _: None
        return
    with memory.sending(count) as write:
        yield write


def receiving(
    memory: TrainerSharedMemory | None, device: torch.device | None, *, is_lent: bool = False
) -> TensorReceiver:
    """Returns a receiver for an answer. Tensors in shared memory are copied out, or stay there if they are lent."""
    if memory is None:
        return TensorReceiver(device=device)
    return TensorReceiver(device=device, locate=memory.in_place if is_lent else memory.copied)
