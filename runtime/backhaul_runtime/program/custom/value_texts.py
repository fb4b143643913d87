"""Describes values as texts that are equal in two processes exactly if the values are.

Constants have such texts, also inside containers and attributes of objects. Other values inside these have none: caches
hold them, and differ between processes.
"""

import functools
import threading
from argparse import Namespace
from collections import deque
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from backhaul_runtime.program.custom.class_names import is_foreign
from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import DisablePythonDispatcher, DisableTorchDispatch

MAX_ITEMS = 10_000
"""The most values inside a container or an object that is described."""

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""Types of the constants that are described."""

CODE = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
"""Types of values that are code, which has no text."""

_MAX_BYTES = 64 << 20  # of a tensor or an array
_MAX_DEPTH = 4
_NUMBERS = (int, float, complex, str, bytes)  # classes that constants of classes of their own inherit from
_PRINTED = (range, slice, Fraction, Decimal)  # constants whose text says everything


def constant_text(value: Any, depth: int = 0) -> str | None:
    """Returns a text for a constant, or for a container of constants; None for other values."""
    if isinstance(value, CONSTANTS) and type(value).__module__ in {"builtins", "torch"}:
        return f"{type(value).__name__} {value!r}"
    if depth == _MAX_DEPTH or not isinstance(value, (tuple, list, dict, set, frozenset)) or len(value) > MAX_ITEMS:
        return None
    if not value and isinstance(value, (list, dict, set)):
        return None  # a cache that nothing was put into so far
    if isinstance(value, dict):
        pairs = [(constant_text(key, depth + 1), constant_text(item, depth + 1)) for key, item in value.items()]
        texts = [None if None in pair else f"{pair[0]}: {pair[1]}" for pair in pairs]
    else:
        texts = [constant_text(item, depth + 1) for item in value]
    if None in texts:
        return None
    known = [text for text in texts if text is not None]
    return f"{type(value).__name__}[{', '.join(sorted(known) if isinstance(value, (set, frozenset)) else known)}]"


def constants_inside(value: Any) -> str | None:
    """Returns a text for a constant, or for all constants inside a container or an object; None if it has none.

    Raises:
        ValueError: Something in it cannot be compared.
    """
    return _ValueTexts(marks_code=False).of(value)


def marked(value: Any) -> str | None:
    """Returns such a text, which also changes when a function or a class inside is replaced. Raises as it does."""
    return _ValueTexts(marks_code=True).of(value)


class _ValueTexts:
    """Describes the constants in one value.

    Args:
        marks_code: Whether to mark functions and classes by their addresses.
    """

    def __init__(self, *, marks_code: bool) -> None:
        self._marks_code = marks_code
        self._count = 0
        self._around: list[int] = []  # ids of the containers and objects that are being described

    def of(self, value: Any) -> str | None:
        self._count += 1
        if self._count > MAX_ITEMS:  # each call of the function would take the time to read all of them
            raise ValueError(f"more than {MAX_ITEMS} values")
        if isinstance(value, (ContextVar, threading.local)):
            raise ValueError("another thread may see another value")
        # Objects of a subclass have attributes, and their own repr may be the same for two values.
        if isinstance(value, CONSTANTS) and type(value).__module__ in {"builtins", "torch"}:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (np.ndarray, np.generic)):
            return _array(value)
        if type(value) in _PRINTED:
            return repr(value)
        if isinstance(value, CODE):
            return f"at {id(value)}" if self._marks_code else None
        if id(value) in self._around:  # it holds itself
            return None
        self._around.append(id(value))
        texts = [(self.of(key), self.of(item)) for key, item in parts_of(value)]
        self._around.pop()
        if isinstance(value, (set, frozenset)):  # whose order differs between processes
            texts.sort(key=str)
        known = [f"{key}: {item}" for key, item in texts if item is not None]
        number = next((kind.__repr__(value) for kind in _NUMBERS if isinstance(value, kind)), "")
        # What is empty may be a cache. Only tuples and frozen sets stay as empty as they are.
        is_empty = not known and not number and not (isinstance(value, (tuple, frozenset)) and not value)
        return None if is_empty else f"{type(value).__name__}{number}[{', '.join(known)}]"


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns what a container or an object holds: items, and attributes unless its class is torch's or Python's."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, MappingProxyType)):
        parts += value.items()
    elif isinstance(value, (list, tuple, deque)):
        parts += enumerate(value)
    elif isinstance(value, (set, frozenset)):
        parts += [(None, item) for item in value]
    is_settings = isinstance(value, (SimpleNamespace, Namespace, torch.nn.Module))
    if not isinstance(value, (*CODE, ModuleType, Tensor)) and (is_settings or not is_foreign(type(value).__module__)):
        parts += sorted(getattr(value, "__dict__", {}).items())
        parts += [(name, getattr(value, name)) for name in slots_of(type(value)) if hasattr(value, name)]
    return parts


def slots_of(cls: type) -> list[str]:
    """Returns the names of the attributes that have a place of their own in the objects of a class."""
    return [
        name
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and value.__objclass__ is base and base.__module__ != "builtins"
    ]


def text_of_tensor(value: Tensor) -> str | None:
    """Returns a text for the values of a tensor, which are read each time: a write through `.data` has no version.

    None for a tensor that is large, on an accelerator or of a kind without bytes.
    """
    if unsupported_reason(value) is not None or value.nbytes > _MAX_BYTES or value.device.type != "cpu":
        return None
    layout = layout_of(value)
    with DisablePythonDispatcher(), DisableTorchDispatch():
        return f"{layout.header!r} {content_digest(value, layout).hex()}"


def _array(value: Any) -> str:
    """Returns a text for the contents of an array or a number of NumPy's. Raises ValueError if it has none."""
    if value.nbytes > _MAX_BYTES or value.dtype.hasobject:
        raise ValueError("an array that is large or holds objects")
    return f"{type(value).__name__} {value.dtype} {value.shape} {xxhash.xxh3_128_hexdigest(value.tobytes())}"


def has_whole_storage(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are all that its storage has, so that no other view of it shows more."""
    return layout_of(tensor).span_bytes == tensor.nbytes == tensor.untyped_storage().nbytes()
