"""Custom autograd functions that take objects as arguments. A worker imports this module by its name."""

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


class TakingTwo(torch.autograd.Function):
    """Gets two objects, which may be one, and keeps both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Slotted, other: Slotted) -> Tensor:
        ctx.one, ctx.other = one, [other, one]
        return x * one.number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.other[0].number, None, None


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
