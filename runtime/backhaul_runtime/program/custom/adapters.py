"""Takes objects apart into tensors and constants, and builds them again: arguments of custom autograd functions.

An adapter does so for one class. Tensor subclasses with `__tensor_flatten__`, dataclasses, enumerations and named
tuples need none. For others one is registered under the class's name, by whoever knows it: `register_adapter`.

NOTE [Building objects]
1. A worker builds objects of those classes only that its table of names holds, see `names`.
2. No constructor runs: an object gets its attributes. A constructor might compute, or do worse with hostile values.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal, SettingError
from backhaul_runtime.process.settings import names_code
from backhaul_runtime.program.custom.class_names import name_of_class
from backhaul_runtime.program.custom.value_texts import slots_of
from backhaul_runtime.torch_internals.private import DisableTorchFunction, is_thin

_POINTER_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMemory:
    """Stands for the memory of a tensor of some class: a plain tensor with the same elements."""

    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """How to take apart and build the objects of a class.

    Attributes:
        flatten: Returns the parts of an object: constants, tensors, containers of them, and objects with adapters.
        build: Returns an object, from its class and its parts in the same order.
    """

    flatten: Callable[[Any], Sequence[Any]]
    build: Callable[[type, Sequence[Any]], Any]


_registered: dict[str, Adapter] = {}
_looked_up: dict[type, Adapter | None] = {}


def register_adapter(
    name: str, flatten: Callable[[Any], Sequence[Any]], build: Callable[[type, Sequence[Any]], Any]
) -> None:
    """Registers how objects of a class travel as arguments of custom autograd functions.

    Call it in a module that both the trainer imports and the worker, because its operator allows it.

    Args:
        name: The class, as "module:qualified name".
        flatten: Returns the parts of an object: numbers, texts, tensors, and lists, tuples and dicts of them.
        build: Returns an object of the class, from the class and the parts.

    Raises:
        SettingError: The name is none, or one of the others is no function.
    """
    global _looked_up
    if not names_code(name) or ":" not in name:
        raise SettingError(f'register_adapter got the name {name!r}: write the class as "module:qualified name"')
    if not callable(flatten) or not callable(build):
        raise SettingError(f"register_adapter of {name} needs functions, not {flatten!r} and {build!r}")
    _registered[name] = Adapter(flatten, build)
    _looked_up = {}  # not cleared: another thread may be looking up what was registered before


def adapter_of(cls: type) -> Adapter | None:
    """Returns the adapter of a class, or None if its objects can't be taken apart."""
    looked_up = _looked_up
    if cls not in looked_up:
        looked_up[cls] = _look_up(cls)
    return looked_up[cls]


def _look_up(cls: type) -> Adapter | None:
    registered = _registered.get(name_of_class(cls))
    if registered is not None:
        return registered
    if issubclass(cls, Tensor):
        if hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__"):
            return Adapter(_flatten_wrapper, _build_wrapper)
        return THIN if is_thin(cls) else None
    if issubclass(cls, enum.Enum):
        return Adapter(_flatten_member, lambda kind, parts: kind[parts[0]])  # type: ignore[index]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return Adapter(_flatten_named_tuple, _build_named_tuple)
    return ATTRIBUTES if dataclasses.is_dataclass(cls) and is_only_attributes(cls) else None


def _flatten_member(member: Any) -> Sequence[Any]:
    if member.name not in type(member).__members__:
        raise Refusal(f"an argument of type {type(member).__qualname__} that is a combination of members")
    return (member.name,)


def _flatten_named_tuple(value: Any) -> Sequence[Any]:
    if attribute_names(value):
        raise Refusal(f"an argument of type {type(value).__qualname__}, a named tuple with attributes")
    return tuple(value)


def _build_named_tuple(cls: Any, parts: Sequence[Any]) -> Any:
    if len(parts) != len(cls._fields):
        raise ValueError(f"{len(parts)} parts for the fields {cls._fields}")
    return tuple.__new__(cls, parts)


