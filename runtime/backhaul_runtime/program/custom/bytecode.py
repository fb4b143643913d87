"""Reads the bytecode of functions: what it consists of, and what it names."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from backhaul_runtime.program.custom.value_texts import constant_text

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})


def code_lines(code: CodeType) -> Iterator[str]:
    """Yields lines that are equal for equal code of this process, also after it has run."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    yield f"{code.co_name} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield f"{code.co_exceptiontable.hex()} {code.co_linetable.hex()}"
    yield f"{[constant_text(constant) or repr(constant) for constant in constants]}"
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from code_lines(inner)


def names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of attributes and of variables outside the function in code."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def texts_in(code: CodeType) -> Iterator[str]:
    """Yields the texts in code: `getattr` takes names as texts."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from texts_in(constant)


def imported_modules(code: CodeType, package: str) -> Iterator[str]:
    """Yields the names of the modules that code imports when it runs."""
    level = 0
    before: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level = before[-2] if len(before) > 1 and isinstance(before[-2], int) else 0
            parents = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
            name = ".".join([*parents, *([instruction.argval] if instruction.argval else [])])
            yield name
            for attribute in before[-1] if before and isinstance(before[-1], tuple) else ():
                yield f"{name}.{attribute}"
        before = [*before[-1:], instruction.argval]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from imported_modules(inner, package)


def reads_gradients(code: CodeType) -> bool:
    """Whether code has the attribute `grad` of anything but `autograd`, or `backward` of anything but a class."""
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTES and before is not None:
            is_autograd = before.argval == "autograd"
            if instruction.argval == "grad" and not is_autograd:
                return True
            if instruction.argval == "backward" and (is_autograd or not _loads_class(before)):
                return True
        if instruction.opname not in _SILENT:
            before = instruction
    return any(reads_gradients(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _loads_class(instruction: dis.Instruction) -> bool:
    """Whether an instruction may load a class: a name from outside the function, or an attribute that begins so."""
    name = instruction.argval
    is_capital = instruction.opname in _ATTRIBUTES and isinstance(name, str) and name[:1].isupper()
    return is_capital or instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}


def stored_attributes(code: CodeType) -> str:
    """Returns an attribute that code stores on its first argument, empty if it stores none."""
    first = code.co_varnames[0] if code.co_argcount else None
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"STORE_ATTR", "DELETE_ATTR"} and before == first:
            return str(instruction.argval)
        before = instruction.argval if instruction.opname.startswith("LOAD_FAST") else None
    return ""


def asked_identity(code: CodeType) -> str:
    """Returns what in code asks which object a value is, or of which class; empty if nothing does."""
    if code.co_name in _OF_OBJECTS:
        return ""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and instruction.argval in {"type", "id"}:
            return f"may call {instruction.argval}() on what it saved"
        if instruction.opname == "IS_OP" and before is not None and not before.opname.startswith("LOAD_CONST"):
            return "may ask which object a saved tensor is"
        if instruction.opname not in _SILENT:
            before = instruction
    return next(filter(None, (asked_identity(one) for one in code.co_consts if isinstance(one, CodeType))), "")


_OF_OBJECTS = frozenset({"__eq__", "__getattr__"})
"""Methods that ask such things of an object that a function keeps, as bitsandbytes' states do, and not of a tensor."""

_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})
