"""The stubs of a worker's services on one channel, and the streams that stay open on it between requests."""

import grpc

from backhaul._worker_client.connection.calls import AuthenticatedMethod
from backhaul._worker_client.connection.pushed_results import PushedResults
from backhaul._worker_client.connection.request_stream import RequestStream
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.process.credentials import bearer
from backhaul_runtime.wire.stubs import stub


class Stubs:
    """The stubs of all services on a channel.

    Args:
        channel: The gRPC channel to a worker.
        token: Sent with every call.
        silence_s: Seconds without a message after which a request stream counts as broken, see NOTE [Short].
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
        self.short_saves = RequestStream(self.segments.ShortSaves, silence_s)
        self.short_backwards = RequestStream(self.segments.ShortBackwards, silence_s)
        self.pushed_results = PushedResults(self.segments.Ahead)

    def close(self) -> None:
        """Closes the streams that stay open between requests."""
        self.short_saves.close()
        self.short_backwards.close()
        self.pushed_results.close()
