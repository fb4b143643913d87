"""Does a call fit an op's schema? Checked before a program runs, so that no op meets an argument of a wrong kind."""

from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.program import GeneratorRef, ResultRef, SourceRef
from backhaul_runtime.torch_internals.private import OpOverload, arguments_of

# By kind of schema type, what may stand for it. bool counts as int in Python and in torch.
_NUMBER = (int, float, complex)
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "TensorType": (SourceRef, ResultRef, *_NUMBER),  # x * 2 records the number itself
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
    """Raises ProgramError where the arguments do not fit the schema: arity, names and types."""
    arguments = arguments_of(op)
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise ProgramError(f"{op} takes {len(positional)} positional arguments and is given {len(args)}", op=str(op))
    given = dict(zip((argument.name for argument in positional), args, strict=False))
    for name, value in kwargs.items():
        if name in given:
            raise ProgramError(f'{op} is given "{name}" twice', op=str(op))
        given[name] = value
    for argument in arguments:
        if argument.name in given:
            value = given.pop(argument.name)
            if not _fits(argument.real_type, value):
                raise ProgramError(
                    f'{op} takes {argument.real_type} for "{argument.name}" and is given {str(value)[:80]}', op=str(op)
                )
        elif not argument.has_default_value():
            raise ProgramError(f'{op} needs "{argument.name}" and is not given it', op=str(op))
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
    # A number may stand for a list of equal numbers: kernel_size=3.
    return element.kind() in {"IntType", "SymIntType", "FloatType", "BoolType"} and _fits(element, value)
