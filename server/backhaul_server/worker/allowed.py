"""Imports what the operator of a worker allows, and fills the worker's table of names from it.

This is the only place where a worker imports anything beside its own modules. It happens before the worker listens, and
the names come from the operator's command line: NOTE [Names] in `backhaul_runtime.program.custom.names`.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import names_code
from backhaul_runtime.program.custom.adapters import adapter_of
from backhaul_runtime.program.custom.class_names import is_foreign, is_found_by_name, name_of_class
from backhaul_runtime.program.custom.code_files import package_state
from backhaul_runtime.program.custom.code_identity import identity_of_class
from backhaul_runtime.program.custom.names import IMPORTS, OfferedNames, names
from backhaul_runtime.torch_internals.libraries import (
    defined_ops,
    module_of_op,
    noting_libraries,
    overload_of,
    overload_of_custom_op,
    registered_ops,
    takes_text,
)

_FETCHING = ("kernels",)
"""Packages that download code and run it. Libraries that find none of them use code of their own."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Variables that keep libraries from downloading."""


def import_allowed(allowed: Sequence[str]) -> OfferedNames:
    """Imports what an operator allows and notes its functions, ops and types in the table of this process.

    Args:
        allowed: Names of packages or modules, or of single classes as "module:qualified name".

    Returns:
        What a trainer is told about it.

    Raises:
        SettingError: Something cannot be imported, or is no name.
    """
    if not allowed:
        return OfferedNames()
    _forbid_downloads()
    before = registered_ops()
    with noting_libraries(is_foreign) as libraries, _quiet():
        for entry in allowed:
            _import(entry)
    whole = [entry for entry in allowed if ":" not in entry]
    names.ops |= set(_ops(before, whole, libraries))
    for function in _subclasses(torch.autograd.Function):
        if _is_inside(function.__module__, whole) and is_found_by_name(function):
            names.functions[name_of_class(function)] = function
    for cls in _types(whole):
        names.types[name_of_class(cls)] = cls
    for entry in allowed:
        if ":" in entry:
            _add_class(entry)
    names.identities |= {name: identity_of_class(function).digest() for name, function in names.functions.items()}
    return OfferedNames(
        packages={entry: package_state(entry) for entry in allowed},
        functions=dict(names.identities),
        ops=frozenset(names.ops),
        types=frozenset(names.types),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Sends what modules print to standard error: the first line of standard output says that the worker is ready."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _forbid_downloads() -> None:
    """Keeps the libraries that will be imported from fetching code, now and when they run."""
    os.environ.update(_OFFLINE)
    modules: dict[str, Any] = sys.modules
    for package in _FETCHING:
        modules[package] = None  # an import of it then raises ModuleNotFoundError


def _import(entry: str) -> None:
    module = entry.partition(":")[0]
    if not names_code(entry) or is_foreign(module):
        raise SettingError(
            f'--allow "{entry}": not the name of a package or module that can be allowed. Write the name of an '
            "installed one, other than torch and Python's own, or of a class in it as module:name"
        )
    if module.partition(".")[0] in _FETCHING:
        raise SettingError(f'--allow "{entry}": this package downloads code, which a worker must not run')
    for name in IMPORTS.get(module, (module,)):
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
            if name != module and isinstance(error, ModuleNotFoundError):
                continue  # a version of the package without that part
            raise SettingError(
                f'--allow "{entry}": importing {name} failed: {type(error).__name__}: {error}. '
                "Install it for the worker, or add its directory to PYTHONPATH"
            ) from error


def _add_class(entry: str) -> None:
    module, _, qualified = entry.partition(":")
    cls: Any = sys.modules[module]
    for part in qualified.split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and issubclass(cls, torch.autograd.Function):
        names.functions[name_of_class(cls)] = cls
    elif isinstance(cls, type) and adapter_of(cls) is not None:
        names.types[name_of_class(cls)] = cls
    elif (op := overload_of_custom_op(cls)) is not None:
        names.ops.add(str(op))
    else:
        raise SettingError(
            f'--allow "{entry}": {qualified} is no torch.autograd.Function, no op, and no class with an adapter'
        )


def _subclasses(cls: type) -> Iterator[type]:
    inner: type
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _is_inside(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _types(packages: Sequence[str]) -> Iterator[type]:
    """Yields the classes of the packages whose objects programs may hold."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and _is_inside(name, packages):
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name and adapter_of(value) is not None:
                    yield value


def _ops(before: frozenset[str], packages: Sequence[str], libraries: Mapping[str, set[str]]) -> Iterator[str]:
    """Yields the names of the ops that the packages have registered.

    An op written in C++ has a namespace with the package's name, and takes no text: it might be the name of a file.
    """
    defined = {name for name in defined_ops() if _is_inside(module_of_op(name), packages)}
    for qualified in sorted((registered_ops() - before) | defined):
        namespace = qualified.partition("::")[0]
        is_python = qualified in defined or any(_is_inside(m, packages) for m in libraries.get(namespace, ()))
        is_own = namespace in {package.partition(".")[0] for package in packages}
        if is_python or (is_own and not takes_text(overload_of(qualified))):
            yield str(overload_of(qualified))
