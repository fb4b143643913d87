"""Leaves that a function makes, full backward hooks of its modules, and vmap: all seems as in a plain call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Decision
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import WIDTH, inputs
from support.loopback import Loopback

Step = Callable[[Checkpoint], list[Tensor | None]]


def compare(step: Step, loopback: Loopback, returns: str = "auto") -> set[Decision]:
    """Runs a step both ways, and returns how its segments were recomputed. None may have failed."""
    torch.manual_seed(1)
    expected = step(plainly)
    torch.manual_seed(1)
    assert differing(step(partial(loopback.checkpoint, returns=returns)), expected) == []
    report = loopback.report()
    assert report.fallbacks == 0
    return {decision for segment in report.segments for decision in segment.decisions}


def gradients(module: nn.Module, *tensors: Tensor) -> list[Tensor | None]:
    return [*(tensor.grad for tensor in tensors), *(parameter.grad for parameter in module.parameters())]


def test_a_leaf_that_outlives_the_call_gets_its_gradient(loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        kept: list[Tensor] = []

        def fn(h: Tensor) -> Tensor:
            kept.append(torch.ones(WIDTH, requires_grad=True))
            return (linear(h) * kept[0]).tanh() * h

        checkpoint(fn, h).sum().backward()
        return gradients(linear, x, kept[0])

    assert compare(step, loopback, "gradients") == {Decision.ACTIVATIONS}


@pytest.mark.parametrize("holder", ["view", "node", "hook"])
def test_a_leaf_that_something_else_refers_to_gets_its_gradient(holder: str, loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        kept: list[Any] = []
        seen: list[Tensor] = []

        def fn(h: Tensor) -> Tensor:
            leaf = torch.ones(WIDTH, requires_grad=True)
            y = (linear(h) * leaf).tanh() * h
            if holder == "view":
                kept.append(leaf.view(2, -1))
            elif holder == "node":
                kept.append(y.grad_fn)
            else:
                leaf.register_hook(seen.append)
            return y

        checkpoint(fn, h).sum().backward()
        return [*gradients(linear, x), *seen, *(view._base.grad for view in kept if holder == "view")]

    assert compare(step, loopback, "gradients") == {Decision.ACTIVATIONS}


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_uses_before_and_after_a_tensor_becomes_a_leaf(returns: str, loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            scale = torch.full((2, WIDTH), 2.0)
            before, row = linear(h) + scale, scale[0]
            scale.requires_grad_()
            with torch.no_grad():
                scale.mul_(1.5)
            return before.tanh() * row + (linear(h * scale).tanh() * scale) * scale[1]

        checkpoint(fn, h).sum().backward()
        return gradients(linear, x)

    assert compare(step, loopback, returns) == {Decision(returns)}


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_leaf_alone_makes_later_results_differentiable(returns: str, loopback: Loopback) -> None:
    """Nothing else that the function multiplies takes gradients, so only the leaf makes autograd save anything."""

    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            probe = h.detach().requires_grad_()
            return (probe.exp() * 2).sigmoid() + linear(h).tanh()

        checkpoint(fn, h).sum().backward()
        return gradients(linear, x)

    assert compare(step, loopback, returns) == {Decision(returns)}


def test_a_leaf_that_is_returned(loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> tuple[Tensor, Tensor]:
            leaf = torch.ones(WIDTH, requires_grad=True)
            return (linear(h) * leaf).tanh(), leaf

        y, leaf = checkpoint(fn, h)
        (y.sum() + (leaf * 3).sum()).backward()
        return gradients(linear, x, leaf)

    assert compare(step, loopback, "gradients") == {Decision.ACTIVATIONS}


def test_an_argument_that_becomes_a_leaf_stays_on_the_trainer(loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)

        def fn(x: Tensor) -> Tensor:
            before = linear(x).tanh()
            return before * x.requires_grad_().exp()

        checkpoint(fn, x).sum().backward()
        return gradients(linear, x)

    assert compare(step, loopback) <= {Decision.KEPT, Decision.TRAINER}


def test_a_gradient_penalty_by_listed_ops(loopback: Loopback) -> None:
    """The backward inside runs ops that a program may hold. What it computes is a constant of the function."""

    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            probe = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad((probe * probe.detach() * 3).sum(), probe)
            return linear(h + slope).tanh()

        checkpoint(fn, h).sum().backward()
        return gradients(linear, x)

    compare(step, loopback)


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_hooks_of_modules_see_what_they_see_in_a_plain_call(returns: str, loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model, (x, h) = nn.Sequential(first, nn.Tanh(), second, nn.Tanh()), inputs()
        seen: list[Tensor] = []

        def look(module: nn.Module, given: Any, made: Any) -> Any:
            seen.extend([*given, *made])
            return (given[0] * 0.5,)

        def look_before(module: nn.Module, made: Any) -> None:
            seen.append(made[0])

        second.register_full_backward_hook(look)
        first.register_full_backward_pre_hook(look_before)
        checkpoint(model, h).square().sum().backward()
        assert len(seen) == 3  # each hook was called once
        return [*gradients(model, x), *seen]

    assert compare(step, loopback, returns) == {Decision.ACTIVATIONS}


def test_a_hooked_module_without_gradients_inside(loopback: Loopback) -> None:
    """Hooks pass by what takes no gradients, and the input of the module is used without gradients first."""

    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor, scale: Tensor) -> Tensor:
                with torch.no_grad():
                    largest = x.abs().amax()
                return (self.linear(x / largest) * scale).tanh() * x.detach()

        scaled, (x, h) = Scaled(), inputs()
        seen: list[Tensor | None] = []
        scaled.register_full_backward_hook(lambda module, given, made: seen.extend([*given, *made]))
        checkpoint(lambda h: scaled(h.tanh(), torch.full((WIDTH,), 2.0)).exp(), h).sum().backward()
        return [*gradients(scaled, x), *seen]

    assert compare(step, loopback) == {Decision.ACTIVATIONS}


def test_a_gradient_scaled_by_a_function_of_the_users_own_is_kept(loopback: Loopback) -> None:
    """It passes its input on as module hooks do, but nobody knows what it does backward."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 0.5

    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        checkpoint(lambda h: linear(Halved.apply(h.tanh())).tanh(), h).sum().backward()
        assert grad_of(x).abs().sum() > 0
        return gradients(linear, x)

    assert Decision.KEPT in compare(step, loopback)


def test_an_exception_inside_a_vmap_leaves_the_recorder_as_it_was(loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            with pytest.raises(RuntimeError):
                torch.vmap(lambda row: row @ torch.ones(3))(h)
            return torch.vmap(lambda row: linear(row).tanh())(h) * torch.vmap(torch.sin, in_dims=1, out_dims=1)(h)

        checkpoint(fn, h).sum().backward()
        return gradients(linear, x)

    assert compare(step, loopback, "gradients") == {Decision.GRADIENTS}


def test_a_vmap_with_a_write_and_a_value_read_from_outside(loopback: Loopback) -> None:
    def step(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        counts, weight = torch.zeros(2, WIDTH), torch.rand(2, WIDTH, requires_grad=True)

        def fn(h: Tensor) -> Tensor:
            def row(x: Tensor, count: Tensor, weight: Tensor) -> Tensor:
                count.add_(x.detach())
                return linear(x * weight).tanh() * count.clone()

            return torch.vmap(row)(h, counts, weight)

        checkpoint(fn, h).sum().backward()
        return [*gradients(linear, x, weight), counts]

    assert compare(step, loopback) <= {Decision.GRADIENTS, Decision.ACTIVATIONS}
