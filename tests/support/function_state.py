"""Custom autograd functions whose backward depends on more than tensors. A worker imports this module by its name."""

import functools
import itertools
import math
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.devices import DEVICE
from support.unseen import replace_unseen


class Doubling(torch.autograd.Function):
    """Has the same forward as all functions below whose forward does not matter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


class Keeping(torch.autograd.Function):
    """Keeps an object that a test chooses, and multiplies by the number in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kept = MAKERS[kind](next(NUMBERS))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * _number_in(ctx.kept), None


class OnDefaultDevice(Doubling):
    """Multiplies by a number that depends on the default device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2.0 if torch.ones(1).is_meta else 3.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor


class InSlots:
    """Has no dict of attributes."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number

    def times(self) -> float:
        """The number."""
        return self.number


class Named(list[float]):
    """A list with an attribute."""

    def __init__(self, number: float) -> None:
        self.number = number


class Number(float):
    """A float of a class of its own."""


NUMBERS = (1 / number for number in itertools.count(2))
"""A number for each run, none of them twice."""

MAKERS: dict[str, Callable[[float], Any]] = {
    "array": lambda number: np.array([number]),
    "numpy number": np.float64,
    "number of a class of its own": Number,
    "set": lambda number: {number},
    "slots": InSlots,
    "closure": lambda number: lambda: number,
    "partial": lambda number: functools.partial(float, number),
    "method": lambda number: InSlots(number).times,
    "range": lambda number: range(int(number * 1e9)),
    "ordered dict": lambda number: OrderedDict(number=number),
    "deque": lambda number: deque([number]),
    "attribute of a list": Named,
    "generator": lambda number: torch.Generator().manual_seed(int(number * 1e9)),
}
"""Objects with a number inside, by what they are."""


def _number_in(kept: Any) -> float:
    if isinstance(kept, OrderedDict):
        kept = kept["number"]
    if isinstance(kept, torch.Generator):
        kept = kept.get_state().double().sum()
    if isinstance(kept, (set, np.ndarray, deque)):
        return float(next(iter(kept)))
    if isinstance(kept, (InSlots, Named)):
        return kept.number
    if isinstance(kept, range):
        return len(kept) / 1e9
    return float(kept()) if callable(kept) else float(kept)


CONSTANT: dict[str, Callable[[], Any]] = {
    "ellipsis": lambda: ...,
    "not implemented": lambda: NotImplemented,
    "set with None": lambda: {None, 1},
    "function of a module": lambda: math.sqrt,
    "generator with a seed": lambda: torch.Generator().manual_seed(1),
}
"""Objects that are equal in each run, by what they are."""

INCOMPARABLE: dict[str, Callable[[], Any]] = {
    "an array of objects": lambda: np.array([InSlots(1.0)]),
    "a set of objects": lambda: {InSlots(1.0)},
}
"""Objects whose contents have no bytes or no order, by the words for them."""


class Holding(torch.autograd.Function):
    """Keeps an object that a test chooses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kept = (CONSTANT | INCOMPARABLE)[kind]()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, None


TOTAL = torch.zeros((), device="cpu")
"""Written to in backward."""


class Noting(Doubling):
    """Adds up gradients in a tensor of its module."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        TOTAL.add_(gradients[0].sum().cpu())
        return gradients[0] * 2


class NoisyInFork(Doubling):
    """Draws in backward and leaves the generator as it was."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]):
            return gradients[0] * 2 + torch.randn_like(gradients[0])


class WritingOwn(torch.autograd.Function):
    """Has its gradient ready in forward and scales it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.ready = x * 2
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.ready.mul_(gradients[0])


class BetweenRows(torch.autograd.Function):
    """Saves rows with gaps between them, and reads in backward what lies there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = torch.cat([x, x.cos(), x], 1)[:, : x.shape[1]]
        ctx.save_for_backward(rows)
        return rows * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        between = rows.as_strided((len(rows) - 1, rows.shape[1]), rows.stride(), rows.shape[1])
        return torch.cat([gradients[0][:1], gradients[0][1:] * between])


class ChangingContext(torch.autograd.Function):
    """Multiplies by a number on its context, and changes that so that neither versions nor equality show it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind, ctx.kept = kind, CHANGED[kind][0]()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * CHANGED[ctx.kind][1](ctx.kept), None


def _ones(size: int) -> Tensor:
    return torch.ones(size, device=DEVICE)


def _sign_then_negated(kept: list[float]) -> float:
    sign = math.copysign(1.0, kept[0])
    kept[0] = -kept[0]
    return sign


def _then_increased(kept: Any) -> float:
    while isinstance(kept[0], list):
        kept = kept[0]
    number = float(kept[0])
    if isinstance(kept, Tensor):
        replace_unseen(kept[:1], 1, 1)
    else:
        kept[0] += 1
    return number


