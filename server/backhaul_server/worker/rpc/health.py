"""GRPC's own health and reflection services, if the packages of the `server` extra are installed."""

from typing import Any

import grpc

from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_server.worker.limits import WATCHES

try:
    from grpc_health.v1 import health, health_pb2
    from grpc_reflection.v1alpha import reflection
except ImportError:  # the worker runs without them: a trainer watches its embedded worker itself
    INSTALLED = False
else:
    INSTALLED = True

    _MOST_NAME_BYTES = 256

    def _read(data: bytes) -> Any:
        """Decodes a request. Returns None if its name is longer than that of any service."""
        return None if len(data) > _MOST_NAME_BYTES else health_pb2.HealthCheckRequest.FromString(data)

    class _BoundedServicer(health.aio.HealthServicer):
        """Limits the open watches, and refuses long names: these calls need no token, and a watch stays open."""

        def __init__(self) -> None:
            super().__init__()
            self._watching = 0

        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  gRPC's name
            """Answers with the status of a service."""
            await self._refuse_long(request, context)
            return await super().Check(request, context)

        async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  gRPC's name
            """Streams the status of a service."""
            await self._refuse_long(request, context)
            if self._watching >= WATCHES.most:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHES.most} watches are open already")
            self._watching += 1
            try:
                await super().Watch(request, context)
            finally:
                self._watching -= 1

        async def _refuse_long(self, request: Any, context: Any) -> None:
            if request is None:  # gRPC keeps the request's bytes until the call ends
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no service has so long a name")


SERVICES = tuple(
    service.full_name
    for module in (session_pb2, program_pb2, tensor_pb2, segment_pb2, telemetry_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)


class Health:
    """Adds both services to a server that has not been started.

    Args:
        server: The gRPC server of the worker.
        reflects: Whether every client may list the worker's services.
    """

    def __init__(self, server: grpc.aio.Server, *, reflects: bool) -> None:
        self._servicer: health.aio.HealthServicer | None = None
        if INSTALLED:
            self._servicer = _BoundedServicer()
            to_bytes = health_pb2.HealthCheckResponse.SerializeToString
            handlers = {
                "Check": grpc.unary_unary_rpc_method_handler(self._servicer.Check, _read, to_bytes),
                "Watch": grpc.unary_stream_rpc_method_handler(self._servicer.Watch, _read, to_bytes),
            }
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)])
            if reflects:
                reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def serving(self, is_serving: bool) -> None:
        """Sets the status that tells probes and load balancers whether to send requests to this worker."""
        if self._servicer is not None:
            status = health_pb2.HealthCheckResponse
            for name in ("", *SERVICES):
                await self._servicer.set(name, status.SERVING if is_serving else status.NOT_SERVING)
