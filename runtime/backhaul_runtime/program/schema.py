"""Checks calls against the schemas of ops before a program runs, so that no op gets an argument of a wrong type."""

from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.program import Composite, GeneratorRef, ResultRef, SourceRef
from backhaul_runtime.torch_internals.private import OpOverload, arguments_of

# The types of values that each kind of schema type accepts. A bool is an int in Python and in torch.
_NUMBER = (int, float, complex)
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "TensorType": (SourceRef, ResultRef, Composite, *_NUMBER),  # x * 2 records the number itself
    "IntType": (int, torch.dtype, torch.layout, torch.memory_format),
    "SymIntType": (int,),
    "FloatType": (float, int),
    "NumberType": _NUMBER,
    "BoolType": (bool,),
    "StringType": (str,),
    "DeviceObjType": (torch.device,),
    "GeneratorType": (GeneratorRef,),
    "ScalarTypeType": (torch.dtype,),
    "LayoutType": (torch.layout,),
    "MemoryFormatType": (torch.memory_format,),
}


def check_call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ProgramError if the number, the names or the types of the arguments do not fit the op's schema."""
    arguments = arguments_of(op)
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise ProgramError(f"{op} takes {len(positional)} positional arguments, the node has {len(args)}", op=str(op))
    given = dict(zip((argument.name for argument in positional), args, strict=False))
    for name, value in kwargs.items():
        if name in given:
            raise ProgramError(f'{op} has the argument "{name}" both by position and by keyword', op=str(op))
        given[name] = value
    for argument in arguments:
        if argument.name in given:
            value = given.pop(argument.name)
            if not _fits(argument.real_type, value):
                raise ProgramError(
                    f'{op} takes {argument.real_type} for "{argument.name}", the node has {str(value)[:80]}', op=str(op)
                )
        elif not argument.has_default_value():
            raise ProgramError(f'{op} needs the argument "{argument.name}", which the node lacks', op=str(op))
    if given:
        raise ProgramError(f"{op} takes no arguments {sorted(given)}", op=str(op))


def _fits(kind: Any, value: Any) -> bool:
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(kind.getElementType(), value)
    if name != "ListType":
        return isinstance(value, _ACCEPTED.get(name, ()))
    element = kind.getElementType()
    if isinstance(value, tuple):
        return all(_fits(element, item) for item in value)
    # torch takes a number for a list of equal numbers: kernel_size=3.
    return element.kind() in {"IntType", "SymIntType", "FloatType", "BoolType"} and _fits(element, value)