def is_only_attributes(cls: type) -> bool:
    """Whether objects of a class hold nothing but attributes: no items, number or text, and no state of C or C++."""
    offsets = (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    known = object.__basicsize__ + _POINTER_BYTES * (offsets + len(slots_of(cls)))
    return cls.__itemsize__ == 0 and cls.__basicsize__ <= known


def attribute_names(value: Any) -> list[str]:
    """Returns the names of an object's attributes in alphabetic order, those in slots included."""
    return sorted({*getattr(value, "__dict__", ()), *[name for name in slots_of(type(value)) if hasattr(value, name)]})


def _flatten_wrapper(tensor: Any) -> Sequence[Any]:
    names, context = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return list(names), inner, context, list(tensor.shape), list(tensor.stride())


def _build_wrapper(cls: Any, parts: Sequence[Any]) -> Any:
    names, inner, context, shape, strides = parts
    inside = dict(zip(names, inner, strict=True))
    return cls.__tensor_unflatten__(inside, context, torch.Size(shape), tuple(strides))


def attributes_of(value: Any, leave_out: Sequence[str] = ()) -> list[Any]:
    """Returns the names of an object's attributes, in order and joined by commas, followed by their values."""
    names = [name for name in attribute_names(value) if name not in leave_out]
    return [",".join(names), *[getattr(value, name) for name in names]]


def with_attributes(made: Any, parts: Sequence[Any]) -> Any:
    """Sets attributes of an object that was just made, and returns it.

    Args:
        made: The object, which has no attributes yet.
        parts: The result of `attributes_of`. Untrusted.

    Raises:
        ValueError: The names do not fit the values, or one of them has a meaning for the class.
    """
    names, *values = parts
    for name, value in zip(names.split(",") if names else (), values, strict=True):
        descriptor = getattr(type(made), name, None)
        has_meaning = hasattr(descriptor, "__set__") and not isinstance(descriptor, MemberDescriptorType)
        if not name.isidentifier() or name.startswith("__") or has_meaning:
            raise ValueError(f'"{name}" is not the name of an attribute that an object can be given')
        object.__setattr__(made, name, value)
    return made


def _build_thin(cls: type, parts: Sequence[Any]) -> Any:
    memory, *attributes = parts
    with torch.no_grad(), DisableTorchFunction():
        made = memory.as_subclass(cls)
    return with_attributes(made, attributes)


THIN = Adapter(lambda tensor: (TensorMemory(tensor), *attributes_of(tensor)), _build_thin)
"""For tensor subclasses that are a plain tensor with a class and attributes of its own."""

ATTRIBUTES = Adapter(attributes_of, lambda cls, parts: with_attributes(object.__new__(cls), parts))
"""For objects that are nothing but their attributes."""


def thin_without(*names: str) -> Adapter:
    """Returns an adapter like `THIN` that leaves out attributes, which are None in the object that it builds."""

    def build(cls: type, parts: Sequence[Any]) -> Any:
        return with_attributes(_build_thin(cls, parts), [",".join(names), *[None] * len(names)])

    return Adapter(lambda tensor: (TensorMemory(tensor), *attributes_of(tensor, names)), build)


_SHIPPED = {
    "bitsandbytes.nn.modules:Params4bit": thin_without("module"),
    "bitsandbytes.nn.modules:Int8Params": THIN,
    "bitsandbytes.functional:QuantState": ATTRIBUTES,
    "bitsandbytes.autograd._functions:MatmulLtState": ATTRIBUTES,
}
"""Adapters of classes whose objects stay as they are between forward and backward."""

_registered |= _SHIPPED


def may_change(value: Any) -> bool:
    """Whether an object may change between forward and backward, which then reads other values."""
    cls: type = type(value)
    if name_of_class(cls) in _SHIPPED or isinstance(value, (enum.Enum, tuple)):
        return False
    if isinstance(value, Tensor):
        return is_thin(cls) and bool(attribute_names(value))
    return name_of_class(cls) in _registered or not cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def is_fixed(cls: type) -> bool:
    """Whether objects of a class stay as they are, with everything inside. A tuple may hold a list, which does not."""
    return issubclass(cls, (Tensor, enum.Enum)) or name_of_class(cls) in _SHIPPED
