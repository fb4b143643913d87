"""Receives tensors of a request and stores them."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import DeviceMoment, Side, present_moment, use_here
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from backhaul_server.worker.engine.segment import SessionState, SharedMemory
from backhaul_server.worker.engine.stored_values import StoredValue, check_all_same
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import UPLOADED

MOST_COPYING = 16
"""Messages of an upload whose copies to the device may be in progress. Their bytes are in pinned memory meanwhile."""


class TensorUpload:
    """A context manager that receives tensors and stores them. Its end frees what was not stored. Event loop only.

    Args:
        worker: The worker whose store receives the tensors.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._session: SessionState | None = None
        self._charged: deque[int] = deque()
        self._are_shared: list[bool] = []
        self._releases: list[Callable[[], None]] = []
        self._bases: list[object] = []
        self._copying: deque[Sequence[DeviceMoment]] = deque()
        self._receiver = TensorReceiver(self._admit, worker.device, self._locate, self._base, is_for_store=True)
        self._memory: SharedMemory | None = None

    def set_session(self, session: SessionState) -> None:
        """Sets the session that has sent the tensors of all following calls of `add`."""
        self._session, self._memory = session, session.memory

    def _admit(self, layout: Layout) -> None:
        UPLOADED.check(len(self._are_shared) + 1)
        assert self._session is not None
        self._charged.append(self._worker.expect_tensor(self._session, layout))
        self._are_shared.append(False)

    def _base(self, address: bytes) -> Tensor:
        """Returns a tensor that the session possesses, and keeps it from being evicted until the end of the upload."""
        assert self._session is not None
        UPLOADED.check(len(self._bases) + 1)
        reader = object()
        tensor = self._worker.lend(self._session, address, reader)
        self._bases.append(reader)
        return tensor

    def _locate(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        if self._memory is None:
            raise TransferError("a tensor is declared in shared memory, but this session shares none")
        tensor, release = self._memory.use(location, layout)
        self._releases.append(release)
        self._are_shared[-1] = True
        return lambda: tensor

    async def add(self, carried: TensorMessage[Any]) -> None:
        """Receives the tensors of a message. Copies to the device are queued, so they may end later.

        Raises BudgetError, LimitError or TransferError.
        """
        batch, receiver, waits = carried.tensors, self._receiver, self._worker.device_waits
        if batch is None:
            return
        with waits.queued(Side.TO_DEVICE):
            receiver.declare(batch)
            has_to_wait = receiver.fill_waits(batch)
            if not has_to_wait:
                receiver.fill(batch)
            copied = present_moment(self._worker.device)
        if has_to_wait:
            await waits.run(Side.TO_DEVICE, partial(receiver.fill, batch))
        elif copied:
            self._copying.append(copied)
            if len(self._copying) > MOST_COPYING:  # the device takes them more slowly than they come
                await waits.copied(Side.TO_DEVICE, self._copying.popleft())

    async def stored(self) -> list[bytes]:
        """Stores all received tensors, for the session that sent them.

        Returns:
            The addresses of the tensors, in the order of their arrival.

        Raises:
            SessionUnknownError: The session has ended meanwhile.
            TransferError: A tensor is incomplete, or differs from its declaration or from an equally named one.
        """
        session, receiver, waits = self._session, self._receiver, self._worker.device_waits
        has_to_wait = receiver.stored_waits
        received_tensors = await waits.run(Side.TO_DEVICE, receiver.stored) if has_to_wait else receiver.stored()
        known_equal = await self._compared(dict(received_tensors)) if has_to_wait else {}
        if self._charged and session is not None:
            self._worker.session(session.id)
        for (address, tensor), is_shared in zip(received_tensors, self._are_shared, strict=True):
            use_here(tensor)
            assert session is not None
            self._worker.store.arrived(
                session,
                address,
                tensor,
                self._charged.popleft(),
                is_shared=is_shared,
                known_equal=known_equal.get(address),
            )
        self._releases.clear()
        self._worker.spared_bytes += max(0, self._receiver.spared_bytes)
        return [address for address, _ in received_tensors]

    async def _compared(self, received: Mapping[bytes, Tensor]) -> dict[bytes, StoredValue]:
        """Compares tensors with those that other sessions have stored under the same addresses.

        Returns the stored ones, all of which are equal. Raises TransferError if one differs.
        """
        equal: dict[bytes, StoredValue] = {}
        while uncompared := self._of_others(received, equal):  # others may store more of them while a thread compares
            pairs = [(address, received[address], other) for address, other in uncompared.items()]
            await self._worker.device_waits.run(Side.TO_DEVICE, partial(check_all_same, pairs))
            equal |= uncompared
        return equal

    def _of_others(
        self, received: Mapping[bytes, Tensor], compared: Mapping[bytes, StoredValue]
    ) -> dict[bytes, StoredValue]:
        assert self._session is not None
        others = {address: self._worker.store.of_others(self._session, address) for address in received}
        return {a: other for a, other in others.items() if other is not None and other is not compared.get(a)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for size in self._charged:
            assert self._session is not None
            self._worker.store.abandon(self._session, size)
        for release in self._releases:
            release()
        for reader in self._bases:
            self._worker.store.detach(reader)
        del self._receiver  # it refers to this object: without the cycle tensors need no garbage collector
