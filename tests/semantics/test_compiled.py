"""Compiled segments are recorded once, have eager's bits, and never run a program of another call."""

import functools
import gc
import random
import tomllib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backhaul import NotRemoteError, Session
from backhaul._backend import backend
from backhaul._backward.handles import HandleTable
from backhaul._forward import captured_graph, graphs, known_call
from backhaul._forward.captured_graph import OTHER_OPS
from backhaul._forward.graphs import NO_GRAPH
from backhaul._observe.report import SegmentReport
from backhaul_runtime import errors
from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.known_program import CHANGED, KnownCall
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.devices import DEVICE
from support.loopback import Loopback

# torch.compile looks whether inputs have gradients, and hides the warning by a way that pytest's filter does not know.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
WIDTH = 8
SCALES = {"global": 1.5}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Has everything that a test changes between two calls."""

    mask: Tensor
    norm: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.power, self.kind, self.is_gated = 0.5, 2, "gelu", True
        self.factors = {"first": 1.25, "second": 0.75}
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(nn.functional, self.kind)(self.up(self.norm(x)))
        y = nn.functional.dropout(self.down(y), 0.3, self.training)
        if self.is_gated:
            y = y * torch.sigmoid(x) * self.mask
        for factor in self.factors.values():
            y = (y * factor).to(torch.float32).tanh().to(y.dtype)
        out: Tensor = x + y.pow(self.power) * self.scale * SCALES["global"]
        return out


def own(remote: Loopback) -> Checkpoint:
    """Backhaul compiles."""
    return functools.partial(remote.checkpoint, graphs="eager")


def user(remote: Loopback) -> Checkpoint:
    """The user has compiled."""
    compiled: dict[int, Any] = {}

    def run(block: Any, *args: Any, **kwargs: Any) -> Any:
        if id(block) not in compiled:
            compiled[id(block)] = torch.compile(block, backend=backend)
        return remote.checkpoint(compiled[id(block)], *args, **kwargs)

    return run


WAYS = pytest.mark.parametrize("way", [own, user])


def step(checkpoint: Checkpoint, block: Any, x: Tensor, seed: int = 0) -> list[Tensor | None]:
    """The output of two calls, the gradients, and what the generator gives afterwards."""
    seed_generators(seed)
    block.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = checkpoint(block, checkpoint(block, x * 1))
    if y.requires_grad:
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters()), torch.rand(3)]


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, WIDTH)), device=DEVICE, requires_grad=True)


def block_like(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block().to(DEVICE)


def reported(remote: Loopback) -> SegmentReport:
    (segment,) = [segment for segment in remote.report().segments if segment.name == "Block"]
    return segment


def known(remote: Loopback) -> int:
    return sum(segment.known for segment in remote.report().segments)


@WAYS
def test_only_the_first_call_of_a_graph_is_recorded(way: Callable[[Loopback], Checkpoint]) -> None:
    remote, x = Loopback(), inputs()
    blocks, checkpoint = nn.ModuleList(block_like(number) for number in range(12)), way(remote)
    for seed in range(3):
        for block in blocks:
            assert not differing(step(plainly, block, x, seed), step(checkpoint, block, x, seed))
    # Equal layers share a graph: two calls run the function, the third one is compared with them, and one in 64 later.
    # Layers that the user compiles one by one have a graph each, which is what the user wants to run.
    assert reported(remote).calls == 72
    assert reported(remote).known >= (68 if way is own else 60)
    assert not reported(remote).recorded


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a float": lambda block: setattr(block, "scale", 0.25),
    "an int": lambda block: setattr(block, "power", 3),
    "a string": lambda block: setattr(block, "kind", "silu"),
    "a flag": lambda block: setattr(block, "is_gated", False),
    "eval": lambda block: block.eval(),
    "a submodule": lambda block: setattr(block, "down", nn.Linear(2 * WIDTH, WIDTH, bias=False).to(DEVICE)),
    "a parameter": lambda block: setattr(block.up, "bias", None),
    "a forward hook": lambda block: block.up.register_forward_hook(lambda module, args, output: output * 2),
    "a pre-hook": lambda block: block.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "a hook of the block": lambda block: block.register_forward_hook(lambda module, args, output: output + 1),
    "requires_grad": lambda block: block.up.requires_grad_(False),
    "the buffer's value": lambda block: block.mask.mul_(0.5),
    "the buffer": lambda block: setattr(block, "mask", torch.full((WIDTH,), 2.0, device=DEVICE)),
    "the dict's order": lambda block: setattr(block, "factors", {"second": 0.75, "first": 1.25}),
    "the dict's values": lambda block: block.factors.update(first=2.0),
    "a method": lambda block: setattr(block, "forward", lambda x: block.norm(x) * 3),
    "data": lambda block: setattr(block.up.weight, "data", block.up.weight.data * 2),
    "values": lambda block: torch.nn.init.ones_(block.up.weight),
    "nothing": lambda block: None,
}


@pytest.mark.parametrize(
    ("way", "change"),
    [*[(own, change) for change in CHANGES], *[(user, change) for change in ("a float", "eval", "data")]],
)
def test_a_change_of_the_module_takes_effect(change: str, way: Callable[[Loopback], Checkpoint]) -> None:
    remote, x = Loopback(), inputs()
    checkpoint, block, reference = way(remote), block_like(), block_like()
    for seed in range(2):
        assert not differing(step(plainly, reference, x, seed), step(checkpoint, block, x, seed))
    before = known(remote)
    for one in (block, reference):
        torch.manual_seed(5)
        CHANGES[change](one)
    for seed in range(3):
        assert not differing(step(plainly, reference, x, seed), step(checkpoint, block, x, seed)), change
    assert known(remote) > before


def test_a_global_and_a_closure_that_change_take_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    remote, x, factor = Loopback(), inputs(), 2.0

    def function(x: Tensor) -> Tensor:
        return (x * factor).tanh() * SCALES["global"]

    checkpoint = own(remote)
    for factor in (2.0, 2.0, 3.0, 3.0, 4.0):
        monkeypatch.setitem(SCALES, "global", factor + 1)
        y = checkpoint(function, x)
        assert torch.equal(y, function(x))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        assert torch.equal(gradient, expected)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "a default dtype": lambda: restoring(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "determinism": lambda: restoring(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "flush_denormal": lambda: restoring(lambda: False, torch.set_flush_denormal, True),
    "a function mode": lambda: Doubling(),  # noqa: PLW0108  the class follows below
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
}


class Doubling(TorchFunctionMode):
    """Doubles what tanh returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        return returned * 2 if getattr(function, "__name__", "") == "tanh" else returned


