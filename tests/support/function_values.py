"""Custom autograd functions whose backward reads values of modules, classes and closures. A worker imports it."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support import function_settings
from support.function_state import Doubling

SLOPE = 0.5


def sloped(gradient: Tensor) -> Tensor:
    """What several functions below reach in different ways."""
    return gradient * SLOPE


class Rules:
    """Has a method that backward calls."""

    def apply(self, gradient: Tensor) -> Tensor:
        """Like `sloped`."""
        return gradient * SLOPE


TABLE = {"sloped": sloped}
RULES = Rules()
PARTIAL = functools.partial(sloped)
ARRAY = np.array([0.5])


class ByTable(Doubling):
    """Calls a function in a dict."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return TABLE["sloped"](gradients[0])


class ByObject(Doubling):
    """Calls a method of an object."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return RULES.apply(gradients[0])


class Comparing:
    """Tells objects and classes apart when it is compared, or asked for an attribute that it lacks."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 1


class ByComparing(Doubling):
    """Makes an object and reads its attribute, as backwards of bitsandbytes read those of a state."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * Comparing(SLOPE).slope


class ByPartial(Doubling):
    """Calls a partial."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return PARTIAL(gradients[0])


class ByImport(Doubling):
    """Imports what it reads when it runs."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from support.function_settings import THRESHOLD

        return gradients[0] * THRESHOLD


class ByArray(Doubling):
    """Reads an array of NumPy's."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * float(ARRAY[0])


class ByNested(Doubling):
    """Reads an attribute of an attribute."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * function_settings.SETTINGS.inner.slope


SLOPES = torch.tensor([0.5, 2.0], device="cpu")  # only tensors on the host are compared
PAIR = (torch.tensor([0.5], device="cpu"), "a name")
SPARSE = torch.eye(2, device="cpu").to_sparse()


class Constants:
    """Has a constant that other classes inherit."""

    slope = 0.5


class Inheriting(Constants):
    """Has no constants of its own."""


class ByTensor(Doubling):
    """Reads a tensor of its module."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * SLOPES[0]


class ByTensorOfClass(Doubling):
    """Reads a tensor of its class."""

    slopes = torch.tensor([[0.5, 1.0], [2.0, 4.0]], device="cpu").t()  # not contiguous

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ByTensorOfClass.slopes[0, 0]


class ByTuple(Doubling):
    """Reads a tensor in a tuple of its module."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * PAIR[0][0]


CACHE = {"slopes": torch.tensor([0.5, 2.0], device="cpu")}


class ByCache(Doubling):
    """Reads a tensor in a dict of its module."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * CACHE["slopes"][0]


class ByConstants(Doubling):
    """Makes tensors of numbers in backward."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        device = gradients[0].device
        return gradients[0] * torch.tensor([0.5], device=device) + torch.arange(8.0, device=device)


class ByBase(Doubling):
    """Reads a constant that a class has inherited."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * Inheriting.slope


class BySparse(Doubling):
    """Reads a tensor that has no digest."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * SPARSE.to_dense()[0, 0].to(gradients[0].device)


class CountingForward(torch.autograd.Function):
    """Counts its calls, and multiplies by their number in backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CountingForward.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * CountingForward.calls


def _multiplying(slope: Tensor) -> type[torch.autograd.Function]:
    """Returns a function of its own for each slope, under the same name."""

    class Multiplying(Doubling):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * slope

    return Multiplying


HALVING = _multiplying(torch.full((1,), 0.5))
TRIPLING = _multiplying(torch.full((1,), 3.0))
