"""The worker's RPCs: servicers translate between protobuf and the engine, which decides."""

import math
from time import time

import grpc

from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.errors import LimitError, ProtocolVersionError
from backhaul_runtime.process.fingerprint import fingerprint_with_host
from backhaul_runtime.version import version
from backhaul_runtime.wire.protocol import PROTOCOL_VERSION
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.access import caller
from backhaul_server.worker.rpc.calls import Context, Servicer, handler_of, unary
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.segment_service import SegmentServicer
from backhaul_server.worker.rpc.telemetry_service import TelemetryServicer
from backhaul_server.worker.rpc.tensor_service import TensorServicer


class SessionServicer(Servicer):
    """Implements the service that opens, keeps and closes sessions."""

    @unary
    async def OpenSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.OpenSessionRequest, context: Context
    ) -> session_pb2.OpenSessionResponse:
        """Opens a session. A trainer of another protocol version is refused before anything else."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"the trainer speaks protocol {request.protocol_version} (backhaul {request.client_version}), this "
                f"worker {PROTOCOL_VERSION} (backhaul {version()}): install the same version on both",
                trainer=request.protocol_version,
                worker=PROTOCOL_VERSION,
            )
        account = self.account
        try:
            session = self.worker.open_session(request.trainer, request.run, request.client_version, account)
        except LimitError as error:
            self.audit.denied(context, "OpenSession", error.message, account.name)
            raise
        self.audit.opened(context, account.name, request.trainer, request.run, session.id)
        known = caller()
        session.token = b"" if known is None else known.token
        return session_pb2.OpenSessionResponse(
            protocol_version=PROTOCOL_VERSION,
            worker_version=version(),
            session=session.id,
            lease_s=self.worker.lease_s,
            budget_bytes=self.worker.store.budget_bytes,
            fingerprint=fingerprint_with_host(self.worker.device),
            clock_s=time(),
            memory_path=self.worker.memory_path,
            socket_path=self.worker.socket_path,
            allowed=self.worker.allowed.to_message(),
        )

    @unary
    async def KeepSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.KeepSessionRequest, context: Context
    ) -> session_pb2.KeepSessionResponse:
        """Renews the lease, and notes the largest numerical difference that the trainer has measured."""
        session = self.session(request.session)
        if math.isfinite(request.drift):
            session.drift = max(session.drift, request.drift)
        return session_pb2.KeepSessionResponse(draining=self.worker.draining, clock_s=time())

    @unary
    async def CloseSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.CloseSessionRequest, context: Context
    ) -> session_pb2.CloseSessionResponse:
        """Closes a session, and frees all it holds."""
        if request.session in self.worker.sessions:
            self.worker.close_session(self.session(request.session).id)
        return session_pb2.CloseSessionResponse()


class ProgramServicer(Servicer):
    """Implements the service that receives programs."""

    @unary
    async def PutProgram(  # noqa: N802  gRPC's name
        self, request: program_pb2.PutProgramRequest, context: Context
    ) -> program_pb2.PutProgramResponse:
        """Checks a program and stores it."""
        session = self.session(request.session)
        return program_pb2.PutProgramResponse(address=await self.worker.put_program(session, request.program))


def add_services(server: grpc.aio.Server, worker: Worker, audit: AuditLog) -> None:
    """Adds all of the worker's services to a server that has not been started."""
    meter = RpcMeter()
    for file, servicer in (
        (session_pb2, SessionServicer(worker, meter, audit)),
        (program_pb2, ProgramServicer(worker, meter, audit)),
        (tensor_pb2, TensorServicer(worker, meter, audit)),
        (segment_pb2, SegmentServicer(worker, worker.engine, meter, audit)),
        (telemetry_pb2, TelemetryServicer(worker, meter, audit)),
    ):
        for service in file.DESCRIPTOR.services_by_name.values():
            handlers = {method.name: handler_of(method, servicer) for method in service.methods}
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])
