"""Requests that nobody would write: random ones, valid ones with changed bytes, and programs of random ops.

Each is sealed, so what the worker sees is what a client sends that holds the token and knows the protocol.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import grpc
import torch
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backhaul._worker_client.connection.exchange import decoded_error
from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.errors import STATUS_NAMES, BackhaulError, DrainingError, WorkerError
from backhaul_runtime.program.attention import nested_ops
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.op_list import allowed_ops, resolve
from backhaul_runtime.program.program import (
    FLEX_ATTENTION,
    GeneratorRef,
    NestedNode,
    NestedProgram,
    Node,
    Program,
    ResultRef,
    Source,
    SourceRef,
)
from backhaul_runtime.torch_internals import ambient_state
from support.hostile import TIMEOUT_S, Hostile, chain, seal
from support.wire import METHODS

SOURCES = (
    torch.ones(4),
    torch.arange(12, dtype=torch.float32).reshape(3, 4),
    torch.full((2, 3, 4, 4), float("nan")),
    torch.tensor([0, 2, -1]),
    torch.tensor([True, False, True]),
    torch.tensor(-(2**63)),
    torch.empty(0, 3),
    torch.tensor([1 + 2j, float("inf")]),
)
NUMBERS = (0, 1, 2, 3, -1, -2, 4, 7, 64, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"))
TEXTS = ("", "mean", "none", "trunc", "floor", "reflect", "ij", "linear", "ij->ji", "\x00", "x" * 100)
LONGEST_PROGRAM = 6
REFUSALS = {"CANCELLED", *STATUS_NAMES.values()} - {STATUS_NAMES[DrainingError], STATUS_NAMES[WorkerError]}
"""Names of statuses that a request may be refused with. Others mean that the worker failed, hangs, or is gone."""


class Fuzzer:
    """Sends requests, each drawn from what a seed says.

    Args:
        client: Whose session the requests name, mostly.
        seed: Two fuzzers with equal seeds send equal requests.

    Attributes:
        accepted: How many requests the worker accepted.
        ran: How many random programs ran to their end.
    """

    def __init__(self, client: Hostile, seed: int) -> None:
        self._client, self._draw = client, random.Random(seed)
        self._addresses = client.put(*SOURCES)
        self._ops = sorted(allowed_ops())
        self._segment = 0
        self._nodes: list[Node] = []
        self._templates = self._valid()
        self.accepted = self.ran = 0

    def attempt(self) -> None:
        """Sends one request, or a random program with the requests that run it.

        Raises:
            AssertionError: The worker failed at it.
        """
        choice = self._draw.random()
        if choice < 0.5:
            self._send(*self._mutated())
        elif choice < 0.75:
            method = self._draw.choice([method for method in METHODS if method.name != "CloseSession"])
            self._send(method, self._random(GetMessageClass(method.input_type), 0).SerializeToString())
        else:
            self._run_program()

    # Requests

    def _valid(self) -> list[tuple[MethodDescriptor, Message]]:
        """One request for each method, which the worker accepts."""
        client, methods = self._client, {method.name: method for method in METHODS}
        program = chain("aten.tanh.default", 3, 16)
        address = client.program(program)
        client.save(0, address, self._addresses[:1])
        key, session = client.key(0, 1), client.session
        tensors = tensor_pb2.TensorBatch(
            declarations=[
                tensor_pb2.TensorDeclaration(
                    spec=tensor_pb2.TensorSpec(dtype="float32", shape=[4], strides=[1], device="cpu"), size_bytes=16
                )
            ],
            chunks=[tensor_pb2.TensorChunk(data=bytes(16))],
        )
        save = segment_pb2.SaveRequest(key=key, program=address, sources=self._addresses[:1], name="fuzzed")
        release = segment_pb2.ReleaseRequest(keys=[key])
        backward = client.backward(0, self._addresses[0])
        report = telemetry_pb2.TrainerReport(steps=[telemetry_pb2.Step()], calls=[telemetry_pb2.SegmentCall()])
        recompute = segment_pb2.RecomputeRequest(key=key, positions=[0])
        fetch = segment_pb2.FetchSourcesRequest(addresses=self._addresses[:1])
        exchanged = [
            segment_pb2.Request(session=session, **request)
            for request in (
                {"save": save, "tensors": tensors},
                {"save": save, "pushes_taken": 1},
                {"backward": backward, "answer": 1, "pushes_taken": 0},
                {"backward": backward, "tensors": tensors},
                {"recompute": recompute},
                {"release": release},
                {"collect_gradients": segment_pb2.CollectGradientsRequest()},
                {"fetch_sources": fetch},
            )
        ]
        requests: dict[str, Message] = {
            "OpenSession": session_pb2.OpenSessionRequest(protocol_version=1, trainer="fuzz"),
            "CloseSession": session_pb2.CloseSessionRequest(session="of somebody else"),
            "KeepSession": session_pb2.KeepSessionRequest(session=session),
            "PutProgram": program_pb2.PutProgramRequest(session=session, program=encode_program(program)),
            "PutTensors": tensor_pb2.PutTensorsRequest(session=session, tensors=tensors),
            "GetTelemetry": telemetry_pb2.GetTelemetryRequest(),
            "PutReports": telemetry_pb2.PutReportsRequest(session=session, report=report),
        }
        exchange = methods["Exchange"]
        return [*((methods[name], request) for name, request in requests.items()), *((exchange, r) for r in exchanged)]

    def _mutated(self) -> tuple[MethodDescriptor, bytes]:
        """A valid request with some bytes changed, taken out, put in or repeated."""
        draw, (method, request) = self._draw, self._draw.choice(self._templates)
        data = bytearray(request.SerializeToString())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at : at + draw.randint(1, 8)]
                case 2:
                    data[at:at] = draw.randbytes(draw.randint(1, 8))
                case _:
                    data[at:at] = data[max(0, at - draw.randint(1, 64)) : at] * draw.choice((1, 2, 100))
        return method, bytes(data)

    def _random(self, kind: type[Message], depth: int) -> Message:
        """A message whose fields have random values, some of which name what there is."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self._draw.random() < 0.4 or depth > 5:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            count = self._draw.choice((1, 1, 2, 20)) if field.is_repeated else 1
            values = [self._value(field, depth) for _ in range(count)]
            if field.is_repeated and field.message_type is not None:
                getattr(message, field.name).extend(values)
            elif field.is_repeated:
                getattr(message, field.name)[:] = values
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(values[0])
            else:
                setattr(message, field.name, values[0])
        return message

    def _value(self, field: Any, depth: int) -> Any:
        draw, kinds = self._draw, FieldDescriptor
        match field.cpp_type:
            case kinds.CPPTYPE_MESSAGE:
                return self._random(GetMessageClass(field.message_type), depth + 1)
            case kinds.CPPTYPE_STRING if field.type == kinds.TYPE_BYTES:
                return draw.choice((*self._addresses, b"", draw.randbytes(32), draw.randbytes(draw.randrange(2_000))))
            case kinds.CPPTYPE_STRING:
                return draw.choice((self._client.session, self._client.session, *TEXTS))
            case kinds.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case kinds.CPPTYPE_ENUM:
                return draw.choice(field.enum_type.values).number
            case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
                return draw.choice(REALS)
        bits = 32 if field.cpp_type in {kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32} else 64
        low = 0 if field.cpp_type in {kinds.CPPTYPE_UINT32, kinds.CPPTYPE_UINT64} else -(1 << bits - 1)
        return max(low, min(draw.choice((*NUMBERS, draw.randrange(100))), low + (1 << bits) - 1))

    def _send(self, method: MethodDescriptor, data: bytes) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        requests: Any = iter([data] * self._draw.randint(0, 3)) if method.client_streaming else data
        make: Any
        if method.server_streaming:
            make = self._client.channel.stream_stream if method.client_streaming else self._client.channel.unary_stream
            self._check(path, lambda: _read(make(path, seal)(requests, timeout=TIMEOUT_S), method.name))
        else:
            make = self._client.channel.stream_unary if method.client_streaming else self._client.channel.unary_unary
            self._check(path, lambda: make(path, seal)(requests, timeout=TIMEOUT_S))

    def _check(self, what: str, call: Callable[[], object]) -> str | None:
        """Makes a call, and returns what the worker refused it with. Fails for what is no refusal."""
        try:
            call()
        except grpc.RpcError as error:
            assert error.code().name in REFUSALS, f"{what}: {error.code()} {error.details()}"
            return error.details() or ""
        except BackhaulError as error:
            assert STATUS_NAMES[type(error)] in REFUSALS, f"{what}: {error!r}"
            return error.message
        self.accepted += 1
        return None

    # Programs

    def _run_program(self) -> None:
        """Runs a program of random ops, which grows by an op whenever all of them have run.

        How many bytes a new op's results take is learned from the worker's refusals.
        """
        if len(self._nodes) >= LONGEST_PROGRAM:
            self._nodes = []
        node = self._node()
        sizes: tuple[int, ...] = (16,)
        for _ in range(3):
            refused = self._replay([*self._nodes, Node(*node, 0, sizes, draws=False)])
            if refused is None:
                self.ran += 1
                self._nodes.append(Node(*node, 0, sizes, draws=False))
                return
            took = re.search(rf"{re.escape(node[0])} took \(([\d, ]*)\) bytes", refused)
            if took is None:
                break
            sizes = tuple(int(size) for size in took[1].replace(" ", "").split(",") if size)
        if self._draw.random() < 0.1:
            self._nodes = []

    def _replay(self, nodes: list[Node]) -> str | None:
        """Has a program replayed, and its backward run. Returns what the replay was refused with."""
        client = self._client
        sources = tuple(
            Source(tensor.is_floating_point(), is_leaf=False, is_written=self._draw.random() < 0.3)
            for tensor in SOURCES
        )
        outputs = (ResultRef(len(nodes) - 1, 0),) if nodes[-1].result_bytes else ()
        program = Program(sources, tuple(nodes), (ambient_state.capture(),), outputs, 0, 0)
        self._segment += 1
        number, gradient = self._segment, self._draw.choice(self._addresses)
        asked = client.backward(number, gradient)
        addresses: list[bytes] = []
        for step in (
            lambda: addresses.append(client.program(program)),
            lambda: client.save(number, addresses[0], self._addresses),
            lambda: list(client.recompute(number, positions=())),
        ):
            refused = self._check(str(nodes), step)
            if refused is not None:
                break
        else:
            self._check(str(nodes), lambda: client.ask(backward=asked))
        if self._draw.random() < 0.9:
            release = segment_pb2.ReleaseRequest(keys=[client.key(number)])
            self._check("release", lambda: client.ask(release=release))
        return refused

    def _node(self) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """An op of the list with arguments that fit its schema, or attention with nested programs."""
        if self._draw.random() < 0.02:
            return FLEX_ATTENTION, self._attention(), ()
        name = self._draw.choice(self._ops)
        return name, *self._arguments(name)

    def _arguments(self, name: str) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        args: list[Any] = []
        kwargs: list[tuple[str, Any]] = []
        for argument in resolve(name)._schema.arguments:
            if argument.has_default_value() and self._draw.random() < 0.5:
                if not argument.kwarg_only:
                    break
                continue
            value = self._argument(argument.real_type)
            if argument.kwarg_only:
                kwargs.append((argument.name, value))
            else:
                args.append(value)
        return tuple(args), tuple(kwargs)

    def _attention(self) -> tuple[Any, ...]:
        """Arguments of flex_attention, most of them with nested programs that are well formed."""
        draw = self._draw

        def tensor() -> Any:
            return SourceRef(draw.choice((2, 2, 2, *range(len(SOURCES)))))  # one of them has four dimensions

        buffers = [tuple(tensor() for _ in range(draw.choice((0, 1, 2)))) for _ in range(2)]
        blocks = [None if draw.random() < 0.3 else tensor() for _ in range(9)]
        lengths = [draw.choice((1, 4, 128, *NUMBERS)) for _ in range(4)]
        mask = (*lengths[:2], tensor(), tensor(), *blocks, None, *lengths[2:], self._nested(4 + len(buffers[1])))
        options = (("BACKEND", "AUTO"), ("OUTPUT_LOGSUMEXP", draw.random() < 0.5))
        return tensor(), tensor(), tensor(), self._nested(5 + len(buffers[0])), mask, 0.5, options, *buffers

    def _nested(self, inputs: int) -> NestedProgram:
        """A nested program of random ops."""
        draw, outer, nodes = self._draw, self._nodes, list[NestedNode]()
        ops = sorted(nested_ops()) if draw.random() < 0.9 else self._ops
        try:
            for _ in range(draw.choice((0, 1, 2, 5))):
                self._nodes = []
                name = draw.choice((*ops, "aten.index.Tensor"))
                args, kwargs = self._arguments(name)
                refs: list[Any] = [SourceRef(number) for number in range(inputs + (draw.random() < 0.02))]
                refs += [ResultRef(number, 0) for number in range(len(nodes))]
                nodes.append(NestedNode(name, _renamed(args, refs, draw), _renamed(kwargs, refs, draw)))
        finally:
            self._nodes = outer
        return NestedProgram(inputs, tuple(nodes), ResultRef(len(nodes) - 1, 0) if nodes else SourceRef(0))

    def _argument(self, kind: Any) -> Any:
        draw = self._draw
        match kind.kind():
            case "TensorType":
                made = [ResultRef(at, 0) for at, node in enumerate(self._nodes) if node.result_bytes]
                return draw.choice((*made, *made, *(SourceRef(index) for index in range(len(SOURCES)))))
            case "OptionalType":
                return None if draw.random() < 0.5 else self._argument(kind.getElementType())
            case "ListType":
                return tuple(self._argument(kind.getElementType()) for _ in range(draw.choice((1, 2, 2, 3, 4, 9))))
            case "IntType" | "SymIntType":
                return draw.choice((*NUMBERS[:8], *NUMBERS))
            case "FloatType":
                return draw.choice(REALS)
            case "NumberType":
                return draw.choice((*NUMBERS, *REALS))
            case "BoolType":
                return draw.random() < 0.5
            case "StringType":
                return draw.choice(TEXTS)
            case "DeviceObjType":
                return torch.device("cpu")
            case "GeneratorType":
                return GeneratorRef()
            case "ScalarTypeType":
                return draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool))
            case "LayoutType":
                return torch.strided
        return torch.contiguous_format


def _renamed(value: Any, refs: list[Any], draw: random.Random) -> Any:
    """An argument with these references in the place of its own."""
    if isinstance(value, tuple):
        return tuple(_renamed(item, refs, draw) for item in value)
    return draw.choice(refs) if isinstance(value, (SourceRef, ResultRef)) else value


def _read(call: Any, method: str) -> None:
    """Reads all that is answered, and raises the first error."""
    answers = list(call)
    for data in answers if method == "Exchange" else ():
        answer = segment_pb2.Answer.FromString(data)
        if error := answer.error or answer.save.error:
            raise decoded_error(error)
