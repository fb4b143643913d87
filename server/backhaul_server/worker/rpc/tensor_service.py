"""The RPC that receives tensors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage, accepted
from backhaul_server.worker.rpc.calls import Context, Servicer, unary
from backhaul_server.worker.rpc.uploads import TensorUpload


class TensorServicer(Servicer):
    """Implements the service that receives tensors."""

    @unary
    async def PutTensors(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[TensorMessage[tensor_pb2.PutTensorsRequest] | TransferError], context: Context
    ) -> tensor_pb2.PutTensorsResponse:
        """Stores all tensors of a stream if it ends well, and none otherwise. Each is charged when it is declared."""
        session_id, silence_s, now = "", self.worker.lease_s, asyncio.get_running_loop().time
        with ExitStack() as opened, TensorUpload(self.worker) as upload:
            try:
                # Declared tensors hold memory, so a silent client must not keep the stream open.
                async with asyncio.timeout(silence_s) as deadline:
                    async for received in request:
                        deadline.reschedule(None)  # the client is not silent while this worker is busy
                        carried = accepted(received)
                        if not session_id:
                            session_id = carried.message.session
                            opened.enter_context(self.worker.streaming(self.session(session_id)))
                        upload.set_session(self.session(session_id))
                        await upload.add(carried)
                        self.meter.received(shared_bytes(carried.tensors))
                        deadline.reschedule(now() + silence_s)
            except TimeoutError:
                raise TransferError(f"an upload was silent for {silence_s:g} s") from None
            return tensor_pb2.PutTensorsResponse(addresses=await upload.stored())
