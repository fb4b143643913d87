"""Kernels that torch compiles when the program runs, by NVRTC. They need no compiler on the machine."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Kernel(Protocol):
    """A compiled kernel. Calling it launches it on the current stream of the current device."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any]) -> None:
        """Launches the kernel. Tensors become pointers, and integers of Python become 32 bits."""


def compile_kernel(source: str, name: str) -> Kernel:
    """Compiles a kernel for the current device.

    Args:
        source: The source, which includes nothing.
        name: The name of the kernel, which is `extern "C"`.

    Raises:
        Exception: torch has no compiler for it, or the source does not fit the device.
    """
    kernel: Kernel = torch.cuda._compile_kernel(source, name)
    return kernel
