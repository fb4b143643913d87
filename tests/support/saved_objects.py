"""Custom functions whose backward asks for more than the bytes of what it saved."""

from builtins import type as kind
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter as P  # noqa: N817  another name

ANSWERS: list[Any] = []
WEIGHTS: list[Tensor] = []


class Asking(torch.autograd.Function):
    """Saves both arguments and a view. A subclass answers a question in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, view: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, view)
        ctx.calls = 0
        return x @ weight.t() @ view


def products(gradient: Tensor, x: Tensor, weight: Tensor, view: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner = gradient @ view.t()
    return inner @ weight, inner.t() @ x, (x @ weight.t()).t() @ gradient


class AsksForClass(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([isinstance(one, nn.Parameter) for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksForType(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([type(one).__name__ for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksForIdentity(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append(weight is WEIGHTS[0])
        return products(gradient, x, weight, view)


class AddsToMainGrad(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        gradients = products(gradient, x, weight, view)
        ANSWERS.append(hasattr(weight, "main_grad"))
        if hasattr(weight, "main_grad"):
            weight.main_grad += gradients[1]
            return gradients[0], None, gradients[2]
        return gradients


class AsksForLeaves(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([(one.is_leaf, one.requires_grad, one.grad_fn is None) for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksForVersions(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([one._version for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksForStorage(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([(one.storage_offset(), one.untyped_storage().nbytes()) for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksForBase(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([one._base is None for one in (x, weight, view)])
        return products(gradient, x, weight, view)


class AsksByText(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, view = ctx.saved_tensors
        ANSWERS.append([getattr(one, "is_leaf") for one in (x, weight, view)])  # noqa: B009  a name as a text
        return products(gradient, x, weight, view)


class AsksInAnotherFunction(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append(leaves(*ctx.saved_tensors))
        return products(gradient, *ctx.saved_tensors)


def leaves(*tensors: Tensor) -> list[bool]:
    return [one.is_leaf for one in tensors]


class AsksForAnomalyMode(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append(torch.is_anomaly_enabled())
        return products(gradient, *ctx.saved_tensors)


class CountsOnItsContext(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.calls = ctx.calls + 1
        ANSWERS.append(ctx.calls)
        first, second, third = products(gradient, *ctx.saved_tensors)
        return first * ctx.calls, second * ctx.calls, third


NAME = "main_grad"
BUFFERS: dict[Tensor, Tensor] = {}


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


class AddsToGradInAHelper(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients = products(gradient, *ctx.saved_tensors)
        accumulate(ctx.saved_tensors[1], gradients[1])
        ANSWERS.append("added")
        return gradients[0], None, gradients[2]


class AsksByAConstant(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients = products(gradient, *ctx.saved_tensors)
        has = hasattr(ctx.saved_tensors[1], NAME)
        ANSWERS.append(has)
        if has:
            getattr(ctx.saved_tensors[1], NAME).add_(gradients[1])
        return gradients[0], None if has else gradients[1], gradients[2]


class AsksForAnAlias(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append([isinstance(one, P) for one in ctx.saved_tensors])
        return products(gradient, *ctx.saved_tensors)


class AsksForATypeByAnotherName(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append([kind(one).__name__ for one in ctx.saved_tensors])
        return products(gradient, *ctx.saved_tensors)


class AsksForText(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append([repr(one)[:5] for one in ctx.saved_tensors])
        return products(gradient, *ctx.saved_tensors)


class LooksInATable(Asking):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = ctx.saved_tensors[1]
        ANSWERS.append(weight in BUFFERS)
        return products(gradient, *ctx.saved_tensors)


class AsksForTheClassInForward(Asking):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, view: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, view)
        ctx.is_parameter = isinstance(weight, P)
        return x @ weight.t() @ view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ANSWERS.append(ctx.is_parameter)
        return products(gradient, *ctx.saved_tensors)


class AppendsToItsContext(torch.autograd.Function):
    """Changes its context in a way that its code does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.calls = []
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.calls.append(1)
        gradient = gradient * len(ctx.calls)
        return gradient @ weight.t(), x.t() @ gradient


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).exp()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        inner = gradient * y
        return inner @ weight.t(), x.t() @ inner


class Plain(torch.autograd.Function):
    """Asks for nothing but bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), None if x is None else x.t() @ gradient


QUESTIONS = sorted(name for name, value in globals().items() if isinstance(value, type) and issubclass(value, Asking))
QUESTIONS.remove("Asking")
