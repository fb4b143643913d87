"""Digests of tensors: what the value check compares, and the address under which a tensor is stored.

Everything that could change what an op computes goes in: dtype, shape, strides and the bytes of every element. On the
CPU the bytes are hashed with xxh3_128 (24 GB/s on one core, the GIL released). An accelerator's bytes never leave it:
there two weighted sums in int64 are taken. Not torch.hash_tensor: it XORs, so order does not count.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from backhaul_runtime.tensors.layout import Layout, dense_bytes, host_bytes, layout_of, payload, unsupported_reason

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, odd, as int64


def content_digest(tensor: Tensor, layout: Layout) -> bytes:
    """16 bytes for the elements in memory order."""
    if layout.device == "cpu" and layout.payload_bytes == layout.span_bytes:
        return xxhash.xxh3_128_digest(dense_bytes(tensor, layout))
    data = payload(tensor.detach(), layout)
    if data.device.type == "cpu":
        return xxhash.xxh3_128_digest(host_bytes(data))
    return weighted_sums(data)


def weighted_sums(data: Tensor) -> bytes:
    """16 bytes for a uint8 tensor [n] on any device: its `device_sums`, waited for."""
    return device_sums(data).cpu().numpy().tobytes()


def device_sums(data: Tensor) -> Tensor:
    """int64 [2] for a uint8 tensor [n], where that is: two sums of its 32-bit words, each with its own odd weights.

    Arithmetic is modulo 2**64. A single changed word always changes both sums, for odd weights have inverses.
    """
    padded = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    words = padded.view(torch.int32).to(torch.int64) + (1 << 32)
    position = torch.arange(words.numel(), dtype=torch.int64, device=data.device)
    first = (words * ((position * _WEIGHT) | 1)).sum()
    mixed = (position + 1) * _WEIGHT
    second = (words * ((mixed ^ (mixed >> 29)) * _WEIGHT | 1)).sum()
    return torch.stack((first, second))


def saved_digest(layout: Layout, content: bytes) -> bytes:
    """Digest of a tensor that autograd saved. Where it lies is left out: a replay allocates for itself."""
    return xxhash.xxh3_128_digest(layout.header + content)


def read_digest(tensors: Iterable[Tensor]) -> bytes:
    """Digest of all that an op reads; kinds of tensors that have no bytes are passed over."""
    digests = []
    for tensor in tensors:
        if unsupported_reason(tensor) is None:
            layout = layout_of(tensor)
            digests.append(saved_digest(layout, content_digest(tensor, layout)))
    return xxhash.xxh3_128_digest(b"".join(digests))


def tensor_address(layout: Layout, content: bytes) -> bytes:
    """Address of a stored tensor: equal addresses are interchangeable, where they lie included."""
    return xxhash.xxh3_128_digest(layout.full_header + content)


def address_of(tensor: Tensor) -> bytes:
    """Address of a tensor with its present contents."""
    layout = layout_of(tensor)
    return tensor_address(layout, content_digest(tensor, layout))
