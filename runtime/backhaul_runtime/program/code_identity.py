"""Digests of code: of a custom autograd function, and of the values that it reads from its module and its class.

The value check compares what a function computes in forward. What only its backward reads shows nowhere in forward, so
a trainer and a worker compare the code itself, and the numbers and texts that it reads. They must be equal before the
worker runs the function.

NOTE [Identity of a function]
1. The digest covers the bytecode of the methods of the class, of all functions that they name and that are not torch's
   or Python's own, and so on, of `MAX_FUNCTIONS` functions at most.
2. It covers the constants that this code reads from modules, classes, metaclasses, functions, closures and defaults,
   also inside containers and attributes of objects, whatever else these hold; NumPy's arrays in the same places; and
   tensors, also in tuples. Values of other types count by their type alone: caches hold those, and differ between
   processes.
3. Whoever changes one of these values gives the function another identity from the next call on. A function that does
   so itself is not recorded, and its replay on a worker fails, because each replay would change the value again.
4. A function has no identity if it has too much code, or reads what is not compared: a tensor or array of more than
   64 MiB, on an accelerator, or without bytes; a container or object with more than `_MAX_ITEMS` values inside; a
   variable that each thread or context has its own value of.
5. Of modules that the code imports when it runs, it covers those that this process has imported.
"""

import dis
import functools
import inspect
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
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

from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import DisablePythonDispatcher, DisableTorchDispatch

MAX_FUNCTIONS = 5_000
"""The most functions and classes that an identity covers."""

_MAX_BYTES = 64 << 20  # of a tensor or an array
_MAX_DEPTH, _MAX_ITEMS = 4, 10_000
_FOREIGN = frozenset({"torch", "numpy", "triton", "backhaul", "backhaul_runtime", "builtins", *sys.stdlib_module_names})
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
_NUMBERS = (int, float, complex, str, bytes)  # classes that constants of classes of their own inherit from
_PRINTED = (range, slice, Fraction, Decimal)  # constants whose text says everything
_CODE = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
_MISSING = object()


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


def slots_of(cls: type) -> list[str]:
    """Returns the names of the attributes that have a place of their own in the objects of a class."""
    return [
        name
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and value.__objclass__ is base and base.__module__ != "builtins"
    ]


