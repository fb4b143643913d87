"""Writes inside a segment that autograd does not see, to memory that autograd has saved."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import backhaul
from conftest import RETURNS
from support.devices import DEVICE, IS_SIMULATED

WRITES: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda y: y.data.mul_(2),
    "clamp": lambda y: y.data.clamp_(-0.5, 0.5),
    "a view of .data": lambda y: y.data[1:].zero_(),
    "values of .data": lambda y: y.data.masked_fill_(y.data < 1, 0),
    ".data as integers": lambda y: y.data.view(torch.int32).bitwise_and_(-65536),
    "set_": lambda y: torch.empty(0, device=y.device).set_(y.untyped_storage(), 0, (24,), (1,)).mul_(2),
    "the .data of another tensor": lambda y: with_data(torch.empty(0, device=y.device), y.data).mul_(2),
}
OUTSIDE_OF_OPS: dict[str, Callable[[Tensor], object]] = {
    "NumPy": lambda y: np.multiply(y.detach().numpy(), 2, out=y.detach().numpy()),
    "DLPack": lambda y: torch.utils.dlpack.from_dlpack(y.detach()).mul_(3),
    "storage": lambda y: y.untyped_storage().copy_(torch.ones_like(y).untyped_storage()),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "returned": lambda y: y,
    "used by an op that saves nothing": lambda y: y + 1,
    "saved again": lambda y: y * y,
}


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    tensor.data = data
    return tensor


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x.data.mul_(2)
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


def gradients(function: Callable[[Tensor, Tensor], Tensor], checkpoint: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = (torch.randn(4, 6).to(DEVICE).requires_grad_() for _ in range(2))
    checkpoint(function, x, weight).square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


def plainly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def assert_equal_to_plain(
    session: backhaul.Session, returns: str, function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    expected = gradients(function, plainly)
    for _ in range(2):  # the second call is predicted
        computed = gradients(function, lambda *call: session.checkpoint(*call, returns=returns))
        assert all(map(torch.equal, computed, expected))


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("write", WRITES)
def test_backward_reads_what_an_op_has_written_through_data(
    session: backhaul.Session, write: str, use: str, returns: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp()
        WRITES[write](y)
        return USES[use](y)

    assert_equal_to_plain(session, returns, function)


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("write", WRITES)
def test_backward_reads_what_is_written_after_a_refusal_to_what_was_saved_before_and_after(
    session: backhaul.Session, write: str, returns: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        before = (x * weight).exp()
        Doubling.apply(torch.ones(1))  # refused
        after = before.sigmoid()
        WRITES[write](before)
        WRITES[write](after)
        return before + after

    assert_equal_to_plain(session, returns, function)


@pytest.mark.parametrize("returns", RETURNS)
def test_backward_reads_what_an_op_has_written_to_a_part_of_complex_data(
    session: backhaul.Session, returns: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.complex(x, weight)
        z = y * y
        y.data.real.mul_(2)
        return z.abs()

    assert_equal_to_plain(session, returns, function)


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("write", OUTSIDE_OF_OPS)
@pytest.mark.skipif(DEVICE != "cpu", reason="the host does not compare what is on an accelerator")
def test_backward_reads_what_something_else_has_written_to_an_output(
    session: backhaul.Session, write: str, returns: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp()
        OUTSIDE_OF_OPS[write](y)
        return y

    assert_equal_to_plain(session, returns, function)


@pytest.mark.parametrize("returns", RETURNS)
def test_backward_reads_what_a_refused_function_has_written_to_what_was_saved_before(
    session: backhaul.Session, returns: str
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return Doubling.apply((x * weight).exp())

    assert_equal_to_plain(session, returns, function)


def test_a_write_to_a_detached_tensor_after_a_refusal_is_an_error_as_without_checkpointing(
    session: backhaul.Session,
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp()
        Doubling.apply(torch.ones(1))  # refused
        y.detach().mul_(2)
        return y + 1

    for checkpoint in (plainly, session.checkpoint):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(function, checkpoint)


def test_backward_reads_what_an_op_has_written_in_an_inference_mode(session: backhaul.Session) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp_()
        with torch.inference_mode():
            y.data.mul_(2)
        return y + 1

    assert_equal_to_plain(session, "gradients", function)


@pytest.mark.parametrize("returns", RETURNS)
def test_backward_reads_what_an_op_has_read_from_outside(session: backhaul.Session, returns: str) -> None:
    def function(x: Tensor, argument: Tensor, state: Tensor) -> Tensor:
        y = x * argument * state
        argument.data.mul_(2)
        state.data.mul_(2)
        return y

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    argument, state = (torch.full((3,), value, device=DEVICE) for value in (3.0, 5.0))
    y = session.checkpoint(partial(function, state=state), x, argument, returns=returns)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 15.0, device=DEVICE))


def test_a_visible_write_after_an_unseen_one_is_an_error_as_without_checkpointing(session: backhaul.Session) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * weight).exp()
        y.data.mul_(2)
        y.detach().mul_(2)
        return y + 1

    for checkpoint in (plainly, session.checkpoint):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(function, checkpoint)


def test_a_visible_write_to_an_output_is_an_error_as_without_checkpointing(session: backhaul.Session) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight).exp().mul_(2)

    for checkpoint in (plainly, partial(session.checkpoint, returns="gradients")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(function, checkpoint)


@pytest.mark.skipif(IS_SIMULATED, reason="DLPack asks for a stream's pointer, which a simulated one lacks")
def test_what_nothing_shows_goes_unnoticed(session: backhaul.Session) -> None:
    """The gradient is that of the value before the write."""

    def function(x: Tensor, weight: Tensor, write: Callable[[Tensor], object]) -> Tensor:
        y = (x * weight).exp()
        write(y)
        return y.detach() + (y - y.detach())  # the value after the write, and the gradient of `y`

    def unseen(y: Tensor) -> None:
        torch.utils.dlpack.from_dlpack(y.detach()).mul_(2)

    torch.manual_seed(0)
    x, weight = (torch.randn(4, 6).to(DEVICE).requires_grad_() for _ in range(2))
    (gradient,) = torch.autograd.grad(session.checkpoint(function, x, weight, unseen).sum(), x)
    (before,) = torch.autograd.grad((x * weight).exp().sum(), x)
    assert torch.equal(gradient, before)


@pytest.mark.skipif(IS_SIMULATED, reason="the simulated device has no sparse kernels")
def test_tensors_without_a_storage_are_not_looked_at(
    session: backhaul.Session, caplog: pytest.LogCaptureFixture
) -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        sparse = torch.eye(4, device=DEVICE).to_sparse()
        return (x * weight).exp(), sparse.mul_(2)

    x, weight = (torch.randn(4, 6).to(DEVICE).requires_grad_() for _ in range(2))
    with caplog.at_level(logging.ERROR, "backhaul"):
        session.checkpoint(function, x, weight)[0].sum().backward()
    assert caplog.records == []


def test_dispatch_modes_do_not_see_the_comparison_of_outputs(session: backhaul.Session) -> None:
    class Seeing(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, op: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(op))
            return op(*args, **(kwargs or {}))

    def ops_of(checkpoint: Callable[..., Tensor]) -> list[str]:
        x = torch.randn(4, 6, device=DEVICE, requires_grad=True)
        with Seeing() as seeing:
            checkpoint(lambda x: (x * 2).exp(), x)
        return seeing.ops

    assert "aten.as_strided.default" not in ops_of(session.checkpoint)
