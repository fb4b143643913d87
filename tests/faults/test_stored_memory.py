"""Programs that try to change what a worker holds for others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul
from backhaul import BackhaulError, ProgramError, Session
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.program import (
    Composite,
    GeneratorRef,
    Node,
    Program,
    RecordedChoice,
    Ref,
    ResultRef,
    Source,
    SourceRef,
)
from backhaul_runtime.replay.replay import Replay, isolated
from backhaul_runtime.tensors.deferred_digest import KnownDigests
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.storages import storage_key
from conftest import QUIET
from faults.test_wire import Wire, fetched, refused
from support.processes import WorkerProcess

STORED = {
    "matrix": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "number": torch.tensor(1.0),
    "image": torch.rand(2, 2, 2, 2),
    "two": torch.tensor([0.25, 0.5]),
    "others": torch.tensor([1.5, 2.5]),
    "integers": torch.tensor([[1, 2], [3, 4]]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
}
NAMES = list(STORED)


def source(name: str) -> SourceRef:
    return SourceRef(NAMES.index(name))


def node(op: str, *args: Any, made: tuple[int, ...] = (0,), **kwargs: Any) -> Node:
    """An op and how many bytes it makes for each result; 0 for an alias."""
    draws = any(isinstance(value, GeneratorRef) for value in kwargs.values()) or "dropout" in op
    return Node(f"aten.{op}", args, tuple(kwargs.items()), 0, made, draws)


X, NUMBER, IMAGE = source("matrix"), source("number"), source("image")
FIRST = ResultRef(0, 0)
ALIASES: dict[str, Node] = {
    "alias": node("alias.default", X),
    "detach": node("detach.default", X),
    "dropout in eval mode": node("dropout.default", X, 0.5, False),
    "feature dropout in eval mode": node("feature_dropout.default", IMAGE, 0.5, False),
    "alpha dropout in eval mode": node("alpha_dropout.default", X, 0.5, False),
    "view": node("view.default", X, (4,)),
    "view_as": node("view_as.default", X, X),
    "reshape": node("reshape.default", X, (4,)),
    "reshape_as": node("reshape_as.default", X, X),
    "flatten": node("flatten.using_ints", X),
    "ravel": node("ravel.default", X),
    "unflatten": node("unflatten.int", X, 0, (2, 1)),
    "contiguous": node("contiguous.default", X),
    "to a dtype": node("to.dtype", X, torch.float32),
    "to a device": node("to.device", X, torch.device("cpu"), torch.float32),
    "to a layout": node("to.dtype_layout", X, dtype=torch.float32, device=torch.device("cpu")),
    "type_as": node("type_as.default", X, X),
    "narrow": node("narrow.default", X, 0, 0, 1),
    "select": node("select.int", X, 0, 0),
    "slice": node("slice.Tensor", X, 0, 0, 1),
    "transpose": node("transpose.int", X, 0, 1),
    "t": node("t.default", X),
    "mT": node("mT.default", X),
    "permute": node("permute.default", X, (1, 0)),
    "movedim": node("movedim.intlist", X, (0,), (1,)),
    "expand": node("expand.default", NUMBER, (1,)),
    "expand_as": node("expand_as.default", X, X),
    "broadcast_to": node("broadcast_to.default", X, (1, 2, 2)),
    "broadcast_tensors": node("broadcast_tensors.default", (X, X), made=(0, 0)),
    "meshgrid": node("meshgrid.indexing", (source("two"),), indexing="ij"),
    "squeeze": node("squeeze.default", X),
    "unsqueeze": node("unsqueeze.default", X, 0),
    "diagonal": node("diagonal.default", X),
    "linalg_diagonal": node("linalg_diagonal.default", X),
    "unfold": node("unfold.default", X, 0, 1, 1),
    "unbind": node("unbind.int", X, made=(0, 0)),
    "split": node("split.Tensor", X, 1, made=(0, 0)),
    "chunk": node("chunk.default", X, 2, made=(0, 0)),
    "unsafe_chunk": node("unsafe_chunk.default", X, 2, made=(0, 0)),
    "unsafe_split": node("unsafe_split.Tensor", X, 1, made=(0, 0)),
    "tensor_split": node("tensor_split.sections", X, 2, made=(0, 0)),
    "atleast_2d": node("atleast_2d.default", X),
    "atleast_1d of several": node("atleast_1d.Sequence", (X, X), made=(0, 0)),
    "positive": node("positive.default", X),
    "lift_fresh": node("lift_fresh.default", X),
    "resolve_conj": node("resolve_conj.default", X),
    "resolve_neg": node("resolve_neg.default", X),
    "conj of real": node("_conj.default", source("complex")),
    "real part": node("real.default", source("complex")),
    "imaginary part": node("imag.default", source("complex")),
    "view as real": node("view_as_real.default", source("complex")),
    "conj_physical of real": node("conj_physical.default", X),
    "cartesian_prod of one": node("cartesian_prod.default", (source("two"),)),
    "sum_to_size": node("sum_to_size.default", X, (2, 2)),
}
"""One op each that returns memory of a source; the schema of many does not say so."""

WRITES: dict[str, Callable[[Ref], Node]] = {
    "fill_": lambda ref: node("fill_.Scalar", ref, 5.0),
    "fill_ by name": lambda ref: node("fill_.Scalar", self=ref, value=5.0),
    "zero_": lambda ref: node("zero_.default", ref),
    "copy_": lambda ref: node("copy_.default", ref, source("number")),
    "add_": lambda ref: node("add_.Tensor", ref, 1.0),
    "mul_": lambda ref: node("mul_.Tensor", ref, ref),
    "index_put_": lambda ref: node("index_put_.default", ref, (source("integers"),), source("number")),
    "masked_fill_": lambda ref: node("masked_fill_.Scalar", ref, ref, 5.0),
    "uniform_": lambda ref: node("uniform_.default", ref, generator=GeneratorRef()),
    "dropout_": lambda ref: node("dropout_.default", ref, 0.5, True),
    "rrelu_": lambda ref: node("rrelu_.default", ref),
    "relu_": lambda ref: node("relu_.default", ref),
    "t_": lambda ref: node("t_.default", ref),
    "as_strided_": lambda ref: node("as_strided_.default", ref, (1,), (1,)),
    "detach_": lambda ref: node("detach_.default", ref),
    "batch_norm's mean": lambda ref: node(
        "batch_norm.default", IMAGE, None, None, ref, source("others"), True, 0.5, 1e-5, False, made=(64,)
    ),
    "batch_norm's variance": lambda ref: node(
        "batch_norm.default", IMAGE, None, None, source("others"), ref, True, 0.5, 1e-5, False, made=(64,)
    ),
    "instance_norm's mean": lambda ref: node(
        "instance_norm.default", IMAGE, None, None, ref, source("others"), True, 0.5, 1e-5, False, made=(64,)
    ),
}
"""Ops that write to an argument; the schema of norms does not say so."""

ATTACKS: dict[str, tuple[Node, ...]] = {
    **{f"fill_ after {name}": (alias, WRITES["fill_"](FIRST)) for name, alias in ALIASES.items()},
    **{name: (make(source("two") if "norm" in name else X),) for name, make in WRITES.items()},
    "fill_ of a number": (WRITES["fill_"](NUMBER),),
    "the mean through an alias": (
        node("dropout.default", source("two"), 0.5, False),
        WRITES["batch_norm's mean"](FIRST),
    ),
    "as_strided": (node("as_strided.default", X, (1,), (1,)), WRITES["fill_"](FIRST)),
    "a view of a view": (
        node("dropout.default", X, 0.5, False),
        node("select.int", FIRST, 0, 1),
        WRITES["fill_"](ResultRef(1, 0)),
    ),
    "a decision that is given for a view": (
        Node(
            "aten.alias.default",
            (source("integers"),),
            (),
            0,
            (0,),
            draws=False,
            given=(RecordedChoice(len(NAMES), 0),),
        ),
    ),
}


def program_of(nodes: tuple[Node, ...]) -> bytes:
    sources = [Source(requires_grad=False, is_leaf=True, is_written=False)] * (len(NAMES) + 1)
    return encode_program(Program(tuple(sources), nodes, (ambient_state.capture(),), (), 0, 0))


GIVEN = torch.tensor([[9, 9], [9, 9]])
"""What a decision is given as."""


@pytest.fixture(scope="module")
def attacker(worker: WorkerProcess) -> Iterator[Wire]:
    wire = Wire(worker.address)
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def victim(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, strict=True, settings=QUIET) as session:
        yield session


def attack(wire: Wire, nodes: tuple[Node, ...]) -> BackhaulError:
    """Runs a program on what is stored, and returns the error that it ends with."""
    tensors = [*STORED.values(), GIVEN]
    sources, address = wire.put(*tensors), wire.program(program_of(nodes))
    key = segment_pb2.OperationKey(segment=1, backward=1)
    states = [torch.Generator().get_state().numpy().tobytes()] * sum(node.draws for node in nodes)
    save = segment_pb2.SaveRequest(key=key, program=address, sources=sources, generator_states=states)
    (answer,) = wire.ask(save=save)
    assert answer.save == segment_pb2.SaveResult()
    try:
        error = refused(wire.ask, recompute=segment_pb2.RecomputeRequest(key=key))
        held = fetched(wire, *sources)  # by address, which is compared
        assert len(held) == len(tensors)
        return error
    finally:
        wire.ask(release=segment_pb2.ReleaseRequest(keys=[key]))


@pytest.mark.parametrize("nodes", ATTACKS.values(), ids=ATTACKS.keys())
def test_no_program_changes_what_is_stored(nodes: tuple[Node, ...], attacker: Wire, victim: Session) -> None:
    factors = [STORED[name].clone().requires_grad_() for name in ("matrix", "number", "two")]
    x = torch.randn(2, requires_grad=True)
    y = victim.checkpoint(lambda x: (x * factors[0] * factors[1] + factors[2]).sin(), x, returns="gradients")
    error = attack(attacker, nodes)
    assert isinstance(error, ProgramError), repr(error)
    assert "does not declare as written" in error.message or "a source" in error.message
    ours = torch.autograd.grad(y.sum(), [x, *factors])
    expected = torch.autograd.grad((x * factors[0] * factors[1] + factors[2]).sin().sum(), [x, *factors])
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_each_alias_is_one(alias: Node) -> None:
    """Else an attack through it would be none."""
    tensors = [*(tensor.clone() for tensor in STORED.values()), GIVEN]
    sources = [Source(requires_grad=False, is_leaf=True, is_written=False)] * len(tensors)
    program = Program(tuple(sources), (alias,), (ambient_state.capture(),), (FIRST,), 0, 0)
    states = [torch.Generator().get_state().numpy().tobytes()] * alias.draws
    with isolated([]):
        output = Replay(program, tensors, states).output(0)
    assert storage_key(output) in map(storage_key, tensors)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_the_trainers_own_replay_changes_nothing_of_the_trainers(write: Callable[[Ref], Node]) -> None:
    tensors = [torch.nn.Parameter(tensor.clone(), requires_grad=False) for tensor in (*STORED.values(), GIVEN)]
    sources = [Source(requires_grad=False, is_leaf=True, is_written=False)] * len(tensors)
    written = write(source("two") if len(write(X).args) > 4 else X)
    program = Program(tuple(sources), (written,), (ambient_state.capture(),), (), 0, 0)
    states = [torch.Generator().get_state().numpy().tobytes()] * written.draws
    with isolated([]), pytest.raises(ProgramError, match="does not declare as written|reach past"):
        Replay(program, tensors, states, is_own=True)
    assert all(map(torch.equal, tensors, (*STORED.values(), GIVEN)))


def test_a_source_that_is_declared_as_written_is_copied_first() -> None:
    tensor = torch.tensor([1.0, 2.0])
    sources = (Source(requires_grad=False, is_leaf=True, is_written=True),)
    nodes = (node("dropout.default", SourceRef(0), 0.5, False), WRITES["fill_"](FIRST))
    program = Program(sources, nodes, (ambient_state.capture(),), (FIRST,), 0, 0)
    with isolated([]):
        replay = Replay(program, [tensor], [torch.Generator().get_state().numpy().tobytes()])
    assert replay.output(0).tolist() == [5.0, 5.0]
    assert tensor.tolist() == [1.0, 2.0]


class Passing(torch.Tensor):
    """A tensor subclass that passes writes on to the tensor inside of it, and writes there in `sin`, too."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inside = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "Passing":
        return Passing(inner["inside"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (first, *rest) = args
        first.inside.add_(1)
        return first if rest else first.inside.sin()


def passing(op: str, *args: Any, made: int) -> Program:
    """A program that calls an op on a `Passing` around its only source."""
    wrapped = Composite("faults:Passing", (("inside",), (SourceRef(0),), None, (1 << 15,), (1,)))
    sources = (Source(requires_grad=False, is_leaf=True, is_written=False),)
    nodes = (node(op, wrapped, *args, made=(made,)),)
    return Program(sources, nodes, (ambient_state.capture(),), (), 0, 0, types=("faults:Passing",))


def test_no_program_writes_through_a_tensor_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.types, "faults:Passing", Passing)
    tensor = torch.zeros(1 << 15)
    with isolated([]), pytest.raises(ProgramError, match="writes to a Passing"):
        Replay(passing("mul_.Tensor", 2.0, made=0), [tensor], [])
    assert not tensor.any()


def test_what_a_tensor_subclass_writes_is_noticed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps the digests of what it stores, as nothing may change it."""
    monkeypatch.setitem(names.types, "faults:Passing", Passing)
    tensor, known = torch.zeros(1 << 15), KnownDigests()
    sources = (Source(requires_grad=True, is_leaf=True, is_written=False),)
    reading = Program(sources, (node("sin.default", X, made=(1 << 17,)),), (ambient_state.capture(),), (FIRST,), 1, 0)
    with isolated([]):
        before = Replay(reading, [tensor], [], known=known).digests
        Replay(passing("sin.default", made=1 << 17), [tensor], [], known=known)
        assert Replay(reading, [tensor], [], known=known).digests != before
