"""The identity of a custom autograd function: its place in equal files, and the values that it reads.

The value check compares what a function computes in forward. What only its backward reads shows nowhere in forward, so
a trainer and a worker compare which code they run, and the numbers and texts that it reads from its module and its
class. These must be equal before the worker runs the function.

NOTE [Identity of a function]
1. The identity is a digest. It covers the places of the methods of the class, of all functions that they name and that
   are not torch's or Python's own, and so on, of `MAX_FUNCTIONS` functions at most: NOTE [Equal code].
2. It covers the constants that this code reads from modules, classes, metaclasses, functions, closures and defaults,
   also inside containers and attributes of objects, whatever else these hold; NumPy's arrays in the same places; and
   tensors, also in tuples. Values of other types count by their type alone: caches hold those, and differ between
   processes.
3. Whoever changes one of these values gives the function another identity from the next call on. A function that does
   so itself is not recorded, and its replay on a worker fails, because each replay would change the value again.
4. A function has no identity if it has too much code, or code that has no place; or if it reads what is not compared: a
   tensor or array of more than 64 MiB, on an accelerator, or without bytes; a container or object with more than
   `MAX_ITEMS` values inside; a variable that each thread or context has its own value of.
5. Of modules that the code imports when it runs, it covers those that this process has imported.
"""

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from operator import is_, is_not
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash
from torch import Tensor

from backhaul_runtime.program.custom.bytecode import (
    asked_identity,
    imported_modules,
    names_in,
    reads_gradients,
    stored_attributes,
    texts_in,
)
from backhaul_runtime.program.custom.class_names import is_foreign, name_of_class
from backhaul_runtime.program.custom.code_files import file_of, package_state, place_of, why_no_place
from backhaul_runtime.program.custom.value_texts import (
    CODE,
    CONSTANTS,
    constant_text,
    constants_inside,
    has_whole_storage,
    marked,
    parts_of,
    text_of_tensor,
)

MAX_FUNCTIONS = 5_000
"""The most functions and classes that an identity covers."""