class CodeIdentity:
    """The identity of one class, which is computed again when something that it covers was replaced. Thread-safe.

    Args:
        cls: A custom autograd function, or another class whose methods a worker calls.
    """

    def __init__(self, cls: type) -> None:
        self._class = cls
        self._last: tuple[_Walk, str] | None = None  # replaced as a whole

    def digest(self) -> str:
        """Returns the present identity, 32 hexadecimal digits; empty if there is none (Rule 4)."""
        return self._present()[1]

    @property
    def names(self) -> Set[str]:
        """The names in the code, among which are all attributes that it can read."""
        return self._present()[0].names

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the identity covers, and that nobody can read more from than what was compared."""
        return [tensor for tensor, _ in self._present()[0].tensors if _has_whole_storage(tensor)]

    def _present(self) -> "tuple[_Walk, str]":
        last = self._last
        if last is None or not _is_current(last[0]):
            walk = _Walk()
            try:
                walk.function_class(self._class)
            except Exception:  # objects that the code reads may raise anything when somebody looks at them
                walk = _Walk()
                walk.is_complete = False
            text = "\n".join(walk.lines).encode()
            last = self._last = walk, xxhash.xxh3_128_hexdigest(text) if walk.is_complete else ""
        return last


@functools.cache
def identity_of_class(cls: type) -> CodeIdentity:
    """Returns the identity of a class, which is kept for the life of the process."""
    return CodeIdentity(cls)


def lines_of_class(cls: type) -> Iterator[str]:
    """Yields lines that are equal for equal classes: the constants and the code of the class, and of its bases."""
    for base in cls.__mro__:
        for name, value in () if is_foreign(base.__module__) else sorted(vars(base).items()):
            item = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(item, FunctionType):
                yield from (name, *code_lines(item.__code__))
            elif name not in _OF_PYTHON and (text := _constant(item)) is not None:
                yield f"{name} = {text}"


@functools.cache
def uses_gradients(cls: type) -> bool:
    """Whether methods of a custom autograd function read or set `.grad` of tensors, or call `autograd.backward`."""
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own |= {} if is_foreign(base.__module__) else vars(base)
    methods = [inspect.unwrap(getattr(item, "__func__", item)) for item in own.values() if not isinstance(item, type)]
    return any(_uses_gradients(method.__code__) for method in methods if isinstance(method, FunctionType))


class _Walk:
    """Visits code and what it reads."""

    def __init__(self) -> None:
        self.lines = [f"python {sys.version_info[:2]}"]
        self.is_complete = True
        self.names: set[str] = set()
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used twice
        # By the id of the mapping, which the second field keeps.
        self._reads: dict[int, tuple[Mapping[str, Any], list[str], list[Any]]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._mutable: list[tuple[Any, str | None]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any, Any]] = []  # each with its code and defaults
        self.tensors: list[tuple[Tensor, str]] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []  # of classes, which may get another attribute

    def is_current(self) -> bool:
        """Whether everything that was visited is still the same."""
        return (
            all(all(map(is_, map(mapping.get, names), values)) for mapping, names, values in self._reads.values())
            and all(_contents(cell) is value for cell, value in self._cells)
            and all(_marked(value) == text for value, text in self._mutable)
            and all(
                function.__code__ is code and function.__defaults__ is defaults and function.__kwdefaults__ is keywords
                for function, code, defaults, keywords in self._functions
            )
            and all(len(mapping) == size for mapping, size in self._sizes)
            and all(_tensor(tensor) == text for tensor, text in self.tensors)
        )

    def function_class(self, cls: type) -> None:
        """Visits a class, its bases, its metaclass, and everything that their methods read."""
        if not is_foreign(type(cls).__module__):
            self.function_class(type(cls))
        for base in cls.__mro__:
            if not is_foreign(base.__module__) or base is cls:
                self._class(base)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        if len(self._kept) >= MAX_FUNCTIONS:
            self.is_complete = False
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _class(self, cls: type) -> None:
        if not self._is_new(cls):
            return
        self.lines.append(f"class {name_of_class(cls)} of {[base.__qualname__ for base in cls.__bases__]}")
        mapping = vars(cls)
        self._sizes.append((mapping, len(mapping)))
        for name in sorted(mapping):
            is_code = issubclass(cls, torch.nn.Module) and _constant(mapping[name]) is None
            if name not in _OF_PYTHON and not is_code:
                self._read(mapping, name)

    def _read(self, mapping: Mapping[str, Any], name: str) -> None:
        value = mapping.get(name)
        _, names, values = self._reads.setdefault(id(mapping), (mapping, [], []))
        names.append(name)
        values.append(value)
        if value is not None or name in mapping:
            self._value(name, value)

    def _value(self, name: str, value: Any) -> None:
        value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, FunctionType):
            self.lines.append(f"{name} is {value.__module__}:{value.__qualname__}")
            self._function(value)
        elif isinstance(value, type):
            self.lines.append(f"{name} is {name_of_class(value)}")
            if not is_foreign(value.__module__):
                self.function_class(value)
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self.lines.append(f"{name} is {value.__name__}")
            if not isinstance(value.__self__, ModuleType):
                self._value(f"{name}.__func__", getattr(value, "__func__", None))
                self._value(f"{name}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            for inner_name, item in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._value(f"{name}.{inner_name}", item)
        elif isinstance(value, Tensor):
            self._tensor(name, value)
        elif not isinstance(value, ModuleType):
            self._contents(name, value)

    def _contents(self, name: str, value: Any) -> None:
        """Visits a constant, a container, or an object."""
        self.lines.append(f"{name}: {name_of_class(type(value))} {_Texts().of(value)}")
        if type(value) in _CONSTANTS:
            return
        self._mutable.append((value, _marked(value)))
        self._inside(name, value, in_tuple=True)
        for inner in ("__wrapped__", "fn", "func"):  # caches and descriptors of functools, and Triton's kernels
            inside = getattr(value, "__dict__", {}).get(inner)
            if isinstance(inside, FunctionType):
                self._function(inside)

    def _inside(self, name: str, value: Any, *, in_tuple: bool) -> None:
        """Visits the code that a container or an object holds, and the tensors in tuples."""
        if not self._is_new(value):
            return
        if not is_foreign(type(value).__module__):
            self.function_class(type(value))
        in_tuple &= isinstance(value, tuple)
        for key, item in _parts(value):
            inner = f"{name}[{key if isinstance(key, (str, int)) else type(key).__name__}]"
            if isinstance(item, _CODE) or (in_tuple and isinstance(item, Tensor)):
                self._value(inner, item)
            elif type(item) not in _CONSTANTS:
                self._inside(inner, item, in_tuple=in_tuple)

    def _tensor(self, name: str, value: Tensor) -> None:
        text = _tensor(value)
        if text is None:  # nothing would show whether trainer and worker have the same values
            self.is_complete = False
        else:
            self.tensors.append((value, text))
        self.lines.append(f"{name}: {text}")

    def _function(self, function: FunctionType) -> None:
        if not self._is_new(function):
            return
        code = function.__code__
        self._functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        self.lines += code_lines(code)
        self._value("defaults", function.__defaults__)
        self._value("keyword defaults", function.__kwdefaults__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            value = _contents(cell)
            self._cells.append((cell, value))
            self._value(name, value)
            # A generated autograd class holds the functions of a registered op as attributes of such an object.
            for inner in ("_backward_fn", "_setup_context_fn"):
                inside = getattr(value, inner, None)
                if isinstance(inside, FunctionType):
                    self._function(inside)
        if is_foreign(function.__module__):
            return
        self._sizes.append((vars(function), len(vars(function))))
        for name in vars(function):
            self._read(vars(function), name)
        texts = {text for text in _texts(code) if text.isidentifier()}  # `getattr` and `globals()` take those
        names = sorted({*_names(code), *texts})
        self.names.update(names, _texts(code))
        for name in names:
            if name not in texts or name in function.__globals__:
                self._read(function.__globals__, name)
                self._attributes_of_module(function.__globals__.get(name), names)
        package = str(function.__globals__.get("__package__") or "")
        for module in sorted(_imported(code, package)):
            if not is_foreign(module) and module in sys.modules:
                self._attributes_of_module(sys.modules[module], names)

    def _attributes_of_module(self, module: Any, names: Sequence[str], depth: int = 0) -> None:
        """Visits what code reads from a module that it names, if `names` are all names in the code."""
        if not isinstance(module, ModuleType) or is_foreign(module.__name__) or depth == _MAX_DEPTH:
            return
        for name in (*names, "__getattr__"):
            if name in vars(module):
                self._read(vars(module), name)
                self._attributes_of_module(vars(module)[name], names, depth + 1)


_OF_PYTHON = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__annotations__",
        "__annotate__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
        "_backward_cls",
    }
)


class _Texts:
    """Describes the constants in one value. Raises ValueError where something can't be compared.

    Args:
        marks_code: Whether to mark functions and classes by their addresses, to notice that one was replaced.
    """

    def __init__(self, *, marks_code: bool = False) -> None:
        self._marks_code = marks_code
        self._count = 0
        self._around: list[int] = []  # ids of the containers and objects that are being described

    def of(self, value: Any) -> str | None:
        """Returns a text for a constant, or for all constants inside a container or an object; None if it has none."""
        self._count += 1
        if self._count > _MAX_ITEMS:
            raise ValueError(f"more than {_MAX_ITEMS} values")
        if isinstance(value, (ContextVar, threading.local)):
            raise ValueError("another thread may see another value")
        if isinstance(value, _CONSTANTS) and type(value).__module__ in {"builtins", "torch"}:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (np.ndarray, np.generic)):
            return _array(value)
        if type(value) in _PRINTED:
            return repr(value)
        if isinstance(value, _CODE):
            return f"at {id(value)}" if self._marks_code else None
        if id(value) in self._around:
            return None
        self._around.append(id(value))
        texts = [(self.of(key), self.of(item)) for key, item in _parts(value)]
        self._around.pop()
        if isinstance(value, (set, frozenset)):
            texts.sort(key=str)
        known = [f"{key}: {item}" for key, item in texts if item is not None]
        number = next((kind.__repr__(value) for kind in _NUMBERS if isinstance(value, kind)), "")
        is_empty = not known and not number and not (isinstance(value, (tuple, frozenset)) and not value)
        return None if is_empty else f"{type(value).__name__}{number}[{', '.join(known)}]"


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Returns what a container or an object holds: items, and attributes unless its class is torch's or Python's."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, MappingProxyType)):
        parts += value.items()
    elif isinstance(value, (list, tuple, deque)):
        parts += enumerate(value)
    elif isinstance(value, (set, frozenset)):
        parts += [(None, item) for item in value]
    is_settings = isinstance(value, (SimpleNamespace, Namespace, torch.nn.Module))
    if not isinstance(value, (*_CODE, ModuleType, Tensor)) and (is_settings or not is_foreign(type(value).__module__)):
        parts += sorted(getattr(value, "__dict__", {}).items())
        parts += [(name, getattr(value, name)) for name in slots_of(type(value)) if hasattr(value, name)]
    return parts


def _marked(value: Any) -> str | None:
    """Returns a text that changes when anything changes that the identity covers of a container or an object."""
    return _Texts(marks_code=True).of(value)


def _is_current(walk: _Walk) -> bool:
    try:
        return walk.is_current()
    except Exception:  # as in a walk; another thread may also change a container meanwhile
        return False


def _has_whole_storage(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are all that its storage has, so that no other view of it shows more."""
    return layout_of(tensor).span_bytes == tensor.nbytes == tensor.untyped_storage().nbytes()


