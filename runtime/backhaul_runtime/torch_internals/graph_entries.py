"""Gives tensors a history in autograd's graph: a new one, where a graph begins, or that of another tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.errors import ReplayError


def added_to_gradient() -> ReplayError:
    """Returns the error for a custom function that adds to gradients of others, which no replay can repeat.

    Its field `adds_to_gradients` is True.
    """
    return ReplayError(
        "the backward of a custom function has run a backward of its own that adds to .grad of a tensor, or to what "
        "the tensor depends on, which are not the trainer's tensors here: start the worker without allowing it",
        adds_to_gradients=True,
    )


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: tuple[Tensor]) -> Tensor:
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # A hook collects the gradients of the replay's own backward before they arrive here.
        raise added_to_gradient()


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: Tensor, value: tuple[Tensor]) -> Tensor:
        # `value` comes in a tuple, because autograd does not track tensors in one.
        ctx.set_materialize_grads(False)
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


class _Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None


def without_gradient(value: Tensor) -> Tensor:
    """Returns a scalar whose backward runs that of `value` with an undefined gradient."""
    with torch.enable_grad():
        return _Undefined.apply(value)  # type: ignore[no-any-return, no-untyped-call]


def with_own_history(value: Tensor, *, is_leaf: bool) -> Tensor:
    """Makes a detached tensor differentiable.

    Args:
        value: The detached tensor. The result shares its memory.
        is_leaf: Whether the result is a leaf, which is `value` itself; otherwise it has a node, as an op's result has.
    """
    if is_leaf:
        return value.requires_grad_()
    with torch.enable_grad():
        return _Entry.apply(torch.empty(0, requires_grad=True), (value,))  # type: ignore[no-any-return, no-untyped-call]


def with_history_of(value: Tensor, history: Tensor) -> Tensor:
    """Returns a tensor with the memory of `value` and the history of `history`, to which it passes its gradient on."""
    with torch.enable_grad():
        return _Joined.apply(history, (value,))  # type: ignore[no-any-return, no-untyped-call]


def is_history_node(node: Node) -> bool:
    """Whether a node was made by `with_history_of`."""
    return type(node) is _Joined._backward_cls
