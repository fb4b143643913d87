"""Access control: which requests may call which method of a worker.

NOTE [Access]
1. A worker with a token answers only requests that carry it, and health checks, because probes have no token.
2. A method that is not in `POLICY` does not exist for anyone.
3. A client that is denied learns neither what is wrong with its token nor whether the method exists. The worker reads
   nothing of what it sends.
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
    """The credential that a method requires."""

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
    """Denies requests without the worker's token.

    Args:
        token: The worker's token, not empty.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        # A handler of request streams serves unary methods too, and need not read any request.
        self._denial: Handler = grpc.stream_stream_rpc_method_handler(self._deny)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's handler, or one that denies. gRPC calls it once per call, before the first message."""
        needs = POLICY.get(handler_call_details.method)
        if needs is not Needs.NOTHING:
            metadata = handler_call_details.invocation_metadata or ()
            if not shows((str(value) for key, value in metadata if key == AUTHORIZATION), self._token):
                return self._denial
            if needs is None:
                return None  # gRPC answers UNIMPLEMENTED, as for any unknown method
        return await continuation(handler_call_details)

    async def _deny(self, _: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        logger.warning("Denied a request without this worker's token from %s.", context.peer())
        error = CredentialError("the worker wants a token, and the request shows none or a wrong one")
        context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
        await context.abort(grpc.StatusCode[STATUS_NAMES[CredentialError]], error.message)
