"""Encodes programs as bytes and decodes them. Decoding trusts nothing: it checks indices, types, counts and names.

The encoding is protobuf's deterministic one, so equal programs have equal bytes and the same address.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from google.protobuf.message import DecodeError

from backhaul_proto.v1 import program_pb2
from backhaul_runtime.errors import ProgramError, TransferError
from backhaul_runtime.program.attention import MAX_NESTED_NODES, check_attention
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.op_list import resolve
from backhaul_runtime.program.program import (
    FLEX_ATTENTION,
    Compilation,
    Composite,
    GeneratorRef,
    NestedNode,
    NestedProgram,
    Node,
    Program,
    RecordedChoice,
    Ref,
    ResultRef,
    Source,
    SourceRef,
    is_function_name,
)
from backhaul_runtime.program.schema import check_call
from backhaul_runtime.tensors.layout import dtype_named
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.ambient_settings import Value
from backhaul_runtime.wire.layout_codec import decode_layout, encode_layout
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES

FORMAT = 1
MAX_NODES = 50_000
MAX_SOURCES = 8_192
MAX_OUTPUTS = 8_192
MAX_SAVED = 100_000
MAX_STATES = 1_024
MAX_DEPTH = 12
"""How deep lists and objects may be nested in each other."""

MAX_TYPES = 1_024
MAX_PROGRAM_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
MAX_SETTINGS = 64
MAX_SETTING = 64
MAX_FACTS = 16
MAX_FACT = 256
"""The most characters that an ambient setting may have if it is a text."""

DECODED_FACTOR = 64
"""A decoded program takes at most this many times the memory of its encoding. Measured were 42 times for nodes with
recorded choices, 34 for sources, and 20 to 30 for programs of models. While decoding, protobuf's copy is held too."""

_NAMED_TYPES: dict[str, dict[str, Any]] = {
    kind: {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, cls)}
    for kind, cls in (("layout", torch.layout), ("memory_format", torch.memory_format))
}


def address_of_program(encoded: bytes) -> bytes:
    """Returns the address of an encoded program: its SHA-256, 32 bytes."""
    return hashlib.sha256(encoded).digest()


def encode_program(program: Program) -> bytes:
    """Returns the deterministic encoding of a program."""
    ops = {name: index for index, name in enumerate(dict.fromkeys(_ops_of(program)))}
    types = {name: index for index, name in enumerate(program.types)}
    message = program_pb2.Program(
        format=FORMAT,
        types=types,
        ops=ops,
        ambient_states=[encode_state(state) for state in program.ambient_states],
        sources=[
            program_pb2.Source(requires_grad=source.requires_grad, is_leaf=source.is_leaf, is_written=source.is_written)
            for source in program.sources
        ],
        nodes=[
            program_pb2.Node(
                op=ops[node.op],
                arguments=[_encode(value, types, ops) for value in node.args],
                keyword_arguments=[
                    program_pb2.KeywordArgument(name=name, value=_encode(value, types, ops))
                    for name, value in node.kwargs
                ],
                ambient_state=node.ambient,
                result_bytes=node.result_bytes,
                draws=node.draws,
                fresh_casts=node.fresh_casts,
                given=[
                    program_pb2.Given(source=given.source, packed_elements=given.packed_elements)
                    for given in node.given
                ],
            )
            for node in program.nodes
        ],
        outputs=[_encode_ref(ref) for ref in program.outputs],
        saved_count=program.saved_count,
        saved_bytes=program.saved_bytes,
        casts=program.casts,
        compilation=None if program.compilation is None else _encode_compilation(program.compilation),
    )
    return message.SerializeToString(deterministic=True)


def _ops_of(program: Program) -> Iterator[str]:
    for node in program.nodes:
        yield node.op
        if node.op == FLEX_ATTENTION:
            for part in node.parts:
                if isinstance(part, NestedProgram):
                    yield from (inner.op for inner in part.nodes)


def decode_state(message: program_pb2.AmbientState) -> ambient_state.State:
    """Returns the state that a message describes. Raises ProgramError for settings that this process cannot have.

    Removes unknown fields from `message`.
    """
    message.DiscardUnknownFields()  # the cache keeps the encoding, and a client chooses their size
    return _decoded_state(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=32)  # the segments of a step have equal states
