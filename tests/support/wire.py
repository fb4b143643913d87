"""What is written for the wire, as a peer that knows no more than protobuf sees it."""

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from backhaul._worker_client.connection.exchange import decoded_error
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.process.credentials import bearer
from backhaul_runtime.wire.splicing import Batch, encode, serialize
from backhaul_runtime.wire.stubs import as_protobuf, stub

SERVICES = [
    service
    for file in (session_pb2, program_pb2, tensor_pb2, segment_pb2, telemetry_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
]
METHODS = [method for service in SERVICES for method in service.methods]


def plain(batch: Batch) -> tensor_pb2.TensorBatch:
    """The batch, read by protobuf."""
    return tensor_pb2.PutTensorsRequest.FromString(encode(batch, 2)).tensors


class Services:
    """A worker's services: requests are sealed, answers are messages of protobuf."""

    def __init__(self, channel: Any) -> None:
        self.sessions, self.programs, self.tensors, self.segments, self.telemetry = (
            stub(channel, service, as_protobuf) for service in SERVICES
        )


class Asked(Iterator[segment_pb2.Answer]):
    """The messages that answer one request on a stream of its own. Raises the error that it is answered with.

    Args:
        segments: The stub of the service of segments.
        session: The id of the session.
        request: What is asked for, as fields of a `Request`.
    """

    def __init__(self, segments: Any, session: str, timeout: float = 60.0, **request: Any) -> None:
        self._call = segments.Exchange(iter([segment_pb2.Request(session=session, **request)]), timeout=timeout)

    def __next__(self) -> segment_pb2.Answer:
        answer: segment_pb2.Answer = next(self._call)
        if error := answer.error or answer.save.error:
            raise decoded_error(error)
        return answer

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel()


def refusal(channel: grpc.Channel, method: Any, token: str, request: bytes = b"") -> grpc.Call | None:
    """The call that ends with an error when a method is called with a request; None if it succeeds."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    multicallable = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    try:
        answer = multicallable(
            iter([request]) if method.client_streaming else request, timeout=60, metadata=bearer(token)
        )
        list(answer if method.server_streaming else [answer])
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error
    return None


def serve(server: grpc.Server, file: Any, servicer: object) -> None:
    """Adds a service that a test plays to a server: it reads any request, and seals its answers."""
    for service in file.DESCRIPTOR.services_by_name.values():
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                getattr(servicer, method.name),
                request_deserializer=as_protobuf(GetMessageClass(method.input_type)),
                response_serializer=serialize,
            )
            for method in service.methods
            if hasattr(servicer, method.name)
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])
