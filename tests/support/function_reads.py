"""Custom autograd functions whose backward finds a number in many places. A worker imports this module by its name."""

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SLOPE = 0.5
MIXED: dict[str, Any] = {"slope": 0.5, "seen": []}
LONG = [0.5] * 2_000
DEEP = {"a": {"b": {"c": {"d": {"slope": 0.5}}}}}
PAIR = (1.0, {"slope": 0.5})
QUEUE = deque([0.5])
ARRAYS = {"slopes": np.array([0.5])}
LOCAL = threading.local()
LOCAL.slope = 0.5
OBJECTS = np.array([0.5, None], dtype=object)
SPARSE = {"slopes": torch.tensor([0.5], device="cpu").to_sparse()}
BASE = torch.full((8,), 0.5, device="cpu")
PART, WHOLE = BASE[:2], {"slopes": BASE}
KEPT = {"slopes": torch.full((1,), 0.5)}


class Number(float):
    """A float of a class of its own."""


NUMBER = Number(0.5)


@dataclass(slots=True)
class InSlots:
    """Has no dict of attributes."""

    slope: float = 0.5

    def times(self, gradient: Tensor) -> Tensor:
        """What is called as a bound method."""
        return gradient * self.slope


SLOTTED, LISTED = InSlots(), [InSlots()]
METHOD = InSlots().times


class Meta(type):
    """Has what its classes read."""

    slope = 0.5


class OfMeta(metaclass=Meta):
    """Has no attributes of its own."""


class Cached:
    """Takes its slope from the module when somebody reads it first."""

    @functools.cached_property
    def slope(self) -> float:
        """The number of the module."""
        return SLOPE


def by_default(gradient: Tensor, options: dict[str, float] = {"slope": 0.5}) -> Tensor:  # noqa: B006  tests change it
    """Reads a default."""
    return gradient * options["slope"]


def by_code(gradient: Tensor) -> Tensor:
    """Gets the code of `other_code`, as a notebook does when it loads a module again."""
    return gradient * 0.5


def other_code(gradient: Tensor) -> Tensor:
    """Has another number in its code."""
    return gradient * 0.125


def by_attribute(gradient: Tensor) -> Tensor:
    """Reads an attribute of a function."""
    return gradient * by_attribute.slope  # type: ignore[attr-defined]


by_attribute.slope = 0.5  # type: ignore[attr-defined]


def sloped(gradient: Tensor) -> Tensor:
    """What a list holds beside other things."""
    return gradient * SLOPE


HOOKS: list[Any] = [sloped, None]


class Inner(torch.autograd.Function):
    """Is called through another name for its `apply`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * SLOPE


inner = Inner.apply


class Doubling(torch.autograd.Function):
    """Has the forward of all functions here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def _reading(name: str, read: Callable[[Tensor], Any]) -> type[Doubling]:
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return read(gradients[0])

    return type(name, (Doubling,), {"backward": staticmethod(backward), "__module__": __name__, "__qualname__": name})


ByMixed = _reading("ByMixed", lambda g: g * MIXED["slope"])
ByLong = _reading("ByLong", lambda g: g * LONG[0])
ByDeep = _reading("ByDeep", lambda g: g * DEEP["a"]["b"]["c"]["d"]["slope"])
ByDictInTuple = _reading("ByDictInTuple", lambda g: g * PAIR[1]["slope"])
ByQueue = _reading("ByQueue", lambda g: g * QUEUE[0])
ByArrays = _reading("ByArrays", lambda g: g * float(ARRAYS["slopes"][0]))
ByNumber = _reading("ByNumber", lambda g: g * NUMBER)
BySlots = _reading("BySlots", lambda g: g * SLOTTED.slope)
ByListed = _reading("ByListed", lambda g: g * LISTED[0].slope)
ByMethod = _reading("ByMethod", METHOD)
ByMeta = _reading("ByMeta", lambda g: g * OfMeta.slope)
ByCached = _reading("ByCached", lambda g: g * Cached().slope)
ByDefault = _reading("ByDefault", by_default)
ByCode = _reading("ByCode", by_code)
ByAttribute = _reading("ByAttribute", by_attribute)
ByHooks = _reading("ByHooks", HOOKS[0])
ByAlias = _reading("ByAlias", inner)
ByText = _reading("ByText", lambda g: g * globals()["SLOPE"])
ByLocal = _reading("ByLocal", lambda g: g * LOCAL.slope)
ByObjects = _reading("ByObjects", lambda g: g * OBJECTS[0])
BySparseInDict = _reading("BySparseInDict", lambda g: g * SPARSE["slopes"].to_dense().to(g.device))
BeyondPart = _reading("BeyondPart", lambda g: g * PART[0] * WHOLE["slopes"][4])


class Keeping(torch.autograd.Function):
    """Keeps a tensor of its module, and writes to it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slopes = KEPT["slopes"]
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.slopes.mul_(2)
        return gradients[0] * ctx.slopes


class Saving(Doubling):
    """Saves a tensor of its module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(KEPT["slopes"])
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0]