class restoring(nullcontext[None]):  # noqa: N801  used like a function
    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> None:
        super().__init__()
        self._write, self._before, self._value = write, read(), value

    def __enter__(self) -> None:
        self._write(self._value)

    def __exit__(self, *exception: object) -> None:
        self._write(self._before)


@pytest.mark.parametrize(
    ("way", "setting"), [*[(own, setting) for setting in SETTINGS], (user, "determinism"), (user, "a function mode")]
)
def test_a_change_of_settings_takes_effect(setting: str, way: Callable[[Loopback], Checkpoint]) -> None:
    remote, x = Loopback(), inputs()
    checkpoint, block = way(remote), block_like()
    for context in (nullcontext, SETTINGS[setting], nullcontext, SETTINGS[setting], SETTINGS[setting]):
        with context():
            expected = step(plainly, block, x)
            given = step(checkpoint, block, x)
        assert not differing(expected, given), setting
    assert known(remote)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "a batch size": lambda: inputs(5, 3, WIDTH),
    "another rank": lambda: inputs(4, WIDTH),
    "a dtype": lambda: torch.randn(2, 3, WIDTH, device=DEVICE, dtype=torch.float64, requires_grad=True),
    "strides": lambda: torch.randn(WIDTH, 3, 2, device=DEVICE).permute(2, 1, 0).requires_grad_(),
    "no gradient": lambda: torch.randn(2, 3, WIDTH, device=DEVICE),
    "a leaf": lambda: torch.randn(2, 3, WIDTH, device=DEVICE, requires_grad=True),
    "an empty batch": lambda: inputs(0, 3, WIDTH),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_other_inputs_run_another_program(kind: str) -> None:
    remote = Loopback()
    checkpoint, block = own(remote), block_like()
    for x in (inputs(), INPUTS[kind](), inputs(), INPUTS[kind](), INPUTS[kind]()):
        block.to(x.dtype)
        assert not differing(step(plainly, block, x), step(checkpoint, block, x))
    assert known(remote)


