"""Records arguments of custom autograd functions, which may be objects, and tensor subclasses among those of ops."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.adapters import TensorMemory, adapter_of, is_fixed, may_change
from backhaul_runtime.program.class_names import is_foreign, name_of_class, plain_name
from backhaul_runtime.program.code_identity import identity_of_class
from backhaul_runtime.program.names import JoinedNames, names
from backhaul_runtime.program.program import Composite, Ref
from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.torch_internals.private import is_plain

CONSTANTS = frozenset({bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device})
"""The types of values that a program holds as they are, beside None."""

Refers = Callable[[Tensor], Ref]
"""Returns the reference to a plain tensor. The recorder passes its own method to each call, so nothing keeps it."""


def _can_be_sent(value: Any) -> bool:
    """Whether the encoding of programs has a constant: integers of 64 bits, and texts that are Unicode."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is not str or value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def check_attributes(function: type, tensors: Iterable[Tensor]) -> None:
    """Raises Refusal if the code of a custom function names an attribute of a tensor, as programs hold none of these.

    Args:
        function: The custom autograd function that gets the tensors.
        tensors: The tensors among its arguments. Those of a class of their own have an adapter.
    """
    for tensor in tensors:
        attributes = set(vars(tensor)) if is_plain(type(tensor)) else set()
        if attributes and (named := min(attributes & identity_of_class(function).names, default="")):
            what = f"the custom autograd function {plain_name(function)}"
            raise Refusal(f"{what} may read the attribute {named} of a tensor, which no program holds")


class FunctionArguments:
    """Takes the arguments of one call's functions apart. Its methods raise Refusal for what no program can hold.

    Args:
        allows: The names of types that workers can build.

    Attributes:
        types: The names of the types of objects that were met, in order; the values are None.
        is_in_object: Whether the argument that is being recorded is a part of an object.
        changeable: The name of a type of argument that may change before backward; empty if there was none.
    """

    def __init__(self, allows: JoinedNames) -> None:
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self.types: dict[str, None] = {}
        self.is_in_object = False
        self.changeable = ""

    def part(self, value: Any, refers: Refers) -> Any:
        """Returns an argument of a custom function, or a part of one, as a program holds it."""
        cls = type(value)
        if value is None or cls in CONSTANTS:
            if not _can_be_sent(value):
                raise Refusal("a number or text among the arguments that no program can hold")
            return value
        if cls is TensorMemory:
            return refers(value.tensor)
        if cls in (list, dict):
            self.changeable = cls.__name__
        if cls is list:
            return tuple([self.part(item, refers) for item in value])
        if cls in (tuple, torch.Size):
            return self._built(cls, value, refers)
        if cls is dict:
            return self._built(cls, [list(pair) for pair in value.items()], refers)
        return refers(value) if is_plain(cls) else self.composite(value, refers)

    def composite(self, value: Any, refers: Refers) -> Composite:
        """Returns an object, or a tensor of a class of its own, by its parts."""
        cls = type(value)
        adapter = adapter_of(cls)
        if isinstance(value, Tensor) and (adapter is None or is_foreign(cls.__module__)):
            raise Refusal(str(unsupported_reason(value)))
        if adapter is None:
            raise Refusal(f"an argument of type {plain_name(cls)}, which no adapter takes apart")
        if isinstance(value, Tensor) and value.requires_grad:
            raise Refusal(f"a differentiable tensor subclass {plain_name(cls)}")
        if cls not in self._why_not:
            self._why_not[cls] = self._allows.why_not_type(cls)
        if self._why_not[cls]:
            raise Refusal(self._why_not[cls])
        names.types[name_of_class(cls)] = cls
        outer, self.is_in_object, changeable = self.is_in_object, True, self.changeable
        try:
            return self._built(cls, adapter.flatten(value), refers)
        finally:
            self.is_in_object = outer
            if may_change(value):
                self.changeable = plain_name(cls)
            elif is_fixed(cls):
                self.changeable = changeable

    def _built(self, cls: type, parts: Iterable[Any], refers: Refers) -> Composite:
        name = name_of_class(cls)
        self.types[name] = None
        return Composite(name, tuple([self.part(part, refers) for part in parts]))