def _decoded_state(encoded: bytes) -> ambient_state.State:
    settings = program_pb2.AmbientState.FromString(encoded).settings
    if len(settings) > MAX_SETTINGS or any(len(settings[name].text) > MAX_SETTING for name in settings):
        raise ProgramError(
            f"{len(settings)} ambient settings, at most {MAX_SETTINGS} of {MAX_SETTING} characters each are allowed"
        )
    return ambient_state.from_mapping({name: _setting(setting) for name, setting in settings.items()})


@lru_cache(maxsize=32)
def encode_state(state: ambient_state.State) -> program_pb2.AmbientState:
    """Returns the message for a state. It is cached and shared by all callers, who must not change it."""
    settings = {}
    for name, value in ambient_state.to_mapping(state).items():
        kind = "boolean" if isinstance(value, bool) else "integer" if isinstance(value, int) else "text"
        settings[name] = program_pb2.Setting(**{kind: value})  # type: ignore[arg-type]
    return program_pb2.AmbientState(settings=settings)


def _setting(setting: program_pb2.Setting) -> Value:
    kind = setting.WhichOneof("value")
    if kind is None:
        raise ProgramError("an ambient setting has no value")
    value: Value = getattr(setting, kind)
    return value


def _encode_compilation(compilation: Compilation) -> program_pb2.Compilation:
    sources = [encode_layout(layout) for layout in compilation.layouts]
    return program_pb2.Compilation(sources=sources, facts=dict(compilation.facts))


def _encode_ref(ref: Ref) -> program_pb2.Reference:
    if isinstance(ref, SourceRef):
        return program_pb2.Reference(source=ref.index)
    return program_pb2.Reference(result=program_pb2.Result(node=ref.node, output=ref.output))


def _name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _encode(value: Any, types: Mapping[str, int], ops: Mapping[str, int]) -> program_pb2.Argument:  # noqa: PLR0912  one branch per kind of argument
    make = program_pb2.Argument
    match value:
        case None:
            return make(nothing=program_pb2.Nothing())
        case bool():
            return make(boolean=value)
        case int():
            return make(integer=value)
        case float():
            return make(real=value)
        case complex():
            return make(complex=program_pb2.Complex(real=value.real, imaginary=value.imag))
        case str():
            return make(text=value)
        case torch.dtype():
            return make(dtype=_name(value))
        case torch.layout():
            return make(layout=_name(value))
        case torch.memory_format():
            return make(memory_format=_name(value))
        case torch.device():
            return make(device=value.type)
        case SourceRef() | ResultRef():
            return make(tensor=_encode_ref(value))
        case GeneratorRef():
            return make(generator=program_pb2.Nothing())
        case tuple():
            return make(list=program_pb2.ArgumentList(items=[_encode(item, types, ops) for item in value]))
        case Composite():
            parts = [_encode(part, types, ops) for part in value.parts]
            return make(object=program_pb2.Object(type=types[value.type], parts=parts))
        case NestedProgram():
            return make(program=_encode_nested(value, types, ops))
    raise AssertionError(f"the recorder accepted an argument of type {type(value).__name__}")


def _encode_nested(
    program: NestedProgram, types: Mapping[str, int], ops: Mapping[str, int]
) -> program_pb2.NestedProgram:
    nodes = [
        program_pb2.NestedNode(
            op=ops[node.op],
            arguments=[_encode(value, types, ops) for value in node.args],
            keyword_arguments=[
                program_pb2.KeywordArgument(name=name, value=_encode(value, types, ops)) for name, value in node.kwargs
            ],
        )
        for node in program.nodes
    ]
    return program_pb2.NestedProgram(inputs=program.inputs, nodes=nodes, output=_encode_ref(program.output))


