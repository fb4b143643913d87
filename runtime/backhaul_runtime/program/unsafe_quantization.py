"""Sizes and dtypes of scales for which an op of fake quantization reads or writes out of bounds."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _per_tensor(given: Mapping[str, Any]) -> None:
    """The kernel reads the first scale and zero point, as float32 and int32, wherever they lie."""
    _check("fake quantization", given["self"], 1, scale=given["scale"], zero_point=given["zero_point"])


def _per_channel(given: Mapping[str, Any]) -> None:
    """The kernel reads one scale and zero point for each channel."""
    zero_point = given["zero_point"]
    if zero_point.is_floating_point():  # which this op alone takes too
        zero_point = zero_point.int()
    channels = _channels(given["self"], given["axis"])
    _check("fake quantization", given["self"], channels, scale=given["scale"], zero_point=zero_point)


def _learnable(given: Mapping[str, Any]) -> None:
    """The kernel reads the first scale and zero point, or one for each channel."""
    count = _channels(given["self"], given["axis"]) if "axis" in given else 1
    for name in ("scale", "zero_point"):
        if given[name].numel() != count or given[name].dim() != 1 or given[name].device != given["self"].device:
            raise ValueError(f"fake quantization has a {name} of {list(given[name].shape)}, it needs {[count]}")


def _moving_average(given: Mapping[str, Any]) -> None:
    """The kernel reads and writes the running extremes, scales and zero points of all channels."""
    count = _channels(given["self"], given["ch_axis"]) if given["per_row_fake_quant"] else 1
    names = ("running_min", "running_max", "scale", "zero_point")
    _check("an observer", given["self"], count, **{name: given[name] for name in names})
    for name in ("observer_on", "fake_quant_on"):
        if given[name].numel() != 1 or given[name].device != given["self"].device:
            raise ValueError(f"an observer has {given[name].numel()} switches {name}, it needs 1")


def _channels(data: Tensor, axis: int) -> int:
    if not 0 <= axis < data.dim():
        raise ValueError(f"fake quantization along dimension {axis} of a tensor of {data.dim()}")
    return data.shape[axis]


def _check(what: str, data: Tensor, count: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        dtype = torch.int32 if name == "zero_point" else torch.float32
        if tensor.numel() != count or tensor.dtype is not dtype or tensor.device != data.device:
            raise ValueError(
                f"{what} has a {name} of {tensor.numel()} elements of {tensor.dtype} on {tensor.device}, it needs "
                f"{count} of {dtype} on {data.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{what} has a {name} with gaps between its elements")


CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "aten.fake_quantize_per_tensor_affine.tensor_qparams": _per_tensor,
    "aten.fake_quantize_per_channel_affine.default": _per_channel,
    "aten._fake_quantize_learnable_per_tensor_affine.default": _learnable,
    "aten._fake_quantize_learnable_per_channel_affine.default": _learnable,
    "aten.fused_moving_avg_obs_fake_quant.default": _moving_average,
}
"""The check of each op, from its arguments by name. A check raises ValueError."""
