"""Writes that torch does not see: NumPy's on the host, those of a kernel of the caller's own on a GPU."""

import numpy as np
import torch
from torch import Tensor

SOURCE = """
extern "C" __global__ void replace(float* data, int factor, int summand, int numel) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < numel; i += gridDim.x * blockDim.x)
    data[i] = data[i] * (float)factor + (float)summand;
}
"""


def replace_unseen(tensor: Tensor, factor: int, summand: int = 0) -> None:
    """Writes `factor * tensor + summand` to a contiguous float32 tensor on any device."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        values = np.asarray(tensor)
        values *= factor
        values += summand
    else:
        kernel = torch.cuda._compile_kernel(SOURCE, "replace")
        kernel((1, 1, 1), (32, 1, 1), (tensor, factor, summand, tensor.numel()))