def batch_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x.flatten(0, 1)).tanh()


RECORDED: dict[str, tuple[Callable[..., Any], str]] = {
    "writes in place": (lambda x: x.sin().mul_(2), "writes to memory"),
    "reads a value": (lambda x: x.tanh() * x.detach().sum().item(), "value of a tensor in Python"),
    "size by value": (lambda x: x.tanh()[x > 0], "depends on values"),
    "makes a constant": (lambda x: x.tanh() * torch.tensor([2.0] * WIDTH, device=x.device), "no input of the captured"),
    "a graph break": (lambda x: (torch._dynamo.graph_break(), x.tanh())[1], "cannot capture it whole"),
}


@pytest.mark.parametrize("case", RECORDED)
def test_what_is_not_known_is_recorded_and_the_report_says_why(case: str) -> None:
    function, reason = RECORDED[case]
    remote = Loopback()
    for seed in range(3):
        torch.manual_seed(seed)
        x = inputs()
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            y, expected = remote.checkpoint(function, x, graphs="eager", strict=True), function(x)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (y, expected)))
    (segment,) = remote.report().segments
    assert not segment.known
    ((given, count),) = segment.recorded.items()
    assert reason in given
    assert count == (1 if "break" in case else 3)
    assert len(remote.recordings) == 3
    if "break" in case:
        assert f"{__file__}:" in given


def test_a_norm_that_keeps_statistics_is_recorded() -> None:
    remote, x = Loopback(), inputs()
    norms = [nn.BatchNorm1d(WIDTH).to(DEVICE) for _ in range(2)]
    for _ in range(3):
        y, expected = remote.checkpoint(batch_norm, x, norms[0], graphs="eager"), batch_norm(x, norms[1])
        assert torch.equal(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (y, expected)))
    assert not differing(list(norms[0].buffers()), list(norms[1].buffers()))
    assert not remote.report().segments[0].known


def test_equal_inputs_and_inputs_that_share_memory_are_no_strangers() -> None:
    remote = Loopback()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).tanh() + y.sin() * x

    def pairs() -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        x, y, both = inputs(), inputs(), inputs(2, 3, WIDTH)
        return [(x, y), (x, y), (x, x), (x, y), (both[0], both[1]), (both[0], both[0]), (both[1], both[0]), (y, x)]

    for (x, y), (a, b) in zip(pairs(), pairs(), strict=True):
        given, expected = remote.checkpoint(function, x, y, graphs="eager"), function(a, b)
        assert torch.equal(given, expected)
        got, due = torch.autograd.grad(given.sum(), [x, y]), torch.autograd.grad(expected.sum(), [a, b])
        assert not differing(list(got), list(due))


def test_a_graph_break_of_compiled_code_makes_two_segments() -> None:
    remote, x = Loopback(), inputs()

    def function(x: Tensor) -> Tensor:
        y = x.sin().tanh()
        torch._dynamo.graph_break()
        return y.cos().tanh()

    compiled = torch.compile(function, backend=backend)
    for _ in range(3):
        y = remote.checkpoint(compiled, x)
        assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, function(x))))
    assert len(remote.recordings) == 6
    assert known(remote) == 4


def test_without_a_session_a_compiled_block_runs_plainly() -> None:
    block, x = block_like(), inputs()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert not differing(step(plainly, block, x), step(lambda _, x: compiled(x), block, x))


def test_a_compiled_block_is_a_segment_of_the_current_session(session: Session) -> None:
    block, x = block_like(), inputs()
    compiled = torch.compile(block, backend=backend, options={"kernels": "eager"})
    for seed in range(3):
        assert not differing(step(plainly, block, x, seed), step(lambda _, x: compiled(x), block, x, seed))
    (segment,) = session.report().segments
    assert (segment.name, segment.calls, segment.known) == ("Block", 6, 5)
    assert session.report().remote == 6
    block.compile(backend=backend)
    assert not differing(step(plainly, block_like(), x), step(plainly, block, x))