def decode_program(encoded: bytes, device: torch.device) -> Program:
    """Decodes and checks a program. Runs none of its ops.

    Args:
        encoded: The bytes of the encoding, which are untrusted.
        device: The device that the program will run on. "cuda" in the program becomes this device, "cpu" stays.

    Raises:
        ProgramError: The encoding is malformed, too large, or names an op or an argument that is not allowed.
    """
    if len(encoded) > MAX_PROGRAM_BYTES:
        raise ProgramError(f"a program of {len(encoded)} bytes, at most {MAX_PROGRAM_BYTES} are allowed")
    try:
        message = program_pb2.Program.FromString(encoded)
    except DecodeError as error:
        raise ProgramError(f"the program can't be decoded: {error}") from None
    if message.format != FORMAT:
        raise ProgramError(
            f"a program of format {message.format}, this process reads format {FORMAT}: "
            "install the same version of backhaul on both sides"
        )
    for what, count, most in (
        ("nodes", len(message.nodes), MAX_NODES),
        ("sources", len(message.sources), MAX_SOURCES),
        ("outputs", len(message.outputs), MAX_OUTPUTS),
        ("saved tensors", message.saved_count, MAX_SAVED),
        ("types", len(message.types), MAX_TYPES),
        ("ambient states", len(message.ambient_states), MAX_STATES),
    ):
        if count > most:
            raise ProgramError(f"a program of {count} {what}, at most {most} are allowed")
    return _Reader(message, device).program()