_MAX_DEPTH = 4  # of modules inside modules
_MISSING = object()
_NOT_COMPARED = "it has too much code, or reads a tensor or array that can't be compared with the worker's"


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
    def obstacle(self) -> str:
        """Why there is no identity; empty if there is one."""
        return self._present()[0].obstacle

    @property
    def names(self) -> Set[str]:
        """The names in the code, among which are all attributes that it can read."""
        walk = self._present()[0]
        return walk.names | walk.texts

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the identity covers, and that nobody can read more from than what was compared."""
        return [tensor for tensor, _ in self._present()[0].tensors if has_whole_storage(tensor)]

    def _present(self) -> "tuple[_Walk, str]":
        last = self._last
        if last is None or not _is_current(last[0]):
            walk = _Walk()
            try:
                walk.function_class(self._class)
            except Exception:  # objects that the code reads may raise anything when somebody looks at them
                walk = _Walk()
                walk.obstacle = _NOT_COMPARED
            text = "\n".join(walk.lines).encode()
            last = self._last = walk, "" if walk.obstacle else xxhash.xxh3_128_hexdigest(text)
        return last


@functools.cache
def identity_of_class(cls: type) -> CodeIdentity:
    """Returns the identity of a class, which is kept for the life of the process."""
    return CodeIdentity(cls)


def lines_of_class(cls: type, line_of: Callable[[CodeType], str]) -> Iterator[str]:
    """Yields lines that are equal for equal classes: the constants and the code of the class, and of its bases.

    Args:
        cls: A class of any module. Nothing is yielded for bases that are torch's or Python's own.
        line_of: Returns the line for code, which decides how code is compared.
    """
    for base in cls.__mro__:
        for name, value in () if is_foreign(base.__module__) else sorted(vars(base).items()):
            item = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(item, FunctionType):
                yield f"{name} is {line_of(item.__code__)}"
            elif name not in _OF_PYTHON and (text := constant_text(item)) is not None:
                yield f"{name} = {text}"


@functools.cache
def uses_gradients(cls: type) -> bool:
    """Whether methods of a custom autograd function read or set `.grad` of tensors, or call `autograd.backward`."""
    own: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own |= {} if is_foreign(base.__module__) else vars(base)
    methods = [inspect.unwrap(getattr(item, "__func__", item)) for item in own.values() if not isinstance(item, type)]
    return any(reads_gradients(method.__code__) for method in methods if isinstance(method, FunctionType))


_OF_TENSORS = frozenset(
    {
        *("is_leaf", "requires_grad", "grad_fn", "retains_grad", "_version", "_base", "_is_view", "is_inference"),
        *("storage_offset", "untyped_storage", "storage", "_typed_storage", "data_ptr", "_backward_hooks"),
        # These reach what lies between the elements.
        *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize_", "set_"),
        *("_post_accumulate_grad_hooks", "__class__", "__dict__", "__hash__", "__reduce__", "__reduce_ex__"),
        *("hash", "vars", "dir", "repr", "copy", "deepcopy"),
        *("is_anomaly_enabled", "is_anomaly_check_nan_enabled", "initial_seed", "get_rng_state", "manual_seed"),
        "metadata",  # of the context, which is a node of the graph
    }
)
"""Names by which a backward asks for more than the bytes of what was saved, or for a setting that programs lack."""

_UNSEEN_WRITES = frozenset({"numpy", "data", "__array__", "to_dlpack", "from_dlpack", "__dlpack__"})
"""Names by which a backward may write to a tensor so that neither a version counter nor a mode shows it."""

_CLASSES = ("Parameter", "Buffer", "UninitializedParameter", "UninitializedBuffer")
_ASKING = (type, id, hash, vars, dir, repr, is_, is_not, copy.copy, copy.deepcopy)
"""Functions that tell objects apart, which code may have under another name."""

_GENERATED = ("<string>", str(Path(functools.__file__).parent) + os.sep)
"""How names of files of code begin that Python's library has or generates, as for dataclasses."""


def asks_beside_values(cls: type) -> str:
    """Returns what a custom autograd function asks for that no replay has; empty if there is nothing.

    A replay gives it tensors with the bytes of forward, but not the same objects: their class, attributes, version and
    storage are not those of forward. Nor has the context what an earlier backward has stored there.
    """
    return _asked(cls, identity_of_class(cls).digest())


@functools.lru_cache(maxsize=1 << 10)  # by the digest, too: what the code reads may change
def _asked(cls: type, digest: str) -> str:
    forward, _ = _reached(cls, ("forward", "setup_context"))
    classes = next((name for name in _CLASSES if name in forward.texts or _names_class(forward, name)), "")
    if classes:
        return f"asks whether a tensor is a {classes}"
    walk, codes = _reached(cls, ("backward", "vjp"))
    for name in ("backward", "vjp"):
        method = inspect.unwrap(getattr(cls, name))
        if not isinstance(method, FunctionType):
            continue
        if stored := stored_attributes(method.__code__):
            return f"stores {stored} on its context"
        # The code that it calls may name these: much reads by NumPy, and writes are noticed when they happen.
        if unseen := min(_UNSEEN_WRITES & {*names_in(method.__code__), *texts_in(method.__code__)}, default=""):
            return f"may write by {unseen} to a tensor of the trainer"
    names = {name for code in codes for name in (*names_in(code), *texts_in(code))} | walk.texts
    if asked := min(_OF_TENSORS & names, default=""):
        return f"may read {asked} of what it saved"
    if any(any(value is asking for asking in _ASKING) for value in walk.objects):
        return "may ask which object a saved tensor is"
    if any(name in names or _names_class(walk, name) for name in _CLASSES):
        return "asks whether a tensor is a parameter"
    if any(map(reads_gradients, codes)):
        return "uses .grad of tensors in a function that it calls"
    return next(filter(None, map(asked_identity, codes)), "")