@pytest.mark.parametrize("options", [{"kernels": "inductor"}, {"fast": True}])
def test_an_unknown_option_of_the_backend_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="the only option is"):
        torch.compile(block_like(), backend=backend, options=options)(inputs())


def test_an_unknown_choice_of_graphs_is_an_error() -> None:
    with pytest.raises(ValueError, match="'fast' is not one of 'auto', 'eager', 'off'"):
        Loopback().checkpoint(block_like(), inputs(), graphs="fast")


def test_compiled_code_that_is_told_to_run_eagerly_keeps_its_activations() -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    compiled = torch.compile(block, backend=backend)
    with torch.compiler.set_stance("force_eager"):
        step(remote.checkpoint, compiled, x)
    assert reported(remote).kept == {NO_GRAPH: 2}


def test_torch_finds_the_backend_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch_dynamo_backends"].items()
    assert (name, EntryPoint(name=name, value=value, group="torch_dynamo_backends").load()) == ("backhaul", backend)


def test_off_records_each_call() -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    compiled = torch.compile(block, backend=backend)
    for _ in range(2):
        given = step(functools.partial(remote.checkpoint, graphs="off"), compiled, x)
        assert not differing(step(plainly, block, x), given)
    assert not known(remote)
    assert len(remote.recordings) == 4


def test_with_saved_tensors_that_differ_the_rest_stays_on_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    own_note = KnownCall.note_saved
    for stop in range(6):
        remote, block, x = Loopback(), block_like(), inputs()
        for _ in range(2):
            assert not differing(step(plainly, block, x), step(own(remote), block, x))

        def note_saved(call: KnownCall, tensor: Tensor, stop: int = stop) -> None:
            if len(call.recording.saved) == stop:
                raise Refusal(CHANGED)
            own_note(call, tensor)

        monkeypatch.setattr(KnownCall, "note_saved", note_saved)
        assert not differing(step(plainly, block, x, 1), step(own(remote), block, x, 1))
        monkeypatch.undo()
        assert reported(remote).reasons == {CHANGED: 2}


@pytest.mark.parametrize("strict", [False, True])
def test_a_lost_worker_leaves_the_gradients_as_they_are(strict: bool) -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    checkpoint = functools.partial(own(remote), strict=strict)
    step(checkpoint, block, x)
    block.zero_grad()
    seed_generators(1)
    y = checkpoint(block, x)
    remote.is_lost = True
    if strict:
        with pytest.raises(NotRemoteError):
            y.sum().backward()
        return
    y.sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()
    seed_generators(1)
    block(x).sum().backward()
    assert not differing([x.grad, *(parameter.grad for parameter in block.parameters())], gradients)


def test_a_backward_that_is_differentiated_itself_is_that_of_a_recorded_segment() -> None:
    remote, x = Loopback(), inputs()
    function = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(DEVICE)
    results = []
    for checkpoint in (remote.checkpoint, own(remote), own(remote)):
        (first,) = torch.autograd.grad(checkpoint(function, x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *function.parameters()]))
    assert not differing(list(results[0]), list(results[1]))
    assert not differing(list(results[0]), list(results[2]))


def test_a_segment_of_a_known_program_keeps_no_activation() -> None:
    remote, block, x = Loopback(), block_like(), inputs(64, 3, WIDTH) * 1
    for _ in range(3):
        own(remote)(block, x)
    alive: list[weakref.ref[Tensor]] = []

    def note(call: KnownCall, tensor: Tensor) -> None:
        held = [x, *block.parameters(), *block.buffers()]
        if tensor.data_ptr() not in {one.data_ptr() for one in held}:
            alive.append(weakref.ref(tensor))
        own_note(call, tensor)

    own_note = KnownCall.note_saved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KnownCall, "note_saved", note)
        y = own(remote)(block, x)
    assert alive
    assert not any(reference() is not None for reference in alive)
    assert remote.taken[-1]() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert not any(taken() for taken in remote.taken)


