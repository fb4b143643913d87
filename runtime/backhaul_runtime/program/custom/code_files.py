"""Which code a process runs: the versions of packages, the contents of their files, and where in them a function is.

NOTE [Equal code]
1. Two processes run the same function if it stands at the same place in equal files of a package of equal version.
2. The files of a package are all that its directories hold of Python, C, C++ and CUDA, and compiled extensions. A
   module that no package with an `__init__.py` contains has only its own file. They are read once per process.
3. A file counts only for code that it gives when it is compiled. So a file that was changed after it was imported is
   noticed, and so is a function that was replaced or that `exec` has made: it has no place.
4. Of torch, of NumPy and of Python itself only the versions are compared.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import file_digest
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

import xxhash

from backhaul_runtime.program.custom.bytecode import code_lines
from backhaul_runtime.program.custom.class_names import is_foreign

NO_VERSION = "-"

_SUFFIXES = frozenset(
    {".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".pyd", ".dll", ".dylib"}
)
"""How the names of files end that hold code."""


@cache
def package_version(module: str) -> str:
    """Returns the version of the package that a module belongs to, or `NO_VERSION`."""
    package = module.partition(":")[0].partition(".")[0]
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", NO_VERSION))


@cache
def package_state(module: str) -> str:
    """Returns the version and the digest of the files of the package of an imported module; empty if it has no files.

    Args:
        module: The module's name, or that of a class in it as "module:qualified name".
    """
    package = _package_of(module.partition(":")[0])
    lines = "\n".join(f"{name} {digest}" for name, digest in _files(package).values())
    digest = xxhash.xxh3_128_hexdigest(os.fsencode(lines))
    return f"{package_version(package)} (files {digest})" if lines else ""


def place_of(code: CodeType) -> str:
    """Returns where code stands, with the state of its package. Empty for code that no file of a package gives."""
    known = _places.get(id(code))
    if known is None:
        known = code, _place(code)
        if known[1]:  # code that has none may be made in each call
            _places[id(code)] = known
    return known[1]


def why_no_place(code: CodeType) -> str:
    """Returns why code has no place, for people."""
    return f"the code of {code.co_qualname} is not in the file of an imported module as it is now ({code.co_filename})"


_places: dict[int, tuple[CodeType, str]] = {}  # by the id of the code, which is kept so that no id is used twice
_modules: dict[str, str] = {}  # the name of each module by its file


def _place(code: CodeType) -> str:
    if _is_generated(code):
        return f"{code.co_qualname} {code.co_varnames} {code.co_names}"
    module = _module_at(code.co_filename)
    if is_foreign(module):
        return f"{module} {package_version(module)} {code.co_qualname} {code.co_firstlineno}"
    path, lines = os.path.normpath(code.co_filename), list(code_lines(code))
    _, digest = _files(_package_of(module)).get(path, ("", ""))
    for number, compiled in enumerate(_compiled(path, digest) if digest else ()):
        is_there = (compiled.co_qualname, compiled.co_firstlineno) == (code.co_qualname, code.co_firstlineno)
        if is_there and list(code_lines(compiled)) == lines:
            return f"{module} {package_state(module)} {code.co_qualname} {number}"
    return ""


def _is_generated(code: CodeType) -> bool:
    """Whether Python's library has generated code from the fields of a dataclass or of a named tuple."""
    is_of_dataclass = code.co_qualname.startswith("__create_fn__.<locals>.")
    return code.co_filename == "<string>" and (is_of_dataclass or code.co_names == ("_tuple_new",))


def _module_at(file: str) -> str:
    """Returns the name of the module that was imported from a file, or "__main__" if there is none."""
    if file.startswith("<frozen "):  # a part of Python's library
        return file.removeprefix("<frozen ").removesuffix(">")
    if file not in _modules:
        _modules.update({known: name for name in reversed(sys.modules.copy()) if (known := file_of(name))})
    return _modules.get(file, "__main__")


def _package_of(module: str) -> str:
    """Returns the outermost package that has code of its own and that a module is in, or else the module."""
    parts = module.split(".")
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return next((name for name in packages if file_of(name)), module)


def file_of(module: str) -> str:
    """Returns the file of an imported module; empty if it has none. That of the main module is no package's."""
    known = getattr(sys.modules.get(module), "__dict__", {})  # its attributes: some modules import others for one
    file: Any = known.get("__file__")
    return file if isinstance(file, str) and module != "__main__" else ""


@cache
def _files(package: str) -> Mapping[str, tuple[str, str]]:
    """Returns the name inside the package and the digest of each of its files, by path; nothing if one is unreadable.

    Args:
        package: The name of an imported package, or of a module without one.
    """
    files = {}
    try:
        for root, path in _paths(package):
            with path.open("rb") as file:
                digest = file_digest(file, xxhash.xxh3_128).hexdigest()
            files[os.path.normpath(path)] = str(path.relative_to(root)), digest
    except OSError:
        return {}
    return files


def _paths(package: str) -> Iterator[tuple[Path, Path]]:
    """Yields the files of a package, each with the directory that it is named in."""
    roots = getattr(sys.modules.get(package), "__path__", None)
    if roots is None and (file := file_of(package)):
        yield Path(file).parent, Path(file)
    for root in map(Path, roots or ()):
        for path in sorted(root.rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                yield root, path


@cache
def _compiled(path: str, digest: str) -> Sequence[CodeType]:
    """Returns all code of a Python file, in an order that its contents decide; none if its digest is another by now."""
    try:
        text = Path(path).read_bytes()
        with warnings.catch_warnings(action="ignore"):  # whoever imported the file has seen them
            is_same = xxhash.xxh3_128_hexdigest(text) == digest
            codes = [compile(text, path, "exec", dont_inherit=True)] if is_same else []
    except (OSError, SyntaxError, ValueError):
        return ()
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return codes
