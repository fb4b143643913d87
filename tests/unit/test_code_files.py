"""Which code a process runs: the files of packages, and the places of functions in them."""

import functools
import importlib
import itertools
import os
import textwrap
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul_runtime.program.custom.code_files import package_state, place_of
from backhaul_runtime.program.custom.code_identity import CodeIdentity
from backhaul_runtime.program.custom.names import OfferedNames

CODE = """
import torch
from dataclasses import dataclass
from typing import NamedTuple

class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return helper(gradient) * 0.5

def helper(gradient):
    return gradient

@dataclass
class Fields:
    slope: float = 0.5

class Pair(NamedTuple):
    slope: float = 0.5

class OfFields(Halves):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * Fields().slope * Pair().slope

two = [lambda x: x * 2, lambda x: x * 3]
"""

Import = Callable[..., Any]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """Writes files, and imports a module from them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_and_import(module: str, /, **files: str) -> Any:
        for name, text in files.items():
            path = tmp_path / name.replace("__in__", "/").replace("__dot__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return importlib.import_module(module)

    return write_and_import


def unique(name: str) -> str:
    """A name that no module has yet: what was read of a package stays for the life of the process."""
    return f"{name}_{next(_count)}"


_count = itertools.count()


def package(name: str, **others: str) -> dict[str, str]:
    """The files of a package with a module."""
    files = {"__init____dot__py": "", "ops__dot__py": CODE, **others}
    return {f"{name}__in__{file}": text for file, text in files.items()}


@pytest.mark.parametrize(
    ("others", "is_same"),
    [
        ({}, True),
        ({"table__dot__json": "{}", "ops__dot__pyc": ""}, True),
        ({"unused__dot__py": ""}, False),
        ({"ops__dot__py": CODE + "# a comment\n"}, False),
        ({"kernel__dot__so": "compiled"}, False),
        ({"csrc__in__kernel__dot__cu": "__global__"}, False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_packages_are_the_same_if_their_code_is(others: dict[str, str], is_same: bool, imported: Import) -> None:
    left, right = unique("left"), unique("right")
    imported(f"{left}.ops", **package(left))
    imported(f"{right}.ops", **package(right, **others))
    assert (package_state(f"{left}.ops") == package_state(f"{right}.ops:Halves")) is is_same


def test_a_module_without_a_package_is_its_own_file(imported: Import) -> None:
    one = imported("alone_one", alone_one__dot__py=CODE, alone_other__dot__py="")
    two = imported("alone_space.alone_one", alone_space__in__alone_one__dot__py=CODE)
    assert package_state("alone_one") == package_state("alone_space.alone_one") != ""
    assert place_of(one.helper.__code__)
    assert place_of(two.helper.__code__)


def test_lambdas_on_one_line_have_two_places(imported: Import) -> None:
    module = imported("on_one_line", on_one_line__dot__py=CODE)
    assert len({place_of(one.__code__) for one in module.two} - {""}) == 2


def test_code_has_its_place_after_it_has_run(imported: Import) -> None:
    """CPython rewrites code that runs often."""
    module = imported("run_often", run_often__dot__py=CODE)
    for number in range(1000):
        module.helper(number)
    assert place_of(module.helper.__code__)


@pytest.mark.parametrize("name", ["Halves", "OfFields"])
def test_a_function_has_an_identity(name: str, imported: Import) -> None:
    package_name = unique("identity")
    module = imported(f"{package_name}.ops", **package(package_name))
    assert CodeIdentity(getattr(module, name)).digest()


@pytest.mark.parametrize("is_read", [False, True], ids=["before", "after"])
def test_a_file_that_changed_after_its_import_keeps_a_function_here(
    is_read: bool, imported: Import, tmp_path: Path
) -> None:
    """Before or after its package was read. A worker that starts now would import other code."""
    name = unique("changed")
    module = imported(f"{name}.ops", **package(name))
    if is_read:
        package_state(name)
    (tmp_path / name / "ops.py").write_text(CODE.replace("0.5", "0.7"))
    offer = OfferedNames({name: package_state(name)}, {f"{name}.ops:Halves": "as the worker says"})
    assert "the code of Halves" in offer.why_not_function(module.Halves)
    assert CodeIdentity(module.Halves).digest() == ""


def _exec() -> Any:
    scope: dict[str, Any] = {}
    exec("def helper(gradient): return gradient * 3", scope)
    return scope["helper"]


def _with_other_code(module: Any) -> Any:
    return types.FunctionType(_exec().__code__, vars(module))


def _from_main(module: Any) -> Any:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def helper(gradient): return gradient * 3", "train.py", "exec"), scope)
    return scope["helper"]


def _from_its_file(module: Any) -> Any:
    scope: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(f"{CODE}\nhelper = lambda gradient: gradient * 3", module.__file__, "exec"), scope)
    return scope["helper"]


@pytest.mark.parametrize(
    "replace",
    [lambda _: _exec(), _with_other_code, _from_main, _from_its_file],
    ids=["exec", "other code", "the main module", "its own file"],
)
def test_a_function_that_is_in_no_file_of_a_package_is_noticed(replace: Callable[[Any], Any], imported: Import) -> None:
    name = unique("replaced")
    module = imported(f"{name}.ops", **package(name))
    module.helper = replace(module)
    identity = CodeIdentity(module.Halves)
    assert "is not in the file of an imported module" in identity.obstacle
    assert identity.digest() == ""


def test_a_helper_of_another_package_counts_with_its_files(imported: Import, tmp_path: Path) -> None:
    module = imported("with_helper.ops", **package("with_helper"))
    digests = {CodeIdentity(module.Halves).digest()}
    for number in range(2):
        text = f"def helper(gradient): return gradient * 3\n# {number}\n"
        module.helper = imported(f"helping{number}", **{f"helping{number}__dot__py": text}).helper
        digests.add(CodeIdentity(module.Halves).digest())
    assert len(digests - {""}) == 3


def test_a_name_of_torch_does_not_make_a_function_torchs(imported: Import) -> None:
    module = imported("wrapped", wrapped__dot__py=CODE)
    before = CodeIdentity(module.Halves).digest()
    module.helper = functools.wraps(torch.nn.functional.softmax)(lambda gradient: gradient * 3)
    assert "" != CodeIdentity(module.Halves).digest() != before
    assert torch.__version__ not in place_of(module.helper.__code__)


def test_a_name_for_one_of_two_closures_is_compared(imported: Import) -> None:
    """Both have the same code, and the function reads both under names of their own before the third."""
    text = """
    import torch
    def make(slope):
        return lambda gradient: gradient * slope
    first, second = make(0.5), make(0.7)
    used = first
    class Chosen(torch.autograd.Function):
        @staticmethod
        def backward(ctx, gradient):
            return first(gradient) + second(gradient) + used(gradient)
    """
    module = imported("closures", closures__dot__py=text)
    before = CodeIdentity(module.Chosen).digest()
    module.used = module.second
    assert "" != CodeIdentity(module.Chosen).digest() != before


def test_what_a_cache_holds_is_not_compared(imported: Import) -> None:
    """Also if a function is visited after it."""
    text = """
    import torch
    cache = {}
    class Cached(torch.autograd.Function):
        @staticmethod
        def backward(ctx, gradient):
            return later(gradient) * cache.get(1, [object()])
    def later(gradient):
        return gradient
    """
    module = imported("caching", caching__dot__py=text)
    before = CodeIdentity(module.Cached).digest()
    module.cache.update({1: [object()], 2: [object(), [object()]]})
    assert "" != CodeIdentity(module.Cached).digest() == before


def test_a_module_without_files_keeps_a_function_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "zipped.zip"))
    zipped = importlib.import_module("zipped")
    assert package_state("zipped") == ""
    assert CodeIdentity(zipped.Halves).digest() == ""
    offer = OfferedNames({"zipped": package_state("zipped")}, {"zipped:Halves": ""})
    assert "the files of its package are not found" in offer.why_not_function(zipped.Halves)


def test_the_code_of_python_and_torch_has_a_place() -> None:
    """Of them only the versions are compared."""
    assert torch.__version__ in place_of(torch.nn.functional.softmax.__code__)
    assert place_of(textwrap.dedent.__code__)
    assert place_of(os.path.join.__code__)  # a frozen module