def test_only_so_many_kinds_of_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graph, "MAX_KINDS", 2)
    remote, block = Loopback(), block_like()
    for size in (1, 2, 3, 3, 1):
        x = inputs(size + 1, 3, WIDTH)
        assert not differing(step(plainly, block, x), step(own(remote), block, x))
    assert any("have changed 2 times" in reason for reason in reported(remote).recorded)


class InjectedError(Exception):
    pass


STEPS: dict[str, tuple[Any, str]] = {
    "find the kind of a call": (captured_graph.CapturedGraph, "kind_of"),
    "learn from a call": (captured_graph, "known_program"),
    "begin a known call": (KnownCall, "__init__"),
    "find predecessors": (known_call, "predecessors_of"),
    "offer a segment": (known_call, "offer"),
    "note a saved tensor": (KnownCall, "note_saved"),
    "make a handle": (HandleTable, "add"),
    "make a lineage": (known_call, "lineage_of"),
    "graft": (known_call, "graft"),
    "note what was grafted": (known_call, "note_grafted"),
}


@pytest.mark.parametrize("step_name", STEPS)
def test_an_error_of_our_own_leaves_the_gradients_as_they_are(
    step_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    owner, name = STEPS[step_name]
    if step_name != "learn from a call":
        for _ in range(2):
            step(own(remote), block, x)
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:  # the first time, and in the middle of calls
            raise InjectedError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setattr(owner, name, failing)
    for seed in range(4):
        assert not differing(step(plainly, block, x, seed), step(own(remote), block, x, seed))
    assert calls
    assert "InjectedError" in caplog.text


def test_what_is_returned_twice_is_one_tensor() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin().tanh()
        return y, y.contiguous(), x

    for checkpoint in (own(Loopback()), user(Loopback())):
        for _ in range(5):
            x = inputs()
            given, due = checkpoint(function, x), function(x)
            assert given[0] is given[1]
            assert given[2] is x
            got, expected = (torch.autograd.grad((a.square() + b).sum(), x) for a, b, _ in (given, due))
            assert torch.equal(got[0], expected[0])


def numpys(x: Tensor) -> Tensor:
    y = x.sin()
    y.detach().numpy()[0] = 3.0
    return y.exp()


def drawn(x: Tensor) -> Tensor:
    return (x * random.randint(1, 5)).tanh()


@functools.lru_cache
def noise() -> Tensor:
    return torch.randn(WIDTH)


def cached(x: Tensor) -> Tensor:
    return (x * noise()).tanh()


@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.skipif(DEVICE != "cpu", reason="NumPy and a tensor that is made once are on the host")
@pytest.mark.parametrize("function", [drawn, cached])
def test_where_the_graph_differs_from_the_function_the_function_runs(function: Callable[[Tensor], Tensor]) -> None:
    remote, x = Loopback(), inputs()
    noise.cache_clear()
    for number in range(6):
        random.seed(number)
        given, state = own(remote)(function, x), random.getstate()
        random.seed(number)
        due = function(x)
        assert torch.equal(given, due)
        assert random.getstate() == state
        assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (given, due)))
    assert not known(remote)


@pytest.mark.skipif(DEVICE != "cpu", reason="NumPy is on the host")
def test_a_graph_that_writes_otherwise_than_its_function_is_not_used() -> None:
    remote = Loopback()
    for number in range(5):
        torch.manual_seed(number)
        x = torch.randn(4, requires_grad=True)
        with pytest.raises(RuntimeError, match="differ between forward and recomputation"):
            own(remote)(numpys, x * 1).sum().backward()
    assert not known(remote)


def test_a_change_that_guards_do_not_see_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graph, "CHECKED_CALLS", 4)
    remote, block, x = Loopback(), block_like(), inputs()
    for _ in range(4):
        step(own(remote), block, x)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 2)
    for _ in range(4):
        step(own(remote), block, x)
    assert not differing(step(plainly, block, x), step(own(remote), block, x))
    assert OTHER_OPS in reported(remote).recorded


def test_hooks_of_all_modules_run() -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    for _ in range(3):
        step(own(remote), block, x)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 1.5)
    try:
        assert not differing(step(plainly, block, x), step(own(remote), block, x))
    finally:
        hook.remove()