class _Reader:
    def __init__(self, message: program_pb2.Program, device: torch.device) -> None:
        self.message = message
        self.device = device
        self.source_count = len(message.sources)
        self.result_counts: list[int] = []

    def program(self) -> Program:
        message = self.message
        for name in message.types:
            names.check_type(name)
        states = tuple(decode_state(state) for state in message.ambient_states)
        if len({ambient_state.threads_of(state) for state in states}) > 1:
            raise ProgramError("a program has ambient states with different numbers of threads, one number is allowed")
        nodes = tuple([self.node(node, len(states)) for node in message.nodes])
        if any(cast >= len(message.sources) for cast in message.casts) or len({*message.casts}) < len(message.casts):
            raise ProgramError(
                f"a program of {len(message.sources)} sources names casts of {list(message.casts)[:8]}, "
                "one twice or past the last"
            )
        return Program(
            sources=tuple(Source(s.requires_grad, s.is_leaf, s.is_written) for s in message.sources),
            nodes=nodes,
            ambient_states=states,
            outputs=tuple(self.ref(output) for output in message.outputs),
            saved_count=message.saved_count,
            saved_bytes=message.saved_bytes,
            casts=tuple(message.casts),
            types=tuple(message.types),
            compilation=self.compilation() if message.HasField("compilation") else None,
        )

    def compilation(self) -> Compilation:
        specs, facts = self.message.compilation.sources, self.message.compilation.facts
        if len(specs) != len(self.message.sources):
            raise ProgramError(f"a compiled program of {len(self.message.sources)} sources has {len(specs)} layouts")
        if len(facts) > MAX_FACTS or any(max(len(name), len(facts[name])) > MAX_FACT for name in facts):
            raise ProgramError(f"{len(facts)} facts, at most {MAX_FACTS} of {MAX_FACT} characters each are allowed")
        try:
            layouts = tuple([decode_layout(spec) for spec in specs])
        except TransferError as error:
            raise ProgramError(f"a compiled program has an impossible layout: {error}") from None
        return Compilation(layouts, tuple(sorted(facts.items())))

    def node(self, node: program_pb2.Node, state_count: int) -> Node:
        here = len(self.result_counts)
        if node.op >= len(self.message.ops) or node.ambient_state >= state_count:
            raise ProgramError(
                f"node {here} names op {node.op} and ambient state {node.ambient_state}: one of them is past the last"
            )
        name = self.message.ops[node.op]
        nests = name == FLEX_ATTENTION
        args = tuple(self.argument(argument, nests=nests) for argument in node.arguments)
        kwargs = tuple((pair.name, self.argument(pair.value)) for pair in node.keyword_arguments)
        if len({name for name, _ in kwargs}) < len(kwargs):
            raise ProgramError(f"node {here} ({name}) has a keyword argument twice")
        if nests:
            check_attention(args, dict(kwargs))
        elif not is_function_name(name):
            check_call(resolve(name), args, dict(kwargs))
        else:
            names.function(name)  # which raises ProgramError for one that is not allowed here
            if kwargs or node.given:
                raise ProgramError(
                    f"node {here} ({name}) has keyword arguments or recorded choices, a function has none"
                )
        if any(given.source >= len(self.message.sources) for given in node.given):
            raise ProgramError(f"node {here} ({name}) has a recorded choice in a source past the last")
        self.result_counts.append(len(node.result_bytes))
        return Node(
            name,
            args,
            kwargs,
            node.ambient_state,
            tuple(node.result_bytes),
            node.draws,
            node.fresh_casts,
            tuple(RecordedChoice(given.source, given.packed_elements) for given in node.given),
        )

    def ref(self, reference: program_pb2.Reference) -> Ref:
        kind = reference.WhichOneof("tensor")
        if kind == "source" and reference.source < self.source_count:
            return SourceRef(reference.source)
        result = reference.result
        # Only the nodes before this one have counts so far, so a program can't have a cycle.
        known = kind == "result" and result.node < len(self.result_counts)
        if known and result.output < self.result_counts[result.node]:
            return ResultRef(result.node, result.output)
        raise ProgramError(
            f"a reference before node {len(self.result_counts)} names a tensor that does not exist yet: {reference}"
        )

    def nested(self, program: program_pb2.NestedProgram) -> NestedProgram:
        # Its references are to its own inputs and nodes, each of which makes one number.
        if program.inputs > MAX_SOURCES or len(program.nodes) > MAX_NESTED_NODES:
            raise ProgramError(
                f"a nested program of {program.inputs} inputs and {len(program.nodes)} nodes is too large"
            )
        outer = self.source_count, self.result_counts
        self.source_count, self.result_counts = program.inputs, []
        try:
            nodes = tuple([self.nested_node(node) for node in program.nodes])
            return NestedProgram(program.inputs, nodes, self.ref(program.output))
        finally:
            self.source_count, self.result_counts = outer

    def nested_node(self, node: program_pb2.NestedNode) -> NestedNode:
        if node.op >= len(self.message.ops):
            raise ProgramError(f"node {len(self.result_counts)} of a nested program names op {node.op}, past the last")
        args = tuple(self.argument(argument) for argument in node.arguments)
        kwargs = tuple((pair.name, self.argument(pair.value)) for pair in node.keyword_arguments)
        if len({name for name, _ in kwargs}) < len(kwargs):
            raise ProgramError(f"node {len(self.result_counts)} of a nested program has a keyword argument twice")
        self.result_counts.append(1)
        return NestedNode(self.message.ops[node.op], args, kwargs)

    def argument(self, argument: program_pb2.Argument, depth: int = 0, *, nests: bool = False) -> Any:  # noqa: PLR0912  one branch per kind of argument
        kind = argument.WhichOneof("value")
        value = getattr(argument, kind) if kind else None
        # What no case returns is refused at the end, because a client may send any kind and name, and lists inside of
        # lists until the stack ends. Names are looked up, so none of them reaches torch as a text.
        match kind:
            case "boolean" | "integer" | "real" | "text":
                return value
            case "nothing":
                return None
            case "complex":
                return complex(argument.complex.real, argument.complex.imaginary)
            case "dtype":
                return _dtype(argument.dtype)
            case "layout" | "memory_format":
                if value in _NAMED_TYPES[kind]:
                    return _NAMED_TYPES[kind][value]
            case "device":
                if value in {"cpu", "cuda"}:
                    return torch.device("cpu") if value == "cpu" else self.device
            case "tensor":
                return self.ref(argument.tensor)
            case "generator":
                return GeneratorRef()
            case "object" if depth < MAX_DEPTH and argument.object.type < len(self.message.types):
                parts = tuple(self.argument(part, depth + 1) for part in argument.object.parts)
                return Composite(self.message.types[argument.object.type], parts)
            case "list" if depth < MAX_DEPTH:
                return tuple(self.argument(item, depth + 1, nests=nests) for item in argument.list.items)
            case "program" if nests:
                return self.nested(argument.program)
        raise ProgramError(f"an argument can't be decoded: {kind or 'empty'} {str(value)[:80]!r}")


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except TransferError as error:
        raise ProgramError(error.message) from None
