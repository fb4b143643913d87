from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backhaul import ProgramError, ReplayError
from backhaul_proto.v1 import program_pb2
from backhaul_runtime.program.codec import MAX_DEPTH, MAX_NODES, address_of_program, decode_program, encode_program
from backhaul_runtime.program.program import GeneratorRef, Node, Program, ResultRef, Source, SourceRef, numbers_in
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.torch_internals import ambient_state

CPU = torch.device("cpu")


def node(op: str, *args: Any, result_bytes: tuple[int, ...] = (16,), draws: bool = False, **kwargs: Any) -> Node:
    return Node(op, args, tuple(kwargs.items()), 0, result_bytes, draws)


def program(*nodes: Node, sources: int = 1, outputs: tuple[Any, ...] = ()) -> Program:
    return Program(
        sources=tuple(Source(requires_grad=True, is_leaf=True, is_written=False) for _ in range(sources)),
        nodes=nodes,
        ambient_states=(ambient_state.capture(),),
        outputs=outputs,
        saved_count=0,
        saved_bytes=0,
    )


X = SourceRef(0)
ADD = node("aten.add.Tensor", X, 1)


def test_every_kind_of_argument_survives() -> None:
    whole = program(
        node("aten.mul.Tensor", X, 2.5),
        node("aten.cat.default", (X, ResultRef(0, 0)), -1, result_bytes=(32,)),
        node("aten.randn.generator", (4,), generator=GeneratorRef(), dtype=torch.float32, device=CPU, draws=True),
        node("aten.to.dtype", X, torch.bfloat16, False, True, torch.channels_last, result_bytes=(8,)),
        node("aten.full.default", (4,), 1 + 2j, dtype=torch.complex64, layout=torch.strided, pin_memory=None),
        node("aten.einsum.default", "ij->ji", (X,), path=None, result_bytes=(0,)),
        node("aten.index.Tensor", X, (None, ResultRef(0, 0))),
        outputs=(ResultRef(0, 0), X),
    )
    assert decode_program(encode_program(whole), CPU) == whole


def test_numbers_that_compare_equal_make_other_programs() -> None:
    values = [1, 1.0, True, 0.0, -0.0, 1 + 0j]
    addresses = {address_of_program(encode_program(program(node("aten.mul.Tensor", X, value)))) for value in values}
    assert len(addresses) == len(values)


NUMBERS = st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, False, -1, 0j, complex(0, -0.0), 1 + 0j, float("inf")])
ARGUMENTS = st.recursive(st.one_of(NUMBERS, st.sampled_from([None, "floor", torch.float32, X])), st.tuples)


@given(ARGUMENTS, ARGUMENTS, st.booleans())
def test_programs_are_the_same_where_their_encodings_are(one: Any, other: Any, by_name: bool) -> None:
    made = [
        node("aten.mul.Tensor", X, value=value) if by_name else node("aten.mul.Tensor", X, value)
        for value in (one, other)
    ]
    first, second = map(program, made)
    is_same = first == second and numbers_in(first) == numbers_in(second)
    assert is_same == (encode_program(first) == encode_program(second))


def test_devices_become_the_workers_own() -> None:
    cuda = program(node("aten.zeros.default", (4,), device=torch.device("cuda", 3)))
    decoded = decode_program(encode_program(cuda), torch.device("cuda", 0))
    assert dict(decoded.nodes[0].kwargs)["device"] == torch.device("cuda", 0)


