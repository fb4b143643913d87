"""Gradients of gradients, batched gradients, and the transforms of torch.func and forward AD."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from backhaul import NotRemoteError, Session
from support.bits import Checkpoint, grad_of, plainly
from support.calls import (
    SAVES_BY_CUSTOM_FUNCTION,
    WIDTH,
    as_without_checkpointing,
    inputs,
    same,
    seed,
    sines,
    torch_checkpoint,
)


@as_without_checkpointing
def test_double_backward(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, _) = nn.Linear(WIDTH, WIDTH), inputs()
    y = anywhere(lambda x: linear(x).sin().tanh(), x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [gradient.detach(), x.grad, linear.weight.grad]


def test_double_backward_without_a_copy_fetches_the_input_from_the_worker(session: Session) -> None:
    same(
        lambda checkpoint: double_backward(checkpoint, sines),
        partial(session.checkpoint, returns="gradients", durability="none"),
    )


def double_backward(checkpoint: Checkpoint, fn: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    x, _ = inputs()
    (gradient,) = torch.autograd.grad(checkpoint(fn, x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [gradient.detach(), grad_of(x)]


def test_double_backward_of_a_loss_that_is_not_linear(anywhere: Checkpoint) -> None:
    """The output itself is used in the gradient. With gradients two graphs lead from there to the segment's inputs."""

    def case(checkpoint: Checkpoint) -> list[Tensor]:
        linear, (x, _) = nn.Linear(WIDTH, WIDTH), inputs()
        y = checkpoint(lambda x: linear(x).sin().tanh(), x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach(), grad_of(x), grad_of(linear.weight)]

    seed()
    expected = case(plainly)
    seed()
    first, *second = case(anywhere)
    assert torch.equal(first, expected[0])
    # What comes through the output and what comes through the inside are added behind the segment, not within it. So
    # the last bits differ: some 1e-7, relative, in float32.
    for ours, theirs in zip(second, expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_third_derivatives(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, _ = inputs()
        derivatives = [checkpoint(lambda x: x.sin().exp(), x)]
        for _ in range(3):
            derivatives.append(torch.autograd.grad(derivatives[-1].sum(), x, create_graph=True)[0])
        return [tensor.detach() for tensor in derivatives]

    seed()
    expected = case(plainly)
    seed()
    for ours, theirs in zip(case(anywhere), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # see above


def test_double_backward_on_the_trainer_is_what_strict_forbids(session: Session) -> None:
    x, _ = inputs()
    y = session.checkpoint(sines, x, returns="gradients", strict=True)
    with pytest.raises(NotRemoteError, match="create_graph=True needs the graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def dropped(x: Tensor, linear: nn.Module) -> Tensor:
    return nn.functional.dropout(linear(x), 0.5).sin()


@as_without_checkpointing
def test_batched_gradients(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    y = anywhere(dropped, h, linear)
    directions = torch.randn(3, *y.shape)
    return list(torch.autograd.grad(y, [x, *linear.parameters()], directions, is_grads_batched=True))


@pytest.mark.parametrize("name", ["jacobian", "hessian"])
@as_without_checkpointing
def test_vectorized_derivatives(name: str, anywhere: Checkpoint) -> list[Tensor | None]:
    linear = nn.Linear(WIDTH, WIDTH)
    summed = (lambda y: y) if name == "jacobian" else torch.sum
    derive = getattr(torch.autograd.functional, name)
    return [derive(lambda x: summed(anywhere(dropped, x, linear)), torch.randn(WIDTH), vectorize=True)]


@as_without_checkpointing
def test_gradients_batched_by_torch_func(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    y = anywhere(dropped, h, linear)
    directions = torch.randn(3, *y.shape)
    return [torch.func.vmap(lambda d: torch.autograd.grad(y, x, d, retain_graph=True)[0])(directions)]


REVERSE: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jacrev": torch.func.jacrev,
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", REVERSE)
def test_reverse_transforms_are_torchs_error(transform: str, checkpoint: Checkpoint) -> None:
    said = []
    for call in (torch_checkpoint, checkpoint):
        with pytest.raises(RuntimeError) as caught:
            REVERSE[transform](partial(call, torch.sin))(torch.randn(3))
        said.append(str(caught.value))
    assert "saved tensor hooks" in said[1]
    assert said[0] == said[1] or SAVES_BY_CUSTOM_FUNCTION


def dual(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tangent(x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    return tangent


FORWARD: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "vmap": torch.func.vmap,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": torch.func.jacfwd,
    "forward AD": dual,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_transforms_run_fn_plainly(transform: str, checkpoint: Checkpoint, session: Session) -> None:
    x = torch.randn(3)
    expected = FORWARD[transform](sines)(x)
    if not SAVES_BY_CUSTOM_FUNCTION:
        assert torch.equal(FORWARD[transform](lambda x: torch_checkpoint(sines, x))(x), expected)
    assert torch.equal(FORWARD[transform](lambda x: checkpoint(sines, x))(x), expected)
    assert session.report().segments == ()
