"""Compiled segments are recorded once, have eager's bits, and never run a program of another call."""

import functools
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backhaul import Session
from backhaul._backend import backend
from backhaul._forward import captured_graph
from backhaul._forward.graphs import NO_GRAPH
from support.bits import Checkpoint, differing, plainly
from support.compiled import MARKS, SCALES, WAYS, WIDTH, Block, block_like, inputs, known, own, reported, step, user
from support.devices import DEVICE
from support.loopback import Loopback

pytestmark = MARKS


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


@WAYS
def test_the_report_has_each_compilation_and_the_guard_that_failed(way: Callable[[Loopback], Checkpoint]) -> None:
    remote, x, block = Loopback(), inputs(), Block().to(DEVICE)
    checkpoint = way(remote)
    step(checkpoint, block, x)
    assert (reported(remote).compilations, reported(remote).recompiled) == (1, {})
    block.scale = 0.25
    step(checkpoint, block, x)
    step(checkpoint, block, x)
    report = reported(remote)
    assert report.compilations == 2
    assert report.compile_s > 0
    ((guard, times),) = report.recompiled.items()
    assert "scale == 0.5 (" in guard
    assert "support/compiled.py:" in guard
    assert times == 1
    assert f"1 compiled again: {guard}" in str(remote.report())


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_other_inputs_run_another_program(kind: str) -> None:
    remote = Loopback()
    checkpoint, block = own(remote), block_like()
    for x in (inputs(), INPUTS[kind](), inputs(), INPUTS[kind](), INPUTS[kind]()):
        block.to(x.dtype)
        assert not differing(step(plainly, block, x), step(checkpoint, block, x))
    assert known(remote)


RECORDED: dict[str, tuple[Callable[..., Any], str]] = {
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


def test_a_module_of_torchs_own_has_its_name() -> None:
    remote, module = Loopback(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(DEVICE)
    remote.checkpoint(torch.compile(module, backend=backend), inputs()).sum().backward()
    assert [segment.name for segment in remote.report().segments] == ["Sequential"]


@pytest.mark.parametrize("options", [{"kernels": "triton"}, {"fast": True}])
def test_an_unknown_option_of_the_backend_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="the only option is"):
        torch.compile(block_like(), backend=backend, options=options)(inputs())


def test_an_unknown_choice_of_graphs_is_an_error() -> None:
    with pytest.raises(ValueError, match="'fast' is not one of 'auto', 'eager', 'inductor', 'off'"):
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


@pytest.mark.slow
def test_off_records_each_call() -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    compiled = torch.compile(block, backend=backend)
    for _ in range(2):
        given = step(functools.partial(remote.checkpoint, graphs="off"), compiled, x)
        assert not differing(step(plainly, block, x), given)
    assert not known(remote)
    assert len(remote.recordings) == 4


def test_a_backward_that_is_differentiated_itself_is_that_of_a_recorded_segment() -> None:
    remote, x = Loopback(), inputs()
    function = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(DEVICE)
    results = []
    for checkpoint in (remote.checkpoint, own(remote), own(remote)):
        (first,) = torch.autograd.grad(checkpoint(function, x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *function.parameters()]))
    assert not differing(list(results[0]), list(results[1]))
    assert not differing(list(results[0]), list(results[2]))


@pytest.mark.slow
def test_only_so_many_kinds_of_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graph, "MAX_KINDS", 2)
    remote, block = Loopback(), block_like()
    for size in (1, 2, 3, 3, 1):
        x = inputs(size + 1, 3, WIDTH)
        assert not differing(step(plainly, block, x), step(own(remote), block, x))
    assert any("have changed 2 times" in reason for reason in reported(remote).recorded)
