"""Kernels that torch compiles when the program runs, by NVRTC. They need no compiler on the machine."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """A compiled kernel. Calling it launches it on the current stream of the current device."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        """Launches the kernel. Tensors become pointers, and integers of Python become 32 bits."""


def compile_kernel(code: str, name: str) -> Kernel:
    """Compiles a kernel for the current device.

    Args:
        code: The CUDA code, which includes nothing.
        name: The name of the kernel, which is `extern "C"`.

    Raises:
        Exception: torch has no compiler for it, or the code does not fit the device.
    """
    kernel: Kernel = torch.cuda._compile_kernel(code, name)
    return kernel