def _attribute_increased(kept: Any) -> float:
    kept.number += 1.0
    return float(kept.number)


def _gradient_then_set(kept: Tensor) -> float:
    name = "".join(("gr", "ad"))
    number = 1.0 if getattr(kept, name) is None else 2.0
    setattr(kept, name, _ones(1))
    return number


def _gap_increased(kept: Tensor) -> float:
    between = getattr(kept, "_".join(("as", "strided")))((1,), (1,), 1)
    between += 1
    return float(between)


def _memory_behind_increased(kept: Tensor) -> float:
    behind = getattr(kept, "_".join(("as", "strided")))((1,), (1,), 3)
    behind += 1
    return float(behind)


def _lock_taken(kept: Any) -> float:
    return 1.0 if kept.acquire(blocking=False) else 2.0


def _end_of_base_increased(kept: np.ndarray) -> float:
    assert kept.base is not None
    kept.base[-1] += 1
    return float(kept.base[-1])


def _made_read_only(kept: np.ndarray) -> float:
    number = 1.0 if kept.flags.writeable else 2.0
    kept.setflags(write=False)
    return number


def _with_attribute(tensor: Any) -> Any:
    tensor.number = 1.0
    return tensor


def _with_globals() -> Any:
    def count() -> float:
        global NUMBER
        NUMBER += 1  # type: ignore[name-defined]
        return NUMBER  # type: ignore[name-defined]

    return FunctionType(count.__code__, {"NUMBER": 1.0})


def _class() -> Any:
    class Made:
        number = 1.0

    return Made


def _module() -> Any:
    return _with_attribute(ModuleType("made"))


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "sign of a zero": (lambda: [0.0], _sign_then_negated),
    "array": (lambda: np.ones(1), _then_increased),
    "bytes": (lambda: bytearray([1]), _then_increased),
    "deep": (lambda: [[[[[[[[1.0]]]]]]]], _then_increased),
    "tensor, unseen by torch": (lambda: _ones(1), _then_increased),
    "attribute of a tensor": (lambda: _with_attribute(_ones(1)), _attribute_increased),
    "gradient of a tensor": (lambda: _ones(1), _gradient_then_set),
    "between elements": (lambda: _ones(8)[::2], _gap_increased),
    "class": (_class, _attribute_increased),
    "module": (_module, _attribute_increased),
    "lock": (threading.Lock, _lock_taken),
    "base of an array": (lambda: np.ones(4)[:2], _end_of_base_increased),
    "flag of an array": (lambda: np.ones(4), _made_read_only),
    "global of a function": (_with_globals, lambda kept: float(kept())),
    "behind a view": (lambda: _ones(4)[:2], _memory_behind_increased),
}
"""What makes an object, and what reads a number from it and changes it."""

UNNOTICED = "behind a view"
"""The one change that is not noticed."""


class Outside(torch.autograd.Function):
    """Draws from a generator that no replay can set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.number = DRAWS[kind]()
        return x * ctx.number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.number, None


GENERATOR = torch.Generator(DEVICE)

DRAWS: dict[str, Callable[[], float]] = {
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand((), generator=GENERATOR, device=DEVICE)),
}
"""Draws of random numbers, by whose generator they come from."""


class FailsLate(Doubling):
    """Raises an exception when it has written to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        raise KeyError("after a write")


class SetsGrad(torch.autograd.Function):
    """Sets `.grad` of a weight in backward, instead of returning a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.grad = (gradients[0] * x).sum(0)
        return gradients[0] * ctx.weight.detach(), None


def add_to_grad(tensor: Tensor, gradient: Tensor) -> None:
    """What `AddsElsewhere` calls."""
    tensor.grad = gradient


class AddsElsewhere(SetsGrad):
    """Sets `.grad` by a function of its module."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        add_to_grad(ctx.weight, (gradients[0] * x).sum(0))
        return gradients[0] * ctx.weight.detach(), None


class AddsToMain(SetsGrad):
    """Adds to an attribute of a weight in backward, as fused accumulation of gradients does."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_((gradients[0] * x).sum(0))
        return gradients[0] * ctx.weight.detach(), None


class ReadsAttribute(torch.autograd.Function):
    """Reads an attribute of a weight in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.factor = getattr(weight, "factor")  # noqa: B009  as code does that gives a default
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class KeepingTwice(torch.autograd.Function):
    """Keeps one list of tensors in two attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.one = ctx.other = [x]
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.one[0].cos()


class KeepingWeakly(Doubling):
    """Keeps a weak reference to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = weakref.ref(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class KeepingItself(torch.autograd.Function):
    """Keeps a list that holds itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.items = [x]
        ctx.items.append(ctx.items)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.items[1][0].cos()
