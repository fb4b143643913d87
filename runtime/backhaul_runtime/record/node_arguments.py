"""Records the arguments of ops and custom autograd functions as a program holds them: references and constants."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.adapters import TensorMemory, adapter_of, is_fixed, may_change
from backhaul_runtime.program.class_names import is_foreign, name_of_class, plain_name
from backhaul_runtime.program.names import JoinedNames, names
from backhaul_runtime.program.program import Composite, GeneratorRef, Ref, SourceRef
from backhaul_runtime.record.known_tensors import KnownTensors
from backhaul_runtime.record.program_builder import ProgramBuilder
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.record.running_op import RunningOp
from backhaul_runtime.tensors.layout import copy_exact, unsupported_reason
from backhaul_runtime.torch_internals.private import is_plain, is_thin

_CONSTANTS = frozenset({bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device})
"""The types of values that a program holds as they are, beside None."""


class NodeArguments:
    """Takes the arguments of a call's ops and functions apart. Its methods raise Refusal for what no program can hold.

    Args:
        op: The op or function whose arguments these are. Its tensors are added to it.
        recording: Has the sources of the call.
        known: Returns references to tensors.
        builder: Gets the names of the types of objects that are met.
        allows: The names of types that workers can build.

    Attributes:
        changeable: The name of a type of argument that may change before backward; empty if there was none.
    """

    def __init__(
        self,
        op: RunningOp,
        recording: Recording,
        known: KnownTensors,
        builder: ProgramBuilder,
        allows: JoinedNames,
    ) -> None:
        self.changeable = ""
        self._op = op
        self._recording = recording
        self._known = known
        self._types = builder.types
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self._is_in_object = False  # whether the argument that is being recorded is a part of an object

    def of_op(self, value: Any) -> Any:
        """Returns an argument of an op as a program holds it."""
        if isinstance(value, Tensor):
            return self._ref(value) if is_plain(type(value)) or is_thin(type(value)) else self._composite(value)
        if type(value) is torch.device and value.type == "cuda" and value.index is None:
            return torch.device("cuda", torch.cuda.current_device())  # another one may be current in backward
        if value is None or type(value) in _CONSTANTS:
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self.of_op(item) for item in value])
        if isinstance(value, torch.Generator):
            return GeneratorRef()
        raise Refusal(f"an argument of type {type(value).__name__} to {self._op.name}")

    def with_geometry(self, position: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of an op with a copy of one, which becomes a source, if the call computed its values.

        Args:
            position: The position of an argument whose values become sizes and offsets, see `GEOMETRY`.
            args: The positional arguments of the op.
        """
        value = args[position]
        ref = self._ref(value) if isinstance(value, Tensor) else None
        if ref is None or (isinstance(ref, SourceRef) and not self._recording.sources[ref.index].is_written):
            return args
        return (*args[:position], copy_exact(value), *args[position + 1 :])

    def of_function(self, value: Any) -> Any:
        """Returns an argument of a custom function, or a part of an object, as a program holds it."""
        cls = type(value)
        if value is None or cls in _CONSTANTS:
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
        return self._ref(value) if is_plain(cls) else self._composite(value)

    def _ref(self, tensor: Tensor) -> Ref:
        self._op.tensors.append(tensor)
        return self._known.use(tensor, is_part=self._is_in_object)

    def _composite(self, value: Any) -> Composite:
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
        self._types[name] = None
        return Composite(name, tuple([self.of_function(part) for part in parts]))


def _can_be_sent(value: Any) -> bool:
    """Whether the encoding of programs has a constant: integers of 64 bits, and texts that are Unicode."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is not str or value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)
