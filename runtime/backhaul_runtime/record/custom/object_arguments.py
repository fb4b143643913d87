"""Records the arguments of custom autograd functions, and objects among those of ops, as a program holds them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.custom.adapters import TensorMemory, adapter_of, is_fixed, may_change
from backhaul_runtime.program.custom.class_names import is_foreign, name_of_class, plain_name
from backhaul_runtime.program.custom.names import JoinedNames, names
from backhaul_runtime.program.program import CONSTANTS, Composite, Ref
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.torch_internals.private import is_plain


class ObjectArguments:
    """Takes objects apart. Its methods raise Refusal for what no program can hold.

    Args:
        call: The call that runs. The tensors among the arguments are added to those of its op.
        allows: The names of types that workers can build.

    Attributes:
        changeable: The name of a type of argument that may change before backward; empty if there was none.
    """

    def __init__(self, call: RunningCall, allows: JoinedNames) -> None:
        self.changeable = ""
        self._call = call
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self._is_in_object = False  # whether the argument that is being recorded is a part of an object

    def of_function(self, value: Any) -> Any:
        """Returns an argument of a custom function, or a part of an object, as a program holds it."""
        cls = type(value)
        if value is None or cls in CONSTANTS:
            if not _can_be_sent(value):
                raise Refusal("a number or text among the arguments that no program can hold")
            return value
        if cls is TensorMemory:
            return self._ref(value.tensor)
        if cls in (list, dict):
            self.changeable = cls.__name__
        if cls is list:
            return tuple([self.of_function(item) for item in value])
        if cls in (tuple, torch.Size):
            return self._built(cls, value)
        if cls is dict:
            return self._built(cls, [list(pair) for pair in value.items()])
        return self._ref(value) if is_plain(cls) else self.composite(value)

    def _ref(self, tensor: Tensor) -> Ref:
        self._call.op.tensors.append(tensor)
        return self._call.known.use(tensor, is_part=self._is_in_object)

    def composite(self, value: Any) -> Composite:
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
        outer, self._is_in_object, changeable = self._is_in_object, True, self.changeable
        try:
            return self._built(cls, adapter.flatten(value))
        finally:
            self._is_in_object = outer
            if may_change(value):
                self.changeable = plain_name(cls)
            elif is_fixed(cls):
                self.changeable = changeable

    def _built(self, cls: type, parts: Iterable[Any]) -> Composite:
        name = name_of_class(cls)
        self._call.builder.types[name] = None
        return Composite(name, tuple([self.of_function(part) for part in parts]))


def _can_be_sent(value: Any) -> bool:
    """Whether the encoding of programs has a constant: integers of 64 bits, and texts that are Unicode."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is not str or value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)
