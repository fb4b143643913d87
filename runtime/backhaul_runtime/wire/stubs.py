"""The methods of a worker's services, as a client calls them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from backhaul_runtime.wire.splicing import deserializer, serialize

Reader = Callable[[Any], Callable[[bytes], Any]]
"""Given a class of messages, returns what reads them."""


def stub(channel: Any, service: ServiceDescriptor, reader: Reader = deserializer) -> SimpleNamespace:
    """As the generated stubs make it, but requests are sealed, and answers are read by `splicing` or another reader.

    An answer that is refused comes as a TransferError: see NOTE [Seal].

    Args:
        channel: A channel of grpc or of grpc.aio.
        service: One of those in `backhaul_proto`.
        reader: Parses the bytes of an answer.
    """
    return SimpleNamespace(**{method.name: _method(channel, method, reader) for method in service.methods})


def as_protobuf(kind: Any) -> Callable[[bytes], Any]:
    """Reads messages as any stub does: tensors and all, and without a look at the checksum."""
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
