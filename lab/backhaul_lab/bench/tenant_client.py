"""A client without torch. It sends prepared requests one after the other, as fast as a trainer can.

`python -m backhaul_lab.bench.tenant_client ADDRESS DIRECTORY [TOKEN_FILE]` saves a segment of its own, requests its
backward once, writes the answer to the directory and prints a line. Then it reads points in time from stdin. For each
it prints how many requests were answered in the following CLIENT_S seconds, and the 99th percentile of their durations
in seconds.
"""

import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, tensor_pb2
from backhaul_runtime.process.credentials import bearer, read_token
from backhaul_runtime.version import version
from backhaul_runtime.wire.protocol import CHANNEL_OPTIONS, PROTOCOL_VERSION
from backhaul_runtime.wire.stubs import as_protobuf, stub

CLIENT_S = 1.5


class Client:
    """A session with one saved segment."""

    def __init__(self, channel: grpc.Channel, prepared: Path, token: str) -> None:
        services = [
            stub(channel, service, as_protobuf)
            for file in (session_pb2, program_pb2, tensor_pb2, segment_pb2)
            for service in file.DESCRIPTOR.services_by_name.values()
        ]
        sessions, programs, tensors, segments = services
        self._metadata = bearer(token)
        request = session_pb2.OpenSessionRequest(protocol_version=PROTOCOL_VERSION, client_version=version())
        self._session = sessions.OpenSession(request, metadata=self._metadata).session
        program = program_pb2.PutProgramRequest.FromString((prepared / "program").read_bytes())
        program.session = self._session
        programs.PutProgram(program, metadata=self._metadata)
        tensors.PutTensors(self._tensors(prepared), metadata=self._metadata)
        self._requests: queue.SimpleQueue[segment_pb2.Request | None] = queue.SimpleQueue()
        self._answers = segments.Exchange(iter(self._requests.get, None), metadata=self._metadata)
        segment = segment_pb2.SaveRequest.FromString((prepared / "segment").read_bytes())
        segment.key.segment = 1
        (answer,) = self._asked(segment_pb2.Request(session=self._session, save=segment))
        assert answer.save == segment_pb2.SaveResult()
        self._backward = segment_pb2.BackwardRequest.FromString((prepared / "backward").read_bytes())
        self._backward.key.segment = 1

    def backward(self) -> list[segment_pb2.Answer]:
        """Requests a backward under a new number, so that the worker computes it again. Returns the answer."""
        self._backward.key.backward += 1
        return self._asked(segment_pb2.Request(backward=self._backward))

    def close(self) -> None:
        """Ends the requests."""
        self._requests.put(None)

    def _asked(self, request: segment_pb2.Request) -> list[segment_pb2.Answer]:
        self._requests.put(request)
        answers, declared, left_bytes = list[segment_pb2.Answer](), 0, 0
        while not answers or declared < answers[0].tensor_count or left_bytes:
            answer = next(self._answers)
            assert not answer.error, answer.error
            if not answer.HasField("progress"):
                answers.append(answer)
                declared += len(answer.tensors.declarations)
                left_bytes += sum(declaration.size_bytes for declaration in answer.tensors.declarations)
                left_bytes -= sum(len(chunk.data) for chunk in answer.tensors.chunks)
        return answers

    def _tensors(self, prepared: Path) -> Iterator[tensor_pb2.PutTensorsRequest]:
        for path in sorted(prepared.glob("tensors-*")):
            message = tensor_pb2.PutTensorsRequest.FromString(path.read_bytes())
            message.session = self._session
            yield message


def main(address: str, directory: str, token_file: str = "") -> None:
    """Runs the client, see the module's docstring."""
    token = read_token(token_file) if token_file else ""
    with grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS)) as channel:
        client = Client(channel, Path(directory), token)
        # Clients overwrite each other's answers, which are equal apart from their times.
        for number, answer in enumerate(client.backward()):
            (Path(directory) / f"answer-{number:04}").write_bytes(answer.SerializeToString())
        print("ready", flush=True)
        for line in sys.stdin:
            begin = float(line)
            time.sleep(max(0.0, begin - time.time()))
            durations_s: list[float] = []
            while True:
                asked_at_s = time.time()
                client.backward()
                if time.time() > begin + CLIENT_S:
                    break
                durations_s.append(time.time() - asked_at_s)
            slowest_s = sorted(durations_s)[int(0.99 * len(durations_s))] if durations_s else CLIENT_S
            print(len(durations_s), slowest_s, flush=True)
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
