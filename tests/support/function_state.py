"""Custom autograd functions whose backward depends on more than tensors. A worker imports this module by its name."""

import enum
import functools
import itertools
import math
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support import function_settings
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
}
"""Objects with a number inside, by what they are."""


def _number_in(kept: Any) -> float:
    if isinstance(kept, (set, np.ndarray)):
        return float(next(iter(kept)))
    if isinstance(kept, (InSlots, range)):
        return kept.number if isinstance(kept, InSlots) else len(kept) / 1e9
    return float(kept()) if callable(kept) else float(kept)


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


@dataclass(slots=True, frozen=True)
class Slotted:
    """A dataclass without a dict."""

    number: float


@dataclass
class WithDict:
    """A dataclass with a dict."""

    number: float


@dataclass(slots=True)
class Both(WithDict):
    """A dataclass with a dict and a slot."""

    other: float = 3.0


@dataclass
class Items(OrderedDict):  # type: ignore[type-arg]
    """A dataclass with items, as outputs of models are."""

    number: float = 1.0


class Flags(enum.Flag):
    """Members that can be combined."""

    FIRST = 1
    SECOND = 2


class _Fields(NamedTuple):
    number: float


class Converting(_Fields):
    """A named tuple whose constructor changes what it gets."""

    __slots__ = ()

    def __new__(cls, number: float) -> "Converting":
        return super().__new__(cls, number * 2)


class Taking(torch.autograd.Function):
    """Gets any object, and multiplies by the number in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Any) -> Tensor:
        ctx.value = value
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        value = ctx.value
        if isinstance(value, Flags):
            return gradients[0] * value.value, None
        if isinstance(value, str):
            return gradients[0] * len(value), None
        if isinstance(value, dict) and not isinstance(value, Items):
            return gradients[0] * value["number"], None
        return gradients[0] * getattr(value, "other", getattr(value, "number", value)), None


def _multiplying(slope: Tensor) -> type[torch.autograd.Function]:
    """Returns a function of its own for each slope, under the same name."""

    class Multiplying(Doubling):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * slope

    return Multiplying


HALVING = _multiplying(torch.full((1,), 0.5))
TRIPLING = _multiplying(torch.full((1,), 3.0))


class Powers(torch.autograd.Function):
    """Its backward reads a dict that its caller may change after forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, float]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = options
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos() * ctx.options["factor"], None


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


class TakingTwo(torch.autograd.Function):
    """Gets two objects, which may be one, and keeps both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Slotted, other: Slotted) -> Tensor:
        ctx.one, ctx.other = one, [other, one]
        return x * one.number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.other[0].number, None, None


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


class Listed(NamedTuple):
    """A named tuple whose field a caller may change."""

    numbers: list[float]


class TakingListed(torch.autograd.Function):
    """Reads the list in a named tuple in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, listed: Listed) -> Tensor:
        ctx.listed = listed
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.listed.numbers[0], None


@dataclass(frozen=True)
class Sloped:
    """Has what backward needs in its class."""

    bits: int
    slope = 2.0


class TakingSloped(torch.autograd.Function):
    """Reads an attribute of an argument's class in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sloped: Sloped) -> Tensor:
        ctx.sloped = sloped
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.sloped.slope, None


class Marked(Tensor):
    """A tensor with an attribute."""

    scale: float


class TakingMarked(torch.autograd.Function):
    """Reads an attribute of a tensor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Marked) -> Tensor:
        ctx.marked = marked
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.marked.scale, None
