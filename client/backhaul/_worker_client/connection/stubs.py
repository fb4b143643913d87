"""The stubs of a worker's services on one channel, and the exchange of the session on it."""

import grpc

from backhaul._worker_client.connection.calls import AuthenticatedMethod
from backhaul._worker_client.connection.exchange import Exchange
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.process.credentials import bearer
from backhaul_runtime.wire.stubs import stub


class Stubs:
    """The stubs of all services on a channel.

    Args:
        channel: The gRPC channel to a worker.
        token: Sent with every call.
        silence_s: The longest silence in seconds, see NOTE [Bounds].

    Attributes:
        exchange: The requests of the session, with their answers.
    """

    def __init__(self, channel: grpc.Channel, token: str, silence_s: float) -> None:
        self.sessions = stub(channel, session_pb2.DESCRIPTOR.services_by_name["SessionService"])
        self.programs = stub(channel, program_pb2.DESCRIPTOR.services_by_name["ProgramService"])
        self.tensors = stub(channel, tensor_pb2.DESCRIPTOR.services_by_name["TensorService"])
        self.segments = stub(channel, segment_pb2.DESCRIPTOR.services_by_name["SegmentService"])
        self.telemetry = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"])
        if token:
            for service in list(vars(self).values()):
                for name, method in list(vars(service).items()):
                    setattr(service, name, AuthenticatedMethod(method, bearer(token)))
        self.exchange = Exchange(self.segments.Exchange, silence_s)

    def close(self) -> None:
        """Ends the exchange."""
        self.exchange.close()
