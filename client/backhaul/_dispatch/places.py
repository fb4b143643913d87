"""Finds captured tensors again from the function that captures them.

Between two calls nothing of ours refers to a tensor of the user, not even weakly: `torch.utils.swap_tensors` refuses a
tensor with a weak reference, and with it `module.to()` and `load_state_dict` where they swap. So the place of a tensor
is kept, relative to the function that is called.
"""

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

Place = tuple[str | int, ...]
"""The way from a function to a tensor: the name or number of one of its values, then names inside a module."""


class CapturedInputs:
    """A function that captures a list of tensors, as a captured graph does with the parameters of one layer.

    Attributes:
        inputs: The tensors, and values of other types.
        site: Equal for functions that run the same graph on the same layer.
    """

    inputs: Sequence[Any]
    site: Hashable


def place_of(fn: Callable[..., Any], tensor: Tensor) -> Place | None:
    """Returns the place of a tensor that a function captures, None if it is captured in another way.

    Looks through modules, with their parameters, buffers and attributes. It takes time in proportion to their number.
    """
    for key, value in _values(fn):
        if value is tensor:
            return key
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                for attribute, other in _tensors_of(module):
                    if other is tensor:
                        return (*key, *filter(None, name.split(".")), attribute)
    return None


def at(fn: Callable[..., Any], way: Place) -> Tensor | None:
    """Returns the tensor that is at a place now, None if there is none."""
    value = _value(fn, way[:2])
    for name in way[2:]:
        value = getattr(value, str(name), None)
    return value if isinstance(value, Tensor) else None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
    yield from vars(module).items()


def _values(fn: Callable[..., Any]) -> Iterator[tuple[Place, Any]]:
    """Yields what a function captures, each value with its key: itself, closure, defaults, globals and attributes."""
    inner = _inner(fn)
    yield ("self", 0), _value(fn, ("self", 0))
    if isinstance(fn, functools.partial):
        for number, value in enumerate(fn.args):
            yield ("argument", number), value
        for name, value in fn.keywords.items():
            yield ("keyword", name), value
    if isinstance(inner, types.FunctionType):
        for number in range(len(inner.__closure__ or ())):
            yield ("cell", number), _value(fn, ("cell", number))
        for number, value in enumerate(inner.__defaults__ or ()):
            yield ("default", number), value
        for name in inner.__code__.co_names:
            yield ("global", name), inner.__globals__.get(name)
    elif isinstance(inner, CapturedInputs):
        for number, value in enumerate(inner.inputs):
            yield ("input", number), value
    elif not isinstance(inner, nn.Module):
        for name, value in getattr(inner, "__dict__", {}).items():
            yield ("attribute", name), value


def _value(fn: Callable[..., Any], key: Place) -> Any:
    kind, which = key
    inner: Any = _inner(fn)
    try:
        match kind:
            case "self":
                return inner if isinstance(inner, nn.Module) else _owner(fn)
            case "argument":
                return fn.args[which]  # type: ignore[attr-defined]
            case "keyword":
                return fn.keywords[which]  # type: ignore[attr-defined]
            case "cell":
                return inner.__closure__[which].cell_contents
            case "default":
                return inner.__defaults__[which]
            case "input":
                return inner.inputs[which]
            case "global":
                return inner.__globals__.get(which)
            case _:
                return vars(inner).get(which)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # another function, or a cell without a value
        return None


def _owner(fn: Callable[..., Any]) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__self__", None)


def _inner(fn: Callable[..., Any]) -> Any:
    """Returns the module, function or object behind partials and methods."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__func__", fn)
