"""Tensors on their way in."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor

from backhaul_proto.v1 import (
    tensor_pb2,
)
from backhaul_runtime.errors import (
    TransferError,
)
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import last_moment, on_side_stream, use_here
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage, accepted
from backhaul_runtime.wire.tensor_stream import TensorReceiver
from backhaul_server.worker.engine.segment import SessionState, SharedMemory
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import UPLOADED
from backhaul_server.worker.rpc.calls import Context, Servicer, unary


class TensorUpload:
    """Tensors on their way into the store. A context manager: what has not been stored at its end is given up."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._charged: deque[int] = deque()
        self._session = ""
        self._in_place: list[bool] = []
        self._located: list[Callable[[], None]] = []
        self._aside = last_moment(worker.device)
        self._receiver = TensorReceiver(self._admit, worker.device, self._locate, is_for_store=True)
        self._memory: SharedMemory | None = None

    def set_session(self, session: SessionState) -> None:
        """Names the session that sends what `add` takes in from now on."""
        self._session, self._memory = session.id, session.memory

    def _admit(self, layout: Layout) -> None:
        UPLOADED.check(len(self._in_place) + 1)
        self._charged.append(self._worker.expect_tensor(layout))
        self._in_place.append(False)

    def _locate(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        if self._memory is None:
            raise TransferError("a tensor is declared in shared memory, and none is shared")
        tensor, let_go = self._memory.use(location, layout)
        self._located.append(let_go)
        self._in_place[-1] = True
        return lambda: tensor

    def add(self, carried: TensorMessage[Any]) -> None:
        """Takes in what a message carries. Raises BudgetError, TransferError."""
        with on_side_stream(self._aside):
            self._receiver.add_carried(carried)

    def stored(self) -> list[bytes]:
        """Stores all that came, for the session that sent it.

        Returns:
            Their addresses.

        Raises:
            SessionUnknownError: It has ended meanwhile.
            TransferError: Not all came, or something else than declared.
        """
        if self._charged:
            self._worker.session(self._session)
        with on_side_stream(self._aside):  # not behind what the executor runs
            arrived = self._receiver.stored()
        for (address, tensor), is_shared in zip(arrived, self._in_place, strict=True):
            use_here(tensor)
            self._worker.store.arrived(self._session, address, tensor, self._charged.popleft(), is_shared=is_shared)
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


class TensorServicer(Servicer):
    """Takes tensors."""

    @unary
    async def PutTensors(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[TensorMessage[tensor_pb2.PutTensorsRequest] | TransferError], context: Context
    ) -> tensor_pb2.PutTensorsResponse:
        """Charges each at its declaration, stores all once the stream has ended well, none otherwise."""
        session_id, silence_s, now = "", self.worker.lease_s, asyncio.get_running_loop().time
        with ExitStack() as opened, TensorUpload(self.worker) as arriving:
            try:
                async with asyncio.timeout(silence_s) as patience:  # what is declared is held for what is to come
                    async for received in request:
                        patience.reschedule(now() + silence_s)
                        carried = accepted(received)
                        if not session_id:
                            session_id = carried.message.session
                            opened.enter_context(self.worker.streaming(self.worker.session(session_id)))
                        arriving.set_session(self.worker.session(session_id))
                        arriving.add(carried)
                        self.meter.received(shared_bytes(carried.tensors))
            except TimeoutError:
                raise TransferError(f"nothing came for {silence_s:g} s in the middle of an upload") from None
            return tensor_pb2.PutTensorsResponse(addresses=arriving.stored())