def test_a_captured_tensor_may_be_written_to_after_the_call() -> None:
    weight = torch.randn(WIDTH, device=DEVICE, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return (x * weight).tanh()

    x = torch.randn(3, WIDTH, device=DEVICE)
    for checkpoint in (own(Loopback()), user(Loopback())):
        for _ in range(5):
            y = checkpoint(function, x)
            (expected,) = torch.autograd.grad(function(x).sum(), weight)
            with torch.no_grad():
                weight.add_(1)
            (given,) = torch.autograd.grad(y.sum(), weight)
            assert torch.equal(given, expected)


def test_an_error_inside_torch_compile_is_no_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise KeyError("0")

    monkeypatch.setattr(graphs, "in_one_graph", lambda key, compiled: failing)
    remote, block, x = Loopback(), block_like(), inputs()
    assert not differing(step(plainly, block, x), step(own(remote), block, x))
    assert list(reported(remote).recorded) == ["torch.compile cannot capture it whole: '0'"]


def with_torchs_checkpoint(x: Tensor) -> Tensor:
    def inside(y: Tensor) -> Tensor:
        return nn.functional.dropout(y.sin() * y, 0.3).tanh()

    out: Tensor = torch.utils.checkpoint.checkpoint(inside, x * x, use_reentrant=False) * x
    return out


def with_a_gradient(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
    return gradient * x


def with_a_transform(x: Tensor) -> Tensor:
    out: Tensor = torch.func.grad(lambda y: (y.sin() * y).sum())(x) * x
    return out


@pytest.mark.parametrize("function", [with_torchs_checkpoint, with_a_transform])
def test_a_graph_that_is_no_list_of_calls(function: Callable[[Tensor], Tensor]) -> None:
    x = inputs()
    compiled = torch.compile(function, backend=backend)
    for seed in range(3):
        given = []
        for call in (compiled, functools.partial(Loopback().checkpoint, compiled), function):
            seed_generators(seed)
            given.append(torch.autograd.grad(call(x).square().sum(), x)[0])
        assert torch.equal(given[0], given[2])
        assert torch.equal(given[1], given[2])
    assert torch._C._functorch.peek_interpreter_stack() is None
    if function is with_torchs_checkpoint:
        with pytest.raises(NotRemoteError, match="the graph holds tag_activation_checkpoint"):
            Loopback().checkpoint(compiled, x, strict=True)


def test_a_compiled_function_may_take_a_gradient() -> None:
    x = inputs()
    compiled = torch.compile(with_a_gradient, backend=backend)
    for _ in range(3):  # a gradient of a gradient is computed on the trainer, and rounds otherwise
        assert torch.equal(Loopback().checkpoint(compiled, x), with_a_gradient(x))


def test_a_compiled_function_may_run_backward() -> None:
    remote, block = Loopback(), block_like()

    def step_of(x: Tensor) -> Tensor:
        y = remote.checkpoint(block, x)
        y.square().sum().backward()
        return y.detach()

    results: list[list[Tensor | None]] = []
    for run in (step_of, *[torch.compile(step_of, backend=backend)] * 3):
        seed_generators(0)
        torch.manual_seed(1)
        x = inputs()
        block.zero_grad()
        results.append([run(x), x.grad, *(parameter.grad for parameter in block.parameters())])
    for result in results[1:]:
        assert not differing(results[0], result)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.first).sin().cos().tanh().exp(), (x.cos() * self.second).tanh()


@WAYS
def test_hooks_run_in_the_order_of_eager_code(way: Callable[[Loopback], Checkpoint]) -> None:
    module, order = TwoOutputs().to(DEVICE), list[str]()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))

    def hooked(checkpoint: Checkpoint) -> list[str]:
        order.clear()
        outputs = checkpoint(module, torch.ones(4, device=DEVICE, requires_grad=True))
        for number, output in enumerate(outputs):
            output.register_hook(lambda _, number=number: order.append(f"output {number}"))
        sum(output.square().sum() for output in outputs).backward()
        return [*order]

    remote = Loopback()
    checkpoint, expected = way(remote), hooked(plainly)
    assert [hooked(checkpoint) for _ in range(5)] == [expected] * 5
    assert known(remote)
