"""Builds the extension module of the simulated device, once for each version of its sources, torch and Python."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NATIVE = HERE / "native"
FOLDER = ROOT / "build/simulated_cuda"
TORCH = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]
"""The only version of torch for which the device is built: it depends on torch's internals."""

_FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS", "-Wall", "-Wno-unused-parameter")


def obstacle() -> str:
    """Returns why the device cannot be built here; empty if it can be."""
    present = version("torch").partition("+")[0]
    if present != TORCH:
        return f"the simulated CUDA device needs torch {TORCH}, not {present}"
    return "" if compiler() else "the simulated CUDA device needs a C++ compiler"


def library() -> Path:
    """Returns the path of the extension module, which is built first if it is missing.

    Raises:
        RuntimeError: It cannot be built here.
    """
    if why := obstacle():
        raise RuntimeError(why)
    from torch import __file__ as torch_file

    torch = Path(torch_file).parent
    digest = hashlib.sha256(f"{version('torch')} {sys.version} {_FLAGS}".encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    target = FOLDER / f"{digest.hexdigest()[:16]}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that test at the same time build it once
        if not target.exists():
            _build(torch, target)
    return target


def _build(torch: Path, target: Path) -> None:
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    libraries = [
        f"-L{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder) / target.name
        system = [part for include in includes for part in ("-isystem", str(include))]
        command = [compiler(), *_FLAGS, *system, str(NATIVE / "module.cpp"), "-o", str(made), *libraries]
        subprocess.run(command, check=True)
        made.rename(target)


def compiler() -> str:
    """Returns the path of the C++ compiler; empty if there is none."""
    from shutil import which

    return which(os.environ.get("CXX", "g++")) or ""
