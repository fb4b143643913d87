"""The versions of what computes on CUDA: NVIDIA's driver, and the libraries that torch has loaded.

They are asked of the loaded libraries themselves, because a process can load others than torch was built with.
No function here initialises CUDA.
"""

import ctypes
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
_MISSING = "/no/such/library"  # an empty path would stand for the program itself
_PARTS = range(3)  # of the version of cuBLAS: major, minor and patch level


@cache
def library_versions() -> Mapping[str, str]:
    """Returns the versions of the driver and the libraries by name. Those that can't be found out are left out."""
    versions = {
        "driver": driver_version(_text(_DRIVER)),
        "cudnn": ".".join(map(str, torch._C._cudnn.getRuntimeVersion())) if torch._C._has_cudnn else "",
        "cublas": cublas_version(loaded_library("libcublas.so", _text(_MAPS)) or _MISSING),
        "cublaslt": cublaslt_version(loaded_library("libcublasLt.so", _text(_MAPS)) or _MISSING),
    }
    return {name: version for name, version in versions.items() if version}


def driver_version(report: str) -> str:
    """Returns the version of NVIDIA's driver from what its kernel module reports; empty if it is not in the text."""
    found_version = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", report)
    return found_version[1] if found_version else ""


def loaded_library(name: str, maps: str) -> str:
    """Returns the path of a shared library that this process has loaded; empty if it has not.

    Args:
        name: The start of the file's name, such as "libcublas.so".
        maps: The memory map of the process, as the kernel shows it.
    """
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if f"/{name}" in line)
    return next(paths, "")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def cublas_version(path: str) -> str:
    """Returns the version of a loaded cuBLAS; empty if the library does not tell it."""
    numbers = [ctypes.c_int(-1) for _ in _PARTS]
    with suppress(OSError, AttributeError):
        get = ctypes.CDLL(path).cublasGetProperty
        if not any(get(part, ctypes.byref(number)) for part, number in zip(_PARTS, numbers, strict=True)):
            return ".".join(str(number.value) for number in numbers)
    return ""


def cublaslt_version(path: str) -> str:
    """Returns the version of a loaded cuBLASLt; empty if the library does not tell it."""
    with suppress(OSError, AttributeError):
        get = ctypes.CDLL(path).cublasLtGetVersion
        get.restype = ctypes.c_size_t
        return str(get())
    return ""
