"""The two sums of a digest as one kernel, which reads each byte once and needs no memory of its own.

Sums modulo 2**64 do not depend on the order of their terms. So each thread adds up its words, each block the sums of
its threads, and one atomic add for each block and sum completes them. `digest.device_sums` says what the sums are.
"""

from functools import cache

import torch
from torch import Tensor

from backhaul_runtime.errors import log_once
from backhaul_runtime.torch_internals.compiled_kernels import Kernel, compile_kernel

NAME = "weighted_sums"
THREADS = 256
"""The threads of a block. The kernel is right for any number up to 1,024."""
MOST_BLOCKS = 1056
"""Eight blocks for each of the 132 multiprocessors of an H100."""
_GROUP_BYTES = 16

KERNEL_CODE = """
typedef unsigned long long u64;
struct __align__(16) Group { int words[4]; };

// The word at an index, of which bytes behind the end count as zeros. The data may lie at any address.
__device__ __forceinline__ int word_at(const unsigned char* data, long long bytes, long long index) {
  unsigned int word = 0;
  for (int i = 0; i < 4; ++i)
    if (4 * index + i < bytes) word |= (unsigned int)data[4 * index + i] << (8 * i);
  return (int)word;
}

extern "C" __global__ void weighted_sums(const unsigned char* data, int low, int high, u64* sums) {
  const u64 weight = 0x9E3779B97F4A7C15ull;
  const long long bytes = ((long long)high << 32) | (unsigned int)low;
  const long long groups = (bytes + 15) / 16, whole = ((u64)data & 15) == 0 ? bytes / 16 : 0;
  u64 first = 0, second = 0;
  for (long long group = (long long)blockIdx.x * blockDim.x + threadIdx.x; group < groups;
       group += (long long)gridDim.x * blockDim.x) {
    Group loaded;
    if (group < whole)
      loaded = ((const Group*)data)[group];
    else
      for (int i = 0; i < 4; ++i) loaded.words[i] = word_at(data, bytes, 4 * group + i);
    for (int i = 0; i < 4; ++i) {
      const long long position = 4 * group + i;
      if (4 * position >= bytes) break;
      const u64 word = (u64)((long long)loaded.words[i] + (1ll << 32));
      const long long mixed = (long long)((u64)(position + 1) * weight);
      first += word * (((u64)position * weight) | 1ull);
      second += word * (((u64)(mixed ^ (mixed >> 29)) * weight) | 1ull);
    }
  }
  __shared__ u64 shared[2][32];
  for (int step = 16; step; step >>= 1) {
    first += __shfl_down_sync(0xffffffffu, first, step);
    second += __shfl_down_sync(0xffffffffu, second, step);
  }
  if ((threadIdx.x & 31) == 0) shared[0][threadIdx.x >> 5] = first, shared[1][threadIdx.x >> 5] = second;
  __syncthreads();
  if (threadIdx.x < 32) {
    const unsigned int warps = (blockDim.x + 31) / 32;
    first = threadIdx.x < warps ? shared[0][threadIdx.x] : 0;
    second = threadIdx.x < warps ? shared[1][threadIdx.x] : 0;
    for (int step = 16; step; step >>= 1) {
      first += __shfl_down_sync(0xffffffffu, first, step);
      second += __shfl_down_sync(0xffffffffu, second, step);
    }
    if (threadIdx.x == 0) atomicAdd(sums, first), atomicAdd(sums + 1, second);
  }
}
"""
"""Includes nothing, so that NVRTC compiles it without headers. Tests compile the same text for the CPU."""


def kernel_sums(data: Tensor) -> Tensor | None:
    """Returns int64 [2] on the device of a uint8 tensor [n] on CUDA; None if the kernel cannot be compiled there.

    Queues two launches on the current stream of the device: one that sets the sums to zero, and the kernel.
    """
    kernel = _kernel(data.device)
    if kernel is None:
        return None
    with torch.cuda.device(data.device):
        sums = torch.zeros(2, dtype=torch.int64, device=data.device)
        size = data.numel()
        blocks = min(MOST_BLOCKS, -(-size // (THREADS * _GROUP_BYTES)))
        if blocks:
            # torch passes integers as 32 bits. A copy of their bits keeps those of more than 2 GiB.
            low, high = size & 0xFFFFFFFF, size >> 32
            kernel((blocks, 1, 1), (THREADS, 1, 1), (data, low - (1 << 32) * (low >> 31), high, sums))
    return sums


@cache
def _kernel(device: torch.device) -> Kernel | None:
    with torch.cuda.device(device):
        try:
            return compile_kernel(KERNEL_CODE, NAME)
        except Exception as error:  # a torch without NVRTC, or a device that it does not know
            log_once(error, "Digests on the GPU are computed by torch's own ops, which is slower.")
            return None
