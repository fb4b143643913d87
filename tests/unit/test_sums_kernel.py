"""The kernel of the sums of a digest, compiled for the CPU: it gives what torch's own ops give."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_runtime.tensors.digest import torch_sums
from backhaul_runtime.tensors.sums_kernel import KERNEL_CODE, NAME
from support.simulated_cuda.build import compiler
from support.simulated_cuda.kernels import compile_for_host

DTYPES = [
    *(torch.uint8, torch.int8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32),
    *(torch.int64, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16),
]


@pytest.fixture(scope="module")
def kernel() -> Any:
    if not compiler():
        pytest.skip("needs a C++ compiler")
    return compile_for_host(KERNEL_CODE, NAME)


def kernel_sums(kernel: Any, data: torch.Tensor, blocks: int) -> list[int]:
    sums = torch.zeros(2, dtype=torch.int64)
    words = (ctypes.c_int64 * 4)(data.data_ptr(), data.numel() & 0xFFFFFFFF, data.numel() >> 32, sums.data_ptr())
    kernel(ctypes.c_uint(blocks), words)
    return sums.tolist()


@settings(max_examples=200)
@given(st.sampled_from(DTYPES), st.integers(0, 700), st.integers(0, 40), st.integers(1, 5), st.integers(0, 2**32))
def test_the_sums_are_those_of_torch(
    kernel: Any, dtype: torch.dtype, size: int, offset: int, blocks: int, seed: int
) -> None:
    """Of tensors of every dtype and size, whose memory begins anywhere."""
    draws = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (offset + size * dtype.itemsize,), dtype=torch.uint8, generator=draws)
    data = memory[offset:]
    assert kernel_sums(kernel, data, blocks) == torch_sums(data).tolist()


@pytest.mark.slow
def test_large_tensors_and_the_pieces_of_torchs_version(kernel: Any) -> None:
    data = torch.randint(0, 256, (9_000_003,), dtype=torch.uint8)
    whole = torch_sums(data).tolist()
    assert kernel_sums(kernel, data, 1056) == whole
    changed = data.clone()
    changed[8_388_608] += 1  # in the last piece
    assert [a == b for a, b in zip(torch_sums(changed).tolist(), whole, strict=True)] == [False, False]
