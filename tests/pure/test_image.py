"""What builds the container image: scripts that are no part of the package."""

import importlib.util
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "deploy/image" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requirements_are_those_of_the_project_and_of_the_extras_asked_for() -> None:
    text = '[project]\ndependencies = ["a>=1", "b"]\n[project.optional-dependencies]\nx = ["c<2"]\ny = ["d"]\n'
    requirements = script("requirements").requirements
    assert requirements(text, ["x"]) == ["a>=1", "b", "c<2"]
    assert requirements(text, ["x", "y"]) == ["a>=1", "b", "c<2", "d"]
    with pytest.raises(ValueError, match="no extra z: the extras are x, y"):
        requirements(text, ["x", "z"])


def test_those_of_this_project_can_be_told() -> None:
    listed = script("requirements").requirements((ROOT / "pyproject.toml").read_text(), ["server"])
    assert any(requirement.startswith("torch") for requirement in listed)
    assert any(requirement.startswith("fastapi") for requirement in listed)


def test_a_library_without_symbols_still_loads(tmp_path: Path) -> None:
    original = Path(str(import_module("xxhash._xxhash").__file__))
    library = tmp_path / "library.so"
    shutil.copy(original, library)
    gone_bytes = script("slim").strip_symbols(library)
    assert gone_bytes > 0
    assert library.stat().st_size == original.stat().st_size - gone_bytes
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).PyInit__xxhash"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_library_stays_as_it_is(tmp_path: Path) -> None:
    text = tmp_path / "linker_script.so"
    text.write_text("GROUP ( libm.so.6 )")
    assert script("slim").strip_symbols(text) == 0
    assert text.read_text() == "GROUP ( libm.so.6 )"


@pytest.mark.parametrize("for_compiling", [False, True])
def test_only_what_nobody_imports_is_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, for_compiling: bool
) -> None:
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    for name in (
        "numpy/core.py",
        "numpy/linalg/tests/test_it.py",
        "setuptools/__init__.py",
        "torch/bin/TCPStoreTest",
        "torch/bin/torch_shm_manager",
        "torch/include/a.h",
        "torch/lib/libtorch_cpu.so",
        "torch/lib/libtorch_python.so",
        "torch/testing/__init__.py",
        "xxhash/tests.py",
    ):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_bytes(bytes(500_000))
    script("slim").main(tmp_path / "venv", for_compiling=for_compiling)
    left = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert left == {
        "numpy/core.py",
        "torch/bin/torch_shm_manager",
        *(["setuptools/__init__.py", "torch/include/a.h"] if for_compiling else []),
        "torch/lib/libtorch_cpu.so",
        "torch/lib/libtorch_python.so",
        "torch/testing/__init__.py",
        "xxhash/tests.py",
    }
    said = "slim: 5 MB -> 4 MB\n" if for_compiling else "slim: 5 MB -> 3 MB\n"
    assert capsys.readouterr().out.endswith(said)