def _reached(cls: type, methods: Sequence[str]) -> "tuple[_Walk, list[CodeType]]":
    """Returns a walk through everything that methods reach, and the code among it that people wrote."""
    walk = _Walk()
    for name in methods:
        method = inspect.unwrap(getattr(cls, name, None))  # type: ignore[arg-type]
        if isinstance(method, FunctionType) and not is_foreign(method.__module__):
            walk.function(method)
    codes = [code for _, code, *_ in walk.functions if not code.co_filename.startswith(_GENERATED)]
    walk.texts.update(*(texts_in(code) for code in codes))
    return walk, codes


def _names_class(walk: "_Walk", name: str) -> bool:
    """Whether code names a class of torch's own tensors, perhaps under another name."""
    cls = getattr(torch.nn.parameter, name)
    return any(value is cls for value in walk.objects) or any(
        name in code.co_names for _, code, *_ in walk.functions if not code.co_filename.startswith(_GENERATED)
    )


class _Walk:
    """Visits code and what it reads."""

    def __init__(self) -> None:
        self.lines = [f"python {sys.version_info[:3]}"]
        self.obstacle = ""  # to the identity
        self.names: set[str] = set()
        self.texts: set[str] = set()  # that the code may use as names, wherever they are
        self.objects: list[Any] = []  # the classes and functions that the code reads
        # Of what was visited, by its id. Only functions and classes count: caches hold other things, and differ.
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._alive: list[Any] = []  # so that no id is used twice
        # By the id of the mapping, which the second field keeps.
        self._reads: dict[int, tuple[Mapping[str, Any], list[str], list[Any]]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._mutable: list[tuple[Any, str | None]] = []
        self.functions: list[tuple[FunctionType, CodeType, Any, Any]] = []  # each with its code and defaults
        self.tensors: list[tuple[Tensor, str]] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []  # of classes, which may get another attribute

    def is_current(self) -> bool:
        """Whether everything that was visited is still the same."""
        return (
            all(all(map(is_, map(mapping.get, names), values)) for mapping, names, values in self._reads.values())
            and all(_contents(cell) is value for cell, value in self._cells)
            and all(marked(value) == text for value, text in self._mutable)
            and all(
                function.__code__ is code and function.__defaults__ is defaults and function.__kwdefaults__ is keywords
                for function, code, defaults, keywords in self.functions
            )
            and all(len(mapping) == size for mapping, size in self._sizes)
            and all(text_of_tensor(tensor) == text for tensor, text in self.tensors)
        )

    def function_class(self, cls: type) -> None:
        """Visits a class, its bases, its metaclass, and everything that their methods read."""
        if not is_foreign(type(cls).__module__):
            self.function_class(type(cls))
        for base in cls.__mro__:
            if not is_foreign(base.__module__) or base is cls:
                self._class(base)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._numbers:
            return False
        if len(self._alive) >= MAX_FUNCTIONS:
            self.obstacle = _NOT_COMPARED
            return False
        self._numbers[id(value)] = self._count
        self._count += isinstance(value, (FunctionType, type))
        self._alive.append(value)
        return True

    def _class(self, cls: type) -> None:
        if not self._is_new(cls):
            return
        self.lines.append(f"class {name_of_class(cls)} of {[base.__qualname__ for base in cls.__bases__]}")
        mapping = vars(cls)
        self._sizes.append((mapping, len(mapping)))
        for name in sorted(mapping):
            is_code = issubclass(cls, torch.nn.Module) and constant_text(mapping[name]) is None
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
        if isinstance(value, str):
            self.texts.add(value)
        elif isinstance(value, CODE):
            self.objects.append(value)
        if isinstance(value, FunctionType):
            self.function(value)
            self.lines.append(f"{name} is function {self._numbers.get(id(value))}")
        elif isinstance(value, type):
            if not is_foreign(value.__module__):
                self.function_class(value)
            self.lines.append(f"{name} is {name_of_class(value)} {self._numbers.get(id(value))}")
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self.lines.append(f"{name} is {value.__name__}")
            self._note_files(value.__module__)
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
        self.lines.append(f"{name}: {name_of_class(type(value))} {constants_inside(value)}")
        if type(value) in CONSTANTS:
            return
        self._mutable.append((value, marked(value)))
        self._inside(name, value, in_tuple=True)
        for inner in ("__wrapped__", "fn", "func"):  # caches and descriptors of functools, and Triton's kernels
            inside = getattr(value, "__dict__", {}).get(inner)
            if isinstance(inside, FunctionType):
                self.function(inside)

    def _inside(self, name: str, value: Any, *, in_tuple: bool) -> None:
        """Visits the code that a container or an object holds, and the tensors in tuples."""
        if not self._is_new(value):
            return
        if not is_foreign(type(value).__module__):
            self.function_class(type(value))
        in_tuple &= isinstance(value, tuple)
        if type(value).__name__.startswith("Weak"):  # a table by objects, whose keys nobody can compare
            self.obstacle = _NOT_COMPARED
        for key, item in parts_of(value):
            if isinstance(key, Tensor):
                self.obstacle = _NOT_COMPARED
            self.texts.update(one for one in (key, item) if isinstance(one, str))
            inner = f"{name}[{key if isinstance(key, (str, int)) else type(key).__name__}]"
            if isinstance(item, CODE) or (in_tuple and isinstance(item, Tensor)):
                self._value(inner, item)
            elif type(item) not in CONSTANTS:
                self._inside(inner, item, in_tuple=in_tuple)

    def _tensor(self, name: str, value: Tensor) -> None:
        text = text_of_tensor(value)
        if text is None:  # nothing would show whether trainer and worker have the same values
            self.obstacle = _NOT_COMPARED
        else:
            self.tensors.append((value, text))
        self.lines.append(f"{name}: {text}")

    def function(self, function: FunctionType) -> None:
        """Visits a function, and everything that it reads."""
        if not self._is_new(function):
            return
        code = function.__code__
        self.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        self.lines.append(place_of(code))
        if not self.lines[-1]:  # without a place nothing tells it from other code
            self.obstacle = why_no_place(code)
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
                    self.function(inside)
        if is_foreign(function.__module__):  # what it reads is of Python or torch, whose versions are compared
            return
        self._sizes.append((vars(function), len(vars(function))))
        for name in vars(function):
            self._read(vars(function), name)
        texts = {text for text in texts_in(code) if text.isidentifier()}  # `getattr` and `globals()` take those
        names = sorted({*names_in(code), *texts})
        self.names.update(names, texts_in(code))
        # A name that the module lacks is read too, because somebody may set it. A text without a global is only a text.
        for name in names:
            if name not in texts or name in function.__globals__:
                self._read(function.__globals__, name)
                self._attributes_of_module(function.__globals__.get(name), names)
        package = str(function.__globals__.get("__package__") or "")
        for module in sorted(imported_modules(code, package)):  # Rule 5
            if not is_foreign(module) and module in sys.modules:
                self._attributes_of_module(sys.modules[module], names)

    def _note_files(self, module: str | None) -> None:
        """Visits a module that may be compiled: the functions of such a module have no place."""
        if module is not None and not is_foreign(module) and file_of(module):
            self.lines.append(package_state(module))

    def _attributes_of_module(self, module: Any, names: Sequence[str], depth: int = 0) -> None:
        """Visits what code reads from a module that it names, if `names` are all names in the code."""
        if not isinstance(module, ModuleType) or is_foreign(module.__name__) or depth == _MAX_DEPTH:
            return
        self._note_files(module.__name__)
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


def _is_current(walk: _Walk) -> bool:
    try:
        return walk.is_current()
    except Exception:  # as in a walk; another thread may also change a container meanwhile
        return False


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING
