"""Custom functions that workers may run, some of which draw random numbers in backward."""

import random
from typing import Any

import torch
from torch import Tensor


class Quiet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.rand_like(gradients[0])


class DrawsFromPython(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * random.random()


class DrawsAtTimes(torch.autograd.Function):
    """Draws if its gradient is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if bool(gradients[0].abs().max() > 1e3):
            return gradients[0] * torch.rand_like(gradients[0])
        return gradients[0] * 2


class StopsGradients(torch.autograd.Function):
    """Gives its argument no gradient, or zeros if it gets none itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        return None if bool(gradients[0].any()) else gradients[0]
