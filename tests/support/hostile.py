"""A client that holds the token and sends whatever it likes, and what to measure of its victim."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from torch import Tensor

from backhaul_lab.harness.link_proxy import LinkProxy
from backhaul_proto.v1 import (
    program_pb2,
    segment_pb2,
    session_pb2,
    tensor_pb2,
)
from backhaul_runtime.errors import BackhaulError
from backhaul_runtime.program.codec import encode_program, encode_state
from backhaul_runtime.program.program import Node, Program, ResultRef, Source, SourceRef
from backhaul_runtime.sealing import sealed
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.protocol import PROTOCOL_VERSION
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from support.processes import WorkerProcess
from support.wire import Asked, Services, plain

MIB = 1 << 20
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.bdp_probe", 0),  # the window never grows: what is not read is not sent either
    ("grpc.use_local_subchannel_pool", 1),
)
TAKES_GRADIENT = Source(requires_grad=True, is_leaf=False, is_written=False)
TIMEOUT_S = 60.0
REFUSED = grpc.RpcError, BackhaulError
"""What a request may end with that a worker refuses."""


class Hostile:
    """A session, and whatever stubs there are. A context manager: its end closes connections, as a crash would.

    Attributes:
        session: The worker's name for the session.
        held: What is kept until the end.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.held: list[Any] = []
        self._connect(address)
        self.opened = self.open("hostile")
        self.session = self.opened.session

    def _connect(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=OPTIONS)
        services = Services(self.channel)
        self.sessions, self.programs, self.tensors = services.sessions, services.programs, services.tensors
        self.segments, self.telemetry = services.segments, services.telemetry

    def __enter__(self) -> "Hostile":
        return self

    def __exit__(self, *_: object) -> None:
        for held in reversed(self.held):
            for end in ("cancel", "close"):
                if hasattr(held, end):
                    getattr(held, end)()
        self.channel.close()

    def open(self, name: str) -> session_pb2.OpenSessionResponse:
        request = session_pb2.OpenSessionRequest(protocol_version=PROTOCOL_VERSION, trainer=name, run=name[:128])
        return self.sessions.OpenSession(request, timeout=TIMEOUT_S)

    def key(self, segment: int, backward: int = 0) -> segment_pb2.OperationKey:
        return segment_pb2.OperationKey(segment=segment, backward=backward)

    def program(self, program: Program | bytes) -> bytes:
        encoded = program if isinstance(program, bytes) else encode_program(program)
        request = program_pb2.PutProgramRequest(session=self.session, program=encoded)
        return self.programs.PutProgram(request, timeout=TIMEOUT_S).address

    def put(self, *tensors: Tensor) -> list[bytes]:
        """Sends tensors. Returns their addresses."""
        outgoing_tensors = [OutgoingTensor(tensor, layout_of(tensor), address_of(tensor)) for tensor in tensors]
        messages = [
            tensor_pb2.PutTensorsRequest(session=self.session, tensors=plain(batch))
            for batch in batches(outgoing_tensors)
        ]
        self.tensors.PutTensors(iter(messages), timeout=TIMEOUT_S)
        return [outgoing.address for outgoing in outgoing_tensors]

    def save(self, segment: int, program: bytes, sources: Sequence[bytes], **more: Any) -> None:
        request = segment_pb2.SaveRequest(key=self.key(segment), program=program, sources=sources, **more)
        self.ask(save=request)

    def ask(self, **request: Any) -> list[segment_pb2.Answer]:
        """The answer to one request of an exchange."""
        return list(self.asked(**request))

    def asked(self, **request: Any) -> Asked:
        """The same, as it arrives."""
        return Asked(self.segments, self.session, TIMEOUT_S, **request)

    def recompute(self, segment: int, backward: int = 1, positions: Sequence[int] = (0,), **more: Any) -> Asked:
        request = segment_pb2.RecomputeRequest(key=self.key(segment, backward), positions=positions, **more)
        return self.asked(recompute=request)

    def backward(self, segment: int, gradient: bytes, backward: int = 1, **more: Any) -> segment_pb2.BackwardRequest:
        """A request for a backward from one gradient."""
        return segment_pb2.BackwardRequest(
            key=self.key(segment, backward),
            start=segment_pb2.Start(
                gradients=[segment_pb2.OutputGradient(output=0, tensor=gradient)],
                ambient_state=encode_state(ambient_state.capture()),
            ),
            **more,
        )

    def ready(self, program: Program, *tensors: Tensor, segment: int = 1) -> list[bytes]:
        """Saves a segment of a program and its sources. Returns the addresses of these."""
        addresses = self.put(*tensors) if tensors else []
        self.save(segment, self.program(program), addresses)
        return addresses


def seal(data: bytes) -> bytes:
    """Seals a message that is written by hand."""
    return sealed([data])


def chain(op: str, length: int, size_bytes: int, *more: Any) -> Program:
    """An op on the result of the one before, of one source, which takes a gradient."""
    refs = [SourceRef(0), *(ResultRef(index, 0) for index in range(length - 1))]
    nodes = tuple([Node(op, (ref, *more), (), 0, (size_bytes,), draws=False) for ref in refs])
    return Program((TAKES_GRADIENT,), nodes, (ambient_state.capture(),), (ResultRef(length - 1, 0),), length, 0)


def of_nodes(*nodes: Node, sources: int = 1, saved: int = 0, saved_bytes: int = 0) -> Program:
    """A program of these nodes, whose output is the last one's."""
    outputs = (ResultRef(len(nodes) - 1, 0),)
    return Program((TAKES_GRADIENT,) * sources, nodes, (ambient_state.capture(),), outputs, saved, saved_bytes)


class Stalled(LinkProxy):
    """A way to a worker that passes bytes both ways, until a test wants it otherwise.

    Attributes:
        left_bytes: That are still passed on to the worker.
        is_deaf: Nothing more is read from the worker.
    """

    left_bytes = float("inf")
    is_deaf = _is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self.__exit__()

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        return self._wait_up if is_up else self._wait_down

    def _wait_up(self, size_bytes: int) -> None:
        while self.left_bytes < size_bytes and not self._is_closed:
            time.sleep(0.05)
        self.left_bytes -= size_bytes

    def _wait_down(self, _: int) -> None:
        while self.is_deaf and not self._is_closed:
            time.sleep(0.05)


class Memory:
    """The resident memory of a worker, above what it is now.

    Args:
        worker: Idle.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self._pid = worker.pid
        self._idle_bytes = self._bytes("VmRSS")
        self.forget()

    def forget(self) -> None:
        """Looks for a new peak from now on."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """The most since `forget`."""
        return self._bytes("VmHWM") - self._idle_bytes

    def _bytes(self, field: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
