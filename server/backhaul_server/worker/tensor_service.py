"""Tensors on their way in."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from torch import Tensor

from backhaul_proto.v1 import (
    tensor_pb2,
)
from backhaul_runtime.errors import (
    TransferError,
)
from backhaul_runtime.framing import Receiver
from backhaul_runtime.layout import Layout
from backhaul_runtime.shared_memory import shared_bytes
from backhaul_runtime.splicing import Carried
from backhaul_runtime.staging import aside, past, use_here
from backhaul_server.worker.core import Worker
from backhaul_server.worker.handover import Sharing
from backhaul_server.worker.rpc import Context, Servicer, unary


class Arriving:
    """Tensors on their way into the store. A context manager: what has not been stored at its end is given up."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._charged: list[int] = []
        self._in_place: list[bool] = []
        self._located: list[Callable[[], None]] = []
        self._aside = past(worker.device)
        self._receiver = Receiver(self._admit, worker.device, self._locate, is_for_store=True)
        self.memory: Sharing | None = None

    def _admit(self, layout: Layout) -> None:
        self._charged.append(self._worker.expect_tensor(layout))
        self._in_place.append(False)

    def _locate(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        if self.memory is None:
            raise TransferError("a tensor is declared in shared memory, and none is shared")
        tensor, let_go = self.memory.use(location, layout)
        self._located.append(let_go)
        self._in_place[-1] = True
        return lambda: tensor

    def add(self, carried: Carried[Any]) -> None:
        """Takes in what a message carries. Raises BudgetError, TransferError."""
        with aside(self._aside):
            self._receiver.add_carried(carried)

    def stored(self) -> list[bytes]:
        """Stores all that came. Returns their addresses. Raises TransferError."""
        with aside(self._aside):  # not behind what the executor runs
            arrived = self._receiver.stored()
        for (address, tensor), is_shared in zip(arrived, self._in_place, strict=True):
            use_here(tensor)
            self._worker.store.arrived(address, tensor, self._charged.pop(0), is_shared=is_shared)
        self._located.clear()
        return [address for address, _ in arrived]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for size in self._charged:
            self._worker.store.abandon(size)
        for let_go in self._located:
            let_go()
        del self._receiver  # which knows us: tensors must not wait for the garbage collector


class Tensors(Servicer):
    """Takes tensors."""

    @unary
    async def PutTensors(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[Carried[tensor_pb2.PutTensorsRequest]], context: Context
    ) -> tensor_pb2.PutTensorsResponse:
        """Charges each at its declaration, stores all once the stream has ended well, none otherwise."""
        session_id, silence_s, now = "", self.worker.lease_s, asyncio.get_running_loop().time
        with Arriving(self.worker) as arriving:
            try:
                async with asyncio.timeout(silence_s) as patience:  # what is declared is held for what is to come
                    async for carried in request:
                        patience.reschedule(now() + silence_s)
                        session_id = session_id or carried.message.session
                        arriving.memory = self.worker.session(session_id).memory
                        arriving.add(carried)
                        self.meter.received(shared_bytes(carried.tensors))
            except TimeoutError:
                raise TransferError(f"nothing came for {silence_s:g} s in the middle of an upload") from None
            return tensor_pb2.PutTensorsResponse(addresses=arriving.stored())
