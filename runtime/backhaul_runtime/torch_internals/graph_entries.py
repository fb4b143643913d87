"""Tensors with a history that is not their own: where a graph begins, and where it leads on to another."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: tuple[Tensor]) -> Tensor:
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("gradients are taken off before they reach an entry")


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, history: Tensor, value: tuple[Tensor]) -> Tensor:  # in a tuple autograd does not follow it
        ctx.set_materialize_grads(False)
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


def with_own_history(value: Tensor, *, is_leaf: bool) -> Tensor:
    """Makes a detached tensor differentiable: a leaf, or as good as the result of an op. Shares its memory."""
    if is_leaf:
        return value.requires_grad_()
    with torch.enable_grad():
        return _Entry.apply(torch.empty(0, requires_grad=True), (value,))  # type: ignore[no-any-return, no-untyped-call]


def with_history_of(value: Tensor, history: Tensor) -> Tensor:
    """The value of one tensor, whose memory it shares, with the history of another."""
    with torch.enable_grad():
        return _Joined.apply(history, (value,))  # type: ignore[no-any-return, no-untyped-call]


def is_history_node(node: Node) -> bool:
    """Whether `with_history_of` made a node."""
    return type(node) is _Joined._backward_cls
