"""The RPCs that receive tensors, and those that carry a part of a striped transfer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import BackhaulError, BudgetError, LimitError, TransferError
from backhaul_runtime.tensors.staging import Side
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage, accepted, encode
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.segment_engine import SENDING_BYTES
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.calls import Context, Servicer, stream, unary
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.stripes import JoinableUpload, StripedTransfers
from backhaul_server.worker.rpc.uploads import TensorUpload


class TensorServicer(Servicer):
    """Implements the service that receives tensors.

    Args:
        worker: The worker whose store receives the tensors.
        meter: Counts calls and bytes.
        audit: Gets an entry for each request that is denied.
        transfers: The striped transfers in progress.
    """

    def __init__(self, worker: Worker, meter: RpcMeter, audit: AuditLog, transfers: StripedTransfers) -> None:
        super().__init__(worker, meter, audit)
        self._transfers = transfers

    @unary
    async def PutTensors(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[TensorMessage[tensor_pb2.PutTensorsRequest] | TransferError], context: Context
    ) -> tensor_pb2.PutTensorsResponse:
        """Stores all tensors of a stream if it ends well, and none otherwise. Each is charged when it is declared."""
        session_id, silence_s, now = "", self.worker.lease_s, asyncio.get_running_loop().time
        with ExitStack() as opened, TensorUpload(self.worker) as upload:
            striped: JoinableUpload | None = None
            try:
                # Declared tensors hold memory, so a silent client must not keep the stream open.
                async with asyncio.timeout(silence_s) as deadline:
                    async for received in request:
                        deadline.reschedule(None)  # the client is not silent while this worker is busy
                        carried = accepted(received)
                        number = 0
                        if not session_id:
                            session_id, number = carried.message.session, carried.message.stripes
                            opened.enter_context(self.worker.streaming(self.session(session_id)))
                            if number:
                                upload.expect_stripes()
                        upload.set_session(self.session(session_id))
                        await upload.add(carried)
                        if number:
                            striped = opened.enter_context(self._transfers.uploading(session_id, number, upload))
                        self.meter.received(shared_bytes(carried.tensors))
                        deadline.reschedule(now() + silence_s)
            except TimeoutError:
                raise TransferError(f"an upload was silent for {silence_s:g} s") from None
            if striped is not None:
                await striped.completed(silence_s)
            return tensor_pb2.PutTensorsResponse(addresses=await upload.stored())

    @unary
    async def PutStripes(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[TensorMessage[tensor_pb2.PutStripesRequest] | TransferError], context: Context
    ) -> tensor_pb2.PutStripesResponse:
        """Receives pieces of an upload that another connection has declared. Nothing is charged here."""
        striped: JoinableUpload | None = None
        silence_s, now = self.worker.lease_s, asyncio.get_running_loop().time
        with ExitStack() as opened:
            try:
                async with asyncio.timeout(silence_s) as deadline:
                    async for received in request:
                        deadline.reschedule(now() + silence_s)
                        if striped is None:
                            named = accepted(received).message
                            session = self.session(named.session)
                            opened.enter_context(self.worker.streaming(session))
                            striped = await self._transfers.upload(session.id, named.stripes)
                        try:
                            self.session(session.id)
                            deadline.reschedule(None)  # the client is not silent while this worker is busy
                            await striped.add(accepted(received))
                            deadline.reschedule(now() + silence_s)
                        except BackhaulError as error:
                            striped.fail(error)
                            raise
            except TimeoutError:
                raise TransferError(f"a lane was silent for {silence_s:g} s") from None
        return tensor_pb2.PutStripesResponse()

    @stream
    async def GetStripes(  # noqa: N802  gRPC's name
        self, request: tensor_pb2.GetStripesRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends pieces of an answer that is being sent over another connection, as long as there are any left."""
        session = self.session(request.session)
        with ExitStack() as opened:
            try:
                opened.enter_context(self.worker.streaming(session))
                opened.enter_context(self.worker.engine.sending(session, SENDING_BYTES))
            except (BudgetError, LimitError):
                return  # without room for this lane, the other connections send all pieces
            for batch in self._transfers.answer(session.id, request.stripes):
                await self.worker.device_waits.copied(Side.TO_HOST, batch.complete)
                yield encode(batch, tensor_pb2.GetStripesResponse.TENSORS_FIELD_NUMBER)
