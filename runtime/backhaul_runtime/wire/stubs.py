"""The methods of a worker's services, as a client calls them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from backhaul_runtime.wire.splicing import deserializer, serialize

Reader = Callable[[Any], Callable[[bytes], Any]]
"""Takes a class of messages. Returns a function that decodes them from bytes."""


def stub(channel: Any, service: ServiceDescriptor, reader: Reader = deserializer) -> SimpleNamespace:
    """Creates a client stub that seals requests, and decodes answers with `splicing` or another reader.

    A call returns a refused answer as a TransferError, which `accepted` raises: see NOTE [Seal].

    Args:
        channel: A channel of grpc or of grpc.aio.
        service: The descriptor of a service in `backhaul_proto`.
        reader: Returns the decoder of a class of answers.
    """
    return SimpleNamespace(**{method.name: _method(channel, method, reader) for method in service.methods})


def as_protobuf(kind: Any) -> Callable[[bytes], Any]:
    """A reader that parses whole messages with protobuf, tensors included, and does not check the seal."""
    read: Callable[[bytes], Any] = kind.FromString
    return read


def _method(channel: Any, method: MethodDescriptor, reader: Reader) -> Any:
    make = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    return make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=serialize,
        response_deserializer=reader(GetMessageClass(method.output_type)),
    )
