"""The names of classes, for programs and for people."""

import sys
from typing import Any

_FOREIGN = frozenset({"torch", "numpy", "triton", "backhaul", "backhaul_runtime", "builtins", *sys.stdlib_module_names})


def name_of_class(cls: type) -> str:
    """Returns the name by which programs know a class: its module and its qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def plain_name(cls: type) -> str:
    """Returns the name of a class for people: without the module, and without the functions that it was made in."""
    return cls.__qualname__.rpartition("<locals>.")[2]


def is_found_by_name(cls: type) -> bool:
    """Whether a class's name leads to the class itself, and not to nothing or to another class of the same name."""
    value: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is cls


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to torch or to Python, whose versions are compared otherwise."""
    return (module or "builtins").partition(".")[0] in _FOREIGN
