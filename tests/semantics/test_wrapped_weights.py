"""Weights that wrap other tensors travel as these, so a worker never sees their class."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import Decision
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.compiled import MARKS, WIDTH, own, user
from support.devices import DEVICE
from support.loopback import Loopback
from support.wrapped_weights import Adapted, Quantised, quantised

pytestmark = MARKS


def recorded(remote: Loopback) -> Checkpoint:
    """Each call is recorded."""
    return functools.partial(remote.checkpoint, graphs="off")


WAYS = pytest.mark.parametrize("way", [recorded, own, user])


def adapted() -> Adapted:
    seed_generators(3)
    return Adapted().to(DEVICE)


def step(checkpoint: Checkpoint, block: Adapted) -> list[Tensor | None]:
    seed_generators(5)
    block.zero_grad()
    x = torch.randn(3, WIDTH, device=DEVICE, requires_grad=True)
    y = checkpoint(block, x * 1)
    y.square().sum().backward()
    return [y.detach(), x.grad, block.down.grad, block.up.grad]


def double_in_place(block: Adapted) -> None:
    weight: Any = block.base.weight
    weight.scale.mul_(2)


def double_data(block: Adapted) -> None:
    weight: Any = block.base.weight
    weight.scale.data = weight.scale.data * 2


def double_replaced(block: Adapted) -> None:
    weight: Any = block.base.weight
    weight.scale = weight.scale * 2


@WAYS
@pytest.mark.parametrize("change", [double_in_place, double_data, double_replaced])
def test_a_frozen_wrapper_travels_as_the_tensors_in_it(
    change: Callable[[Adapted], None], way: Callable[[Loopback], Checkpoint]
) -> None:
    remote, ours, theirs = Loopback(), adapted(), adapted()
    checkpoint = way(remote)
    for number in range(8):
        if number == 5:
            change(ours)
            change(theirs)
        assert not differing(step(plainly, theirs), step(checkpoint, ours)), number
    (segment,) = remote.report().segments
    assert (segment.calls, segment.decisions) == (8, {Decision.GRADIENTS: 8}), remote.report()
    assert segment.known >= (0 if way is recorded else 5)


@WAYS
def test_the_trainer_recomputes_with_the_same_bits(way: Callable[[Loopback], Checkpoint]) -> None:
    remote, block = Loopback(), adapted()
    remote.is_lost = True
    checkpoint = way(remote)
    for _ in range(5):
        assert not differing(step(plainly, block), step(checkpoint, block))


@WAYS
def test_a_wrapper_that_is_passed_may_change_before_backward(way: Callable[[Loopback], Checkpoint]) -> None:
    remote = Loopback()
    run = way(remote)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).tanh()

    for lost in (False, True):
        remote.is_lost = lost
        for _ in range(5):
            weight: Any = quantised(nn.Linear(WIDTH, WIDTH)).weight
            x = torch.randn(3, WIDTH, requires_grad=True)
            expected = torch.autograd.grad(function(x, weight).sum(), x)
            y = run(function, x, weight)
            weight.integers.zero_()
            weight.scale.zero_()
            assert not differing(expected, torch.autograd.grad(y.sum(), x))


def test_another_attribute_is_another_graph() -> None:
    remote, block = Loopback(), adapted()
    checkpoint = user(remote)
    step(checkpoint, block)
    weight: Any = block.base.weight
    weight.note = "other"
    step(checkpoint, block)
    (segment,) = remote.report().segments
    assert segment.compilations == 2


class Residual(Quantised):
    """Adds its input to what `linear` returns, differentiably or not: a variable of the class decides."""

    is_detached = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(function, types, args, kwargs)
        if function is not F.linear:
            return y
        with torch._C.DisableTorchFunctionSubclass():
            return y + (args[0].detach() if cls.is_detached else args[0])


@WAYS
@pytest.mark.parametrize("check", ["values", "outputs"])
def test_another_graph_that_no_value_shows_is_noticed(
    check: str, way: Callable[[Loopback], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, block = Loopback(), adapted()
    weight: Any = block.base.weight
    block.base.weight = nn.Parameter(Residual(weight.integers, weight.scale, "int8"), requires_grad=False)
    checkpoint = functools.partial(way(remote), determinism_check=check)
    for is_detached in (False, False, False, False, True, True, False):
        monkeypatch.setattr(Residual, "is_detached", is_detached)
        assert not differing(step(plainly, block), step(checkpoint, block))
    (segment,) = remote.report().segments
    assert segment.fallbacks == (0 if way is recorded else 2), remote.report()


@WAYS
def test_what_a_class_makes_of_an_op_beneath_autograd_stays(way: Callable[[Loopback], Checkpoint]) -> None:
    # Autograd's node is that of the outer op, whose backward only the class can run.
    remote, block = Loopback(), adapted()

    def function(x: Tensor) -> Tensor:
        return torch.mm(x, block.base.weight)

    x = torch.randn(3, WIDTH, requires_grad=True)
    run = way(remote)
    for _ in range(4):
        assert not differing(torch.autograd.grad(function(x).sum(), x), torch.autograd.grad(run(function, x).sum(), x))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.KEPT: 4}
    assert all("an argument of type Quantised" in reason for reason in segment.kept), segment.kept


def test_an_op_that_is_composed_of_others_travels_as_these(session: Any) -> None:
    scale = torch.rand(WIDTH, 1, requires_grad=True)
    values = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)

    def function(scale: Tensor) -> Tensor:
        return torch.ops.backhaul_tests.scaled(values, scale, torch.float32).sin()

    expected = torch.autograd.grad(function(scale).sum(), scale)
    assert not differing(expected, torch.autograd.grad(session.checkpoint(function, scale).sum(), scale))
    assert session.report().remote == 1, session.report()


def test_a_wrapper_that_takes_gradients_is_named() -> None:
    remote, x = Loopback(), torch.randn(3, WIDTH, requires_grad=True)
    weight = Quantised(torch.ones(WIDTH, WIDTH, dtype=torch.int8), torch.ones(WIDTH, 1), "", requires_grad=True)
    torch.autograd.grad(user(remote)(lambda x: x.sin() + F.linear(x, weight), x).sum(), x)
    (segment,) = remote.report().segments
    assert segment.recorded or segment.kept, remote.report()
    assert segment.known == 0
