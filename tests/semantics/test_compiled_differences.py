"""Where torch.compile runs something else than the function, or sees less than it does, the function counts."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import NotRemoteError
from backhaul._backend import backend
from backhaul._forward import captured_graph, graphs
from backhaul._forward.captured_graph import OTHER_OPS
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.compiled import MARKS, WAYS, WIDTH, block_like, inputs, known, own, reported, step, user
from support.devices import DEVICE
from support.loopback import Loopback

pytestmark = MARKS


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


@pytest.mark.slow
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


@pytest.mark.slow
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
