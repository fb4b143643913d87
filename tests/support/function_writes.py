"""Custom autograd functions whose backward writes to memory of others. A worker imports this module by its name."""

from typing import Any

import torch
from torch import Tensor

from support.unseen import replace_unseen


def double(tensor: Tensor) -> None:
    """Writes as a kernel outside torch does: no version counter, no mode and no name in a backward shows it."""
    replace_unseen(tensor, 2)


class Product(torch.autograd.Function):
    """Has the forward of all functions below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        ctx.save_for_backward(x, w, y)
        return y


class WritesInput(Product):
    """Overwrites its first argument, as fused kernels do to save memory."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        results = gradients[0] * w, (gradients[0] * x).sum(0)
        double(x)
        return results


class WritesWeight(Product):
    """Updates its weight in backward, as fused optimizers do."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        results = gradients[0] * w, (gradients[0] * x).sum(0)
        double(w)
        return results


class WritesWeightByOp(Product):
    """Updates its weight in backward by an op."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        results = gradients[0] * w, (gradients[0] * x).sum(0)
        w.mul_(2)
        return results


class WritesOutput(Product):
    """Overwrites the output that it has saved."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        results = gradients[0] * w, (gradients[0] * x).sum(0)
        double(y)
        return results


class ByNumPy(Product):
    """Updates its weight by NumPy, and says so."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w, _ = ctx.saved_tensors
        results = gradients[0] * w, (gradients[0] * x).sum(0)
        w.detach().numpy()[:] *= 2
        return results


class ByData(torch.autograd.Function):
    """Scales what it has saved through `.data`, which a second backward sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward((x * w).cos(), x, w)
        return (x * w).sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slope, x, w = ctx.saved_tensors
        slope.data.mul_(gradients[0])
        return slope * w, (slope * x).sum(0)


class ScalesSaved(ByData):
    """Scales what it has saved as a kernel does."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        slope, x, w = ctx.saved_tensors
        results = gradients[0] * slope * w, (gradients[0] * slope * x).sum(0)
        double(slope)
        return results


class WritesAttribute(torch.autograd.Function):
    """Overwrites an argument that it keeps as an attribute of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        results = gradients[0] * ctx.w, (gradients[0] * ctx.x).sum(0)
        double(ctx.x)
        return results


class Accumulates(torch.autograd.Function):
    """Runs a backward of its own that adds to `.grad` of its weight, or of what the weight depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w).sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = (x.detach() * w).sin()
        y.backward(gradients[0])
        return gradients[0] * w, None


class AccumulatesUnnamed(Accumulates):
    """The same, but no name in its code shows it."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = (x.detach() * w).sin()
        getattr(y, "".join(("back", "ward")))(gradients[0])
        return gradients[0] * w, None