BAD: dict[str, Program] = {
    "op off the list": program(node("aten.set_.source_Tensor", X, X)),
    "op that reads files": program(node("aten.from_file.default", "/etc/passwd", None, 4)),
    "op of Python": program(node("os.system.default", "true")),
    "op that is no op": program(node("aten.add.__class__", X, 1)),
    "name in two parts": program(node("aten.add", X, 1)),
    "too many arguments": program(node("aten.relu.default", X, X)),
    "too few arguments": program(node("aten.add.Tensor", X)),
    "unknown keyword": program(node("aten.relu.default", X, speed=1)),
    "argument given twice": program(node("aten.add.Tensor", X, 1, other=2)),
    "word for a number": program(node("aten.sum.dim_IntList", X, "all")),
    "tensor for a number": program(node("aten.transpose.int", X, X, 0)),
    "number for a bool": program(node("aten.dropout.default", X, 0.5, 1)),
    "list for a tensor": program(node("aten.relu.default", (X,))),
    "generator for a tensor": program(node("aten.relu.default", GeneratorRef())),
    "source past the last": program(node("aten.relu.default", SourceRef(1))),
    "own result": program(node("aten.relu.default", ResultRef(0, 0))),
    "later result": program(node("aten.relu.default", ResultRef(1, 0)), ADD),
    "second result of one": program(ADD, node("aten.relu.default", ResultRef(0, 1))),
    "output past the last": program(ADD, outputs=(ResultRef(1, 0),)),
    "state past the last": program(replace(ADD, ambient=1)),
    "deep nesting": program(node("aten.cat.default", ((((((X,),),),),),))),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_what_can_not_be_is_refused_before_anything_runs(bad: Program) -> None:
    with pytest.raises(ProgramError):
        decode_program(encode_program(bad), CPU)


def raw(change: Callable[[program_pb2.Program], object]) -> bytes:
    message = program_pb2.Program.FromString(encode_program(program(ADD)))
    change(message)
    return message.SerializeToString()


RAW: dict[str, bytes] = {
    "no bytes of ours": b"\xff\xff\xff",
    "another format": raw(lambda m: setattr(m, "format", 2)),
    "op past the table": raw(lambda m: setattr(m.nodes[0], "op", 7)),
    "argument without a value": raw(lambda m: m.nodes[0].arguments.add()),
    "unknown layout": raw(lambda m: setattr(m.nodes[0].arguments.add(), "layout", "square")),
    "unknown device": raw(lambda m: setattr(m.nodes[0].arguments.add(), "device", "abacus")),
    "unknown dtype": raw(lambda m: setattr(m.nodes[0].arguments.add(), "dtype", "float33")),
    "reference without a target": raw(lambda m: m.outputs.add()),
    "keyword twice": raw(
        lambda m: [
            m.nodes[0].keyword_arguments.add(name="alpha", value=program_pb2.Argument(integer=1)) for _ in range(2)
        ]
    ),
    "setting without a value": raw(lambda m: m.ambient_states[0].settings["grad"].Clear()),
}


@pytest.mark.parametrize("encoded", RAW.values(), ids=RAW.keys())
def test_what_can_not_be_read_is_refused(encoded: bytes) -> None:
    with pytest.raises(ProgramError):
        decode_program(encoded, CPU)


def in_lists(depth: int) -> program_pb2.Argument:
    argument = program_pb2.Argument(integer=1)
    for _ in range(depth):
        argument = program_pb2.Argument(list=program_pb2.ArgumentList(items=[argument]))
    return argument


@pytest.mark.parametrize(
    "argument",
    [in_lists(MAX_DEPTH + 1), program_pb2.Argument(object=program_pb2.Object(type=0))],
    ids=["lists inside lists", "an object of no type"],
)
def test_an_argument_that_no_program_has_is_named(argument: program_pb2.Argument) -> None:
    message = program_pb2.Program.FromString(encode_program(program(ADD)))
    message.nodes[0].arguments[1].CopyFrom(argument)
    with pytest.raises(ProgramError, match="an argument can't be decoded: (list|object)"):
        decode_program(message.SerializeToString(deterministic=True), CPU)


def test_programs_have_a_longest_length() -> None:
    message = program_pb2.Program.FromString(encode_program(program(ADD)))
    message.nodes.extend([program_pb2.Node()] * MAX_NODES)
    with pytest.raises(ProgramError, match="nodes"):
        decode_program(message.SerializeToString(), CPU)
    with pytest.raises(ProgramError, match="bytes"):
        decode_program(bytes(17 << 20), CPU)


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_end_in_our_own_error(noise: bytes, begin: int) -> None:
    encoded = encode_program(program(ADD, node("aten.relu.default", ResultRef(0, 0))))
    for data in (noise, encoded[:begin] + noise + encoded[begin + len(noise) :]):
        with suppress(ProgramError):
            decode_program(data, CPU)


def replay(*nodes: Node, states: tuple[bytes, ...] = ()) -> Replay:
    return Replay(decode_program(encode_program(program(*nodes)), CPU), [torch.ones(4)], states)


def test_an_execution_stops_where_sizes_differ_from_those_declared() -> None:
    with pytest.raises(ReplayError, match=r"took \(16,\) bytes on replay, \(8,\) when recorded"):
        replay(node("aten.add.Tensor", X, 1, result_bytes=(8,)))


@pytest.mark.parametrize(
    "hostile",
    [
        node("aten.embedding.default", X, X),
        node("aten.view.default", X, (1 << 40, 1 << 40)),
        node("aten.zeros.default", (1 << 60,)),
        node("aten.select.int", X, 9, 9),
    ],
    ids=["floats as indices", "impossible view", "more memory than there is", "dimension past the last"],
)
def test_an_op_that_fails_ends_in_our_own_error(hostile: Node) -> None:
    with pytest.raises(ReplayError, match=r"failed on replay"):
        replay(hostile)


def test_the_least_integer_by_minus_one_is_refused() -> None:
    least = node("aten.full.default", (1,), -(2**63), dtype=torch.int64, result_bytes=(8,))
    with pytest.raises(ReplayError, match="least integer"):
        replay(least, node("aten.div.Tensor_mode", ResultRef(0, 0), -1, rounding_mode="trunc", result_bytes=(8,)))


def test_uninitialised_memory_is_never_shown() -> None:
    shown = node("aten.empty.memory_format", (4,), dtype=torch.float32)
    torch.full((4,), 7.0)  # freed, and so likely to be what empty() gives
    replayed = Replay(program(shown, node("aten.mul.Tensor", ResultRef(0, 0), X)), [torch.ones(4)], [], keep_saved=True)
    assert torch.equal(replayed.saved(0).unpack(), torch.zeros(4))


def test_writing_to_a_source_must_be_declared() -> None:
    tensor = torch.ones(4)
    writes = replace(
        program(node("aten.mul_.Tensor", X, 3, result_bytes=(0,))), sources=(Source(False, True, is_written=False),)
    )
    with pytest.raises(ProgramError, match="does not declare as written"):
        Replay(writes, [tensor], [])


@pytest.mark.parametrize("states", [(), (b"", b""), (b"short",), (bytes(5056),)])
def test_generator_states_that_can_not_be(states: tuple[bytes, ...]) -> None:
    draw = node("aten.rand.default", (4,), draws=True)
    before = torch.get_rng_state()
    with pytest.raises(ProgramError):
        replay(draw, states=states)
    torch.set_rng_state(before)
