"""The versions of what computes on CUDA: NVIDIA's driver, and the libraries that torch has loaded.

They are asked of the loaded libraries themselves, because a process can load others than torch was built with.
No function here initialises CUDA.
"""

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
_PARTS = range(3)  # of the version of cuBLAS: major, minor and patch level


@cache
def library_versions() -> Mapping[str, str]:
    """Returns the versions of the driver and the libraries by name. Those that can't be found out are left out."""
    versions = {
        "driver": driver_version(_text(_DRIVER)),
        "cudnn": ".".join(map(str, torch._C._cudnn.getRuntimeVersion())) if torch._C._has_cudnn else "",
        "cublas": _cublas_version(loaded_library("libcublas.so", _text(_MAPS))),
        "cublaslt": _cublaslt_version(loaded_library("libcublasLt.so", _text(_MAPS))),
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


def _cublas_version(path: str) -> str:
    if not path:
        return ""
    get, numbers = ctypes.CDLL(path).cublasGetProperty, [ctypes.c_int(-1) for _ in _PARTS]
    for part, number in zip(_PARTS, numbers, strict=True):
        get(part, ctypes.byref(number))
    return ".".join(str(number.value) for number in numbers)


def _cublaslt_version(path: str) -> str:
    if not path:
        return ""
    get = ctypes.CDLL(path).cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return str(get())
