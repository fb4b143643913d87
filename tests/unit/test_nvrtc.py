"""The kernel of the sums compiles for GPUs, by the compiler that torch uses when a program runs. It needs no GPU."""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from backhaul_runtime.tensors.sums_kernel import KERNEL_CODE

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    """The library of the package nvidia-cuda-nvrtc, which `make nightly` installs."""
    package = importlib.util.find_spec("nvidia")
    assert package is not None, "`make nightly` installs nvidia-cuda-nvrtc"
    libraries = [
        path for folder in package.submodule_search_locations or () for path in Path(folder).rglob("libnvrtc.so*")
    ]
    assert libraries, "`make nightly` installs nvidia-cuda-nvrtc"
    return ctypes.CDLL(str(min(libraries)))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_code_compiles(nvrtc: Any, architecture: str) -> None:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), KERNEL_CODE.encode(), b"sums.cu", 0, None, None) == 0
    option = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    status = nvrtc.nvrtcCompileProgram(program, 1, option)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (status, log.value.decode()) == (0, "")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 1000