def _tensor(value: Tensor) -> str | None:
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


def _imported(code: CodeType, package: str) -> Iterator[str]:
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
            yield from _imported(inner, package)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def code_lines(code: CodeType) -> Iterator[str]:
    """Yields lines that are equal for equal code, wherever its file lies."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    yield f"{code.co_name} {code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield f"{[_constant(constant) for constant in constants]}"
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from code_lines(inner)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _texts(code: CodeType) -> Iterator[str]:
    """Yields the texts in code: `getattr` takes names as texts."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)


def _uses_gradients(code: CodeType) -> bool:
    """Whether code has the attribute `grad` of anything but `autograd`, or calls `autograd.backward`."""
    before = None
    for instruction in dis.get_instructions(code):
        name, is_attribute = instruction.argval, instruction.opname in _ATTRIBUTES
        if is_attribute and name in {"grad", "backward"} and (before == "autograd") == (name == "backward"):
            return True
        before = name
    return any(_uses_gradients(inner) for inner in code.co_consts if isinstance(inner, CodeType))


_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})


def _constant(value: Any, depth: int = 0) -> str | None:
    """Returns a text for a constant, or for a container of constants; None for other values."""
    if isinstance(value, _CONSTANTS) and type(value).__module__ in {"builtins", "torch"}:
        return f"{type(value).__name__} {value!r}"
    if depth == _MAX_DEPTH or not isinstance(value, (tuple, list, dict, set, frozenset)) or len(value) > _MAX_ITEMS:
        return None
    if not value and isinstance(value, (list, dict, set)):
        return None  # a cache that nothing was put into so far
    if isinstance(value, dict):
        pairs = [(_constant(key, depth + 1), _constant(item, depth + 1)) for key, item in value.items()]
        texts = [None if None in pair else f"{pair[0]}: {pair[1]}" for pair in pairs]
    else:
        texts = [_constant(item, depth + 1) for item in value]
    if None in texts:
        return None
    known = [text for text in texts if text is not None]
    return f"{type(value).__name__}[{', '.join(sorted(known) if isinstance(value, (set, frozenset)) else known)}]"
