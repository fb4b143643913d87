"""flex_attention travels with its score_mod and mask_mod as nested programs."""

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import backhaul
from backhaul import Decision, Session
from backhaul._backend import backend
from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.attention import MAX_NESTED_NODES
from backhaul_runtime.program.codec import decode_program, encode_program
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import (
    FLEX_ATTENTION,
    NestedNode,
    NestedProgram,
    Node,
    Program,
    ResultRef,
    SourceRef,
    is_same_program,
)
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.compiled_programs import why_not_compiled, why_not_for_others
from backhaul_runtime.replay.replay import Replay
from conftest import QUIET
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.compiled import MARKS
from support.devices import DEVICE
from support.loopback import Loopback

pytestmark = [
    *MARKS,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*torch.compile's guards"),
]
HEADS, LENGTH, WIDTH = 2, 16, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def trains_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets flex_attention take gradients on a CPU, which torch refuses for want of a fused kernel.

    With one thread, as torch adds the gradients of an indexed buffer in another order in each run otherwise.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mask_of(mask_mod: Any) -> BlockMask:
    return create_block_mask(mask_mod, 1, None, LENGTH, LENGTH, device=DEVICE, BLOCK_SIZE=8)


class Attention(nn.Module):
    """Attention over packed documents, with a learned bias that depends on the distance, and soft capping."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 4, device=DEVICE))
        self.is_capped = True

    def forward(self, x: Tensor, documents: Tensor, mask: BlockMask | None = None) -> Tensor:
        query, key, value = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.projection(x).chunk(3, -1)
        ]

        def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            score = 20.0 * torch.tanh(score / 20.0) if self.is_capped else score
            same = documents[row] == documents[column]
            return torch.where(same, score + self.bias[head, (row - column).abs() % 4], -1e4)

        out = flex_attention(query, key, value, score_mod=score_mod, block_mask=mask)
        assert isinstance(out, Tensor)
        return x + out.transpose(1, 2).flatten(-2)


def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def recorded(remote: Loopback) -> Checkpoint:
    return functools.partial(remote.checkpoint, graphs="off")


def own(remote: Loopback) -> Checkpoint:
    return functools.partial(remote.checkpoint, graphs="eager")


def user(remote: Loopback) -> Checkpoint:
    compiled: dict[int, Any] = {}

    def run(block: Any, *args: Any) -> Any:
        if id(block) not in compiled:
            compiled[id(block)] = torch.compile(block, backend=backend)
        return remote.checkpoint(compiled[id(block)], *args)

    return run


def block() -> Attention:
    seed_generators(3)
    return Attention().to(DEVICE)


def step(checkpoint: Checkpoint, attention: Attention, mask: BlockMask | None, seed: int) -> list[Tensor | None]:
    seed_generators(seed)
    attention.zero_grad()
    x = torch.randn(1, LENGTH, WIDTH, device=DEVICE, requires_grad=True)
    documents = torch.randint(0, 3, (LENGTH,), device=DEVICE)
    y = checkpoint(attention, x * 1, documents, mask)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[parameter.grad for parameter in attention.parameters()]]


@pytest.mark.parametrize(
    ("way", "is_masked"),
    [(recorded, True), pytest.param(recorded, False, marks=pytest.mark.nightly), (own, True), (user, True)],
)
def test_gradients_have_the_bits_of_the_same_call(way: Callable[[Loopback], Checkpoint], is_masked: bool) -> None:
    remote, attention, mask = Loopback(), block(), mask_of(causal) if is_masked else None
    checkpoint = way(remote)
    for lost in (False, True):
        remote.is_lost = lost
        for seed in range(5):
            if seed == 4:
                attention.bias.data.mul_(2)
            expected = step(plainly, attention, mask, seed)
            assert not differing(expected, step(checkpoint, attention, mask, seed)), (lost, seed)
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 5, Decision.TRAINER: 5}, remote.report()
    assert segment.known >= (0 if way is recorded else 7)


def test_without_a_block_mask_it_is_recorded() -> None:
    # torch makes a mask then, in the graph and by a transform of torch.func.
    remote, attention = Loopback(), block()
    for seed in range(2):
        assert not differing(step(plainly, attention, None, seed), step(own(remote), attention, None, seed))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2}
    assert any("the graph holds" in reason for reason in segment.recorded)


def test_a_worker_of_ones_own_computes_it() -> None:
    attention, mask = block(), mask_of(causal)
    expected = step(plainly, attention, mask, 0)
    with backhaul.connect(settings=QUIET) as session:
        assert not differing(expected, step(session.checkpoint, attention, mask, 0))
        assert session.report().remote == 1, session.report()


def test_a_worker_that_does_not_compile_says_so(session: Session) -> None:
    # torch generates code for the backward, from which other workers abstain.
    attention = block()
    expected = step(plainly, attention, None, 0)
    assert not differing(expected, step(session.checkpoint, attention, None, 0))
    (reason,) = session.report().segments[0].reasons
    assert "it does not run flex_attention" in reason


@pytest.mark.nightly
def test_another_score_mod_is_another_program() -> None:
    remote, attention, mask = Loopback(), block(), mask_of(causal)
    checkpoint = own(remote)
    for number in range(8):
        attention.is_capped = number < 4
        assert not differing(step(plainly, attention, mask, 1), step(checkpoint, attention, mask, 1))
    (segment,) = remote.report().segments
    assert segment.compilations == 2


def test_what_no_nested_program_expresses_is_named() -> None:
    remote, x = Loopback(), torch.randn(1, HEADS, LENGTH, WIDTH, device=DEVICE, requires_grad=True)

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score + torch.stack([row, column]).sum()

    def function(x: Tensor) -> Any:
        return flex_attention(x.sin(), x, x, score_mod=score_mod)

    expected = torch.autograd.grad(function(x).sum(), x)
    assert not differing(expected, torch.autograd.grad(recorded(remote)(function, x).sum(), x))
    (segment,) = remote.report().segments
    assert list(segment.kept) == [
        "score_mod of flex_attention has the op aten.stack.default, which does not return a number"
    ]


def program() -> tuple[Program, list[Tensor]]:
    """A program of flex_attention with a document mask, and its sources."""
    seed_generators(0)
    x = torch.randn(1, HEADS, LENGTH, WIDTH, requires_grad=True)
    documents = torch.randint(0, 3, (LENGTH,))
    mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], 1, None, LENGTH, LENGTH, device="cpu")
    recorder = Recorder([], allowed_ops(), lambda tensor, *_: tensor.detach())
    with recorder:
        y = flex_attention(x, x, x, block_mask=mask)
    assert recorder.recording.refusal is None
    return recorder.finish([y]), list(recorder.call.memory.sources.tensors)


def test_a_program_is_what_was_encoded() -> None:
    made, _ = program()
    assert is_same_program(made, decode_program(encode_program(made), CPU))


def test_numbers_inside_of_nested_programs_distinguish_programs() -> None:
    made, _ = program()

    def with_factor(factor: Any) -> Program:
        return changed(
            made, score_mod=NestedProgram(5, (op("aten.mul.Tensor", SourceRef(0), factor),), ResultRef(0, 0))
        )

    assert is_same_program(with_factor(0.0), with_factor(0.0))
    assert not is_same_program(with_factor(0.0), with_factor(-0.0))
    assert not is_same_program(with_factor(1), with_factor(True))


def test_what_a_worker_compiles_is_the_trainers_own() -> None:
    made, _ = program()
    assert why_not_compiled(made) == ""
    assert "flex_attention" in why_not_for_others(made)


def op(name: str, *args: Any, **kwargs: Any) -> NestedNode:
    return NestedNode(name, args, tuple(kwargs.items()))


def changed(made: Program, **parts: Any) -> Program:
    """The program with other arguments of flex_attention, by name."""
    names = ("query", "key", "value", "score_mod", "mask", "scale", "options", "score_buffers", "mask_buffers")
    (node,) = made.nodes
    given = dict(zip(names, node.args, strict=True))
    if "mask_mod" in parts:
        parts["mask"] = (*given["mask"][:-1], parts.pop("mask_mod"))
    return replace(made, nodes=(replace(node, args=tuple((given | parts).values())),))


def of_scores(*nodes: NestedNode, inputs: int = 5) -> NestedProgram:
    return NestedProgram(inputs, nodes, ResultRef(len(nodes) - 1, 0))


REFUSED: dict[str, dict[str, Any]] = {
    "fewer inputs": {"score_mod": NestedProgram(4, (), SourceRef(0))},
    "more inputs": {"score_mod": NestedProgram(6, (), SourceRef(0))},
    "an input past the last": {"score_mod": of_scores(op("aten.sin.default", SourceRef(5)))},
    "a result of its own": {"score_mod": of_scores(op("aten.sin.default", ResultRef(0, 0)))},
    "a second result": {"score_mod": NestedProgram(5, (op("aten.sin.default", SourceRef(0)),), ResultRef(0, 1))},
    "a matrix product": {"score_mod": of_scores(op("aten.mm.default", SourceRef(0), SourceRef(0)))},
    "a random number": {"score_mod": of_scores(op("aten.rand_like.default", SourceRef(0)))},
    "a write": {"score_mod": of_scores(op("aten.sin_.default", SourceRef(0)))},
    "a large tensor": {"score_mod": of_scores(op("aten.new_ones.default", SourceRef(0), (1 << 40,)))},
    "an op that loops": {
        "score_mod": of_scores(op("aten.special_hermite_polynomial_h.default", SourceRef(0), SourceRef(1)))
    },
    "itself": {"score_mod": of_scores(op(FLEX_ATTENTION, SourceRef(0)))},
    "a nested program in one": {"score_mod": of_scores(op("aten.sin.default", NestedProgram(5, (), SourceRef(0))))},
    "an index that is no tensor": {"score_mod": of_scores(op("aten.index.Tensor", SourceRef(0), (None,)))},
    "too few arguments": {"score_mod": of_scores(op("aten.add.Tensor"))},
    "too many ops": {"score_mod": of_scores(*[op("aten.sin.default", SourceRef(0))] * (MAX_NESTED_NODES + 1))},
    "no mask_mod": {"mask": ()},
    "a number for a tensor": {"query": 1},
    "a number for a buffer": {"mask_buffers": (1,)},
    "an option with code": {"options": (("BACKEND", "{{ code }}"),)},
    "an unknown option": {"options": (("SM_SCALE", 1),)},
    "an option of another type": {"options": (("BLOCK_M", "64"),)},
    "a scale that is no number": {"scale": "1"},
}


@pytest.mark.parametrize("parts", REFUSED.values(), ids=REFUSED)
def test_a_worker_refuses_hostile_nested_programs(parts: dict[str, Any]) -> None:
    made, _ = program()
    with pytest.raises(ProgramError):
        decode_program(encode_program(changed(made, **parts)), CPU)


def test_other_ops_take_no_nested_program() -> None:
    node = Node("aten.sin.default", (NestedProgram(1, (), SourceRef(0)),), (), 0, (4,), draws=False)
    made, _ = program()
    with pytest.raises(ProgramError):
        decode_program(encode_program(replace(made, nodes=(node,))), CPU)


def documents_mask(*indices: Any) -> NestedProgram:
    return NestedProgram(5, (op("aten.index.Tensor", SourceRef(4), indices),), ResultRef(0, 0))


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "a whole buffer for a number": (
        {"mask_mod": NestedProgram(5, (op("aten.ge.Scalar", SourceRef(4), 0),), ResultRef(0, 0))},
        "takes a whole buffer for a number",
    ),
    "a whole buffer returned": ({"mask_mod": NestedProgram(5, (), SourceRef(4))}, "returns a whole buffer"),
    "too many indices": ({"mask_mod": documents_mask(SourceRef(2), SourceRef(3))}, "more or fewer numbers"),
    "no indices": ({"mask_mod": documents_mask()}, "more or fewer numbers"),
}


@pytest.mark.parametrize(("parts", "why"), FAILING.values(), ids=FAILING)
def test_a_replay_refuses_what_only_shapes_show(parts: dict[str, Any], why: str) -> None:
    made, sources = program()
    with pytest.raises(ProgramError, match=why):
        Replay(changed(made, **parts), sources, [])


@pytest.mark.parametrize("value", [LENGTH, 1 << 40, -LENGTH - 1, -(1 << 63)])
def test_an_index_out_of_range_is_an_error(value: int) -> None:
    # The mask indexes the documents by what they hold.
    made, sources = program()
    nested = NestedProgram(
        5,
        (
            op("aten.index.Tensor", SourceRef(4), (SourceRef(2),)),
            op("aten.index.Tensor", SourceRef(4), (ResultRef(0, 0),)),
            op("aten.ge.Scalar", ResultRef(1, 0), 0),
        ),
        ResultRef(2, 0),
    )
    number = next(i for i, source in enumerate(sources) if source.shape == (LENGTH,))
    sources[number] = torch.full((LENGTH,), value)
    with pytest.raises(Exception, match="out of (range|bounds)"):
        Replay(changed(made, mask_mod=nested), sources, [])


@pytest.mark.parametrize("shape", [(0,), (1, 1, 1, 1), (1, 1, 9, 9)])
def test_a_block_mask_of_another_shape_is_harmless(shape: tuple[int, ...]) -> None:
    # Without Inductor nothing reads the blocks: mask_mod decides about each number.
    made, sources = program()
    (node,) = made.nodes
    blocks = {ref.index for ref in node.args[4] if isinstance(ref, SourceRef)}
    others = [torch.full(shape, 1 << 30, dtype=torch.int32) if i in blocks else s for i, s in enumerate(sources)]
    right, wrong = (
        Replay(made, given, []).backward({0: torch.ones(1, HEADS, LENGTH, WIDTH)}) for given in (sources, others)
    )
    assert not differing([c.gradient for c in right], [c.gradient for c in wrong])
