"""Tensors that only wrap others, as quantised weights do: torch's traceable wrapper subclasses."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backhaul_runtime.torch_internals.private import is_plain, is_thin

MAX_DEPTH = 8
"""How deep wrappers may be nested."""


class Wrapper(NamedTuple):
    """What a wrapper is without the tensors in it. Its `repr` is equal for wrappers that differ only in these.

    Attributes:
        kind: The name of its class.
        parts: The names of the tensors in it.
        outside: Its dtype, shape and strides.
        values: The numbers, texts and dtypes among its other attributes.
    """

    kind: str
    parts: tuple[str, ...]
    outside: tuple[Any, ...]
    values: tuple[Any, ...]


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor that wraps others."""
    return isinstance(value, Tensor) and not is_plain(type(value)) and is_traceable_wrapper_subclass(value)


def overrides_functions(value: Any) -> bool:
    """Whether a value is a tensor of a class that sees calls of torch's functions, and wraps no others."""
    cls: type = type(value)
    return isinstance(value, Tensor) and not is_plain(cls) and is_thin(cls) and not is_wrapper(value)


def taken_apart(tensor: Any) -> tuple[Wrapper, list[Tensor]] | None:
    """Returns what a wrapper is, and the tensors in it, which are the objects that its class uses.

    None for one that takes gradients, because autograd then knows the wrapper and not the tensors in it.
    """
    parts, tensors, values = list[str](), list[Tensor](), list[Any]()
    outside = tensor.dtype, tuple(tensor.shape), tensor.stride()

    def add(name: str, part: Any, depth: int) -> bool:
        if not isinstance(part, Tensor) or part.requires_grad or depth > MAX_DEPTH:
            return False
        if not is_wrapper(part):
            parts.append(name)
            tensors.append(part)
            return True
        names, attributes = part.__tensor_flatten__()  # type: ignore[attr-defined]
        kinds = (bool, int, float, str, torch.dtype)
        values.extend(v for v in pytree.tree_leaves(attributes) if isinstance(v, kinds))
        return all(add(f"{name}.{inner}", getattr(part, inner), depth + 1) for inner in names)

    if not add("", tensor, 0):
        return None
    cls = type(tensor)
    return Wrapper(f"{cls.__module__}.{cls.__qualname__}", tuple(parts), outside, tuple(values)), tensors


def tensors_inside(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among values, with the tensors in wrappers in the place of these."""
    tensors = list[Tensor]()
    for value in values:
        parts = taken_apart(value) if is_wrapper(value) else None
        if parts is not None:
            tensors += parts[1]
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Suspends function modes, but lets tensor subclasses see calls of torch's functions."""
    modes = []
    try:
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
