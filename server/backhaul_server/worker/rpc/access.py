"""Access control: which requests may call which method of a worker.

NOTE [Access]
1. A worker with credentials answers only requests that show a valid token, and health checks, because probes have none.
2. A method that is not in `POLICY` does not exist for anyone.
3. A session belongs to the credential that opened it. Requests of others for it are denied.
4. A client that is denied learns neither what is wrong with its token nor whether the method exists. The worker reads
   nothing of what it sends.
"""

import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from backhaul_runtime.errors import ERROR_METADATA_KEY, STATUS_NAMES, CredentialError
from backhaul_runtime.process.credentials import AUTHORIZATION
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.credentials import Caller, Credentials

logger = logging.getLogger("backhaul.worker")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Needs(enum.Enum):
    """The credential that a method requires."""

    NOTHING = enum.auto()
    CREDENTIAL = enum.auto()


POLICY: Mapping[str, Needs] = {
    "/backhaul_proto.v1.SessionService/OpenSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SessionService/KeepSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SessionService/CloseSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.ProgramService/PutProgram": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TensorService/PutTensors": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/Exchange": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TelemetryService/GetTelemetry": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TelemetryService/PutReports": Needs.CREDENTIAL,
    "/grpc.health.v1.Health/Check": Needs.NOTHING,
    "/grpc.health.v1.Health/Watch": Needs.NOTHING,
    "/grpc.health.v1.Health/List": Needs.CREDENTIAL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needs.CREDENTIAL,
}


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller | None:
    """Returns who sent the request that is being handled; None if the worker requires no token."""
    return _caller.get()


class CredentialInterceptor(grpc.aio.ServerInterceptor):
    """Denies requests without a valid token, and sets `caller` for the others.

    Args:
        credentials: Decides which tokens are valid, and whose they are.
        audit: Gets an entry for each denial.
    """

    def __init__(self, credentials: Credentials, audit: AuditLog) -> None:
        self._credentials, self._audit = credentials, audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's handler, or one that denies. gRPC calls it once per call, before the first message."""
        needs = POLICY.get(handler_call_details.method)
        if needs is not Needs.NOTHING:
            metadata = handler_call_details.invocation_metadata or ()
            shown = [str(value) for key, value in metadata if key == AUTHORIZATION]
            known = self._credentials.caller(shown)
            if known is None:
                return self._denial(handler_call_details.method, self._credentials.why_denied(shown))
            if needs is None:
                return None  # gRPC answers UNIMPLEMENTED, as for any unknown method
            _caller.set(known)  # gRPC runs the handler in the same task
        return await continuation(handler_call_details)

    def _denial(self, method: str, why: str) -> Handler:
        async def deny(_: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            logger.warning("Denied a request from %s: it shows %s.", context.peer(), why)
            self._audit.denied(context, method, f"it shows {why}")
            error = CredentialError(
                "the worker wants a token, and the request shows none, or one that is wrong or revoked"
            )
            context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
            await context.abort(grpc.StatusCode[STATUS_NAMES[CredentialError]], error.message)

        # A handler of request streams serves unary methods too, and need not read any request.
        return grpc.stream_stream_rpc_method_handler(deny)
