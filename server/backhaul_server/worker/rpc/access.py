"""Who may call which method of a worker.

NOTE [Access]
1. A worker with a token answers only requests that show it, and health checks: probes have none.
2. A method is in `POLICY`, or is not there for anybody.
3. Who is denied learns neither what is wrong with what they showed nor whether the method exists, and nothing of what
   they send is read.
"""

import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc

from backhaul_runtime.errors import ERROR_METADATA_KEY, STATUS_NAMES, CredentialError
from backhaul_runtime.process.credentials import AUTHORIZATION, shows

logger = logging.getLogger("backhaul.worker")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Needs(enum.Enum):
    """What a request must show."""

    NOTHING = enum.auto()
    CREDENTIAL = enum.auto()


POLICY: Mapping[str, Needs] = {
    "/backhaul_proto.v1.SessionService/OpenSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SessionService/KeepSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SessionService/CloseSession": Needs.CREDENTIAL,
    "/backhaul_proto.v1.ProgramService/PutProgram": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TensorService/PutTensors": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/SaveSegment": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/ShortSaves": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/Recompute": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/Backward": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/ShortBackwards": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/Ahead": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/ReleaseSegments": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/CollectGradients": Needs.CREDENTIAL,
    "/backhaul_proto.v1.SegmentService/FetchSources": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TelemetryService/GetTelemetry": Needs.CREDENTIAL,
    "/backhaul_proto.v1.TelemetryService/PutReports": Needs.CREDENTIAL,
    "/grpc.health.v1.Health/Check": Needs.NOTHING,
    "/grpc.health.v1.Health/Watch": Needs.NOTHING,
    "/grpc.health.v1.Health/List": Needs.CREDENTIAL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Needs.CREDENTIAL,
}


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Denies requests that don't show the token of this worker."""

    def __init__(self, token: str) -> None:
        self._token = token
        # For unary methods too: a stream of requests is one that need not be read.
        self._denial: Handler = grpc.stream_stream_rpc_method_handler(self._deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The method's handler, or one that denies. Called by gRPC once for each call, before its first message."""
        needs = POLICY.get(handler_call_details.method)
        if needs is not Needs.NOTHING:
            metadata = handler_call_details.invocation_metadata or ()
            if not shows((str(value) for key, value in metadata if key == AUTHORIZATION), self._token):
                return self._denial
            if needs is None:
                return None  # gRPC says UNIMPLEMENTED, as of a method that no server knows
        return await continuation(handler_call_details)

    async def _deny(self, _: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        logger.warning("denied a request without this worker's token from %s", context.peer())
        error = CredentialError("the worker wants a token, and the request shows none or a wrong one")
        context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
        await context.abort(grpc.StatusCode[STATUS_NAMES[CredentialError]], error.message)
