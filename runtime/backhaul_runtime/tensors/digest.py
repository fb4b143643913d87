"""Digests of tensors: for the value check, and for the address under which a tensor is stored.

A digest covers everything that could change the result of an op: dtype, shape, strides and the bytes of every element.
On the CPU the bytes are hashed with xxh3_128 (24 GB/s on one core, without the GIL). The bytes on an accelerator stay
there: two weighted sums in int64 are computed instead, by one kernel (`sums_kernel.py`). torch.hash_tensor is not used,
because it XORs the elements, so their order does not count.
"""

from collections.abc import Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from backhaul_runtime.tensors.layout import Layout, dense_memory, host_bytes, layout_of, payload, unsupported_reason
from backhaul_runtime.tensors.sums_kernel import kernel_sums

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, odd, as int64
_PIECE_WORDS = 1 << 20


def content_digest(tensor: Tensor, layout: Layout) -> bytes:
    """Returns 16 bytes for the elements in memory order. Waits for an accelerator."""
    if layout.is_dense_on_host:
        return xxhash.xxh3_128_digest(dense_memory(tensor, layout))
    data = payload(tensor.detach(), layout)
    if data.device.type == "cpu":
        return xxhash.xxh3_128_digest(host_bytes(data))
    return weighted_sums(data)


digest_of_memory = xxhash.xxh3_128_digest
"""Returns the `content_digest` of a dense tensor on the host, from its memory: see `Layout.memory_type`."""


def weighted_sums(data: Tensor) -> bytes:
    """Returns the `device_sums` of a uint8 tensor [n] as 16 bytes. Waits for an accelerator."""
    (digest,) = read_sums([device_sums(data)])
    return digest


def read_sums(sums: Sequence[Tensor]) -> list[bytes]:
    """Returns `device_sums` of tensors on one accelerator as 16 bytes each. Waits for the accelerator, once."""
    return [row.numpy().tobytes() for row in torch.stack(list(sums)).cpu()] if sums else []


def device_sums(data: Tensor) -> Tensor:
    """Returns int64 [2] on the device of a uint8 tensor [n]: two sums of its 32-bit words with different odd weights.

    Arithmetic is modulo 2**64. A single changed word always changes both sums, because odd weights have inverses.
    """
    sums = kernel_sums(data) if data.is_cuda else None
    return torch_sums(data) if sums is None else sums


def torch_sums(data: Tensor) -> Tensor:
    """Computes `device_sums` by ops of torch, in pieces that bound the memory that they need."""
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), 4 * _PIECE_WORDS):
        piece = data[begin : begin + 4 * _PIECE_WORDS]
        padded = torch.nn.functional.pad(piece, (0, -piece.numel() % 4))
        if padded.storage_offset() * padded.element_size() % 4:
            padded = padded.clone()
        words = padded.view(torch.int32).to(torch.int64) + (1 << 32)
        position = torch.arange(begin // 4, begin // 4 + words.numel(), dtype=torch.int64, device=data.device)
        mixed = (position + 1) * _WEIGHT
        sums[0] += (words * ((position * _WEIGHT) | 1)).sum()
        sums[1] += (words * ((mixed ^ (mixed >> 29)) * _WEIGHT | 1)).sum()
    return sums


def saved_digest(layout: Layout, content: bytes) -> bytes:
    """Returns the digest of a saved tensor. It leaves out the alignment, because a replay allocates its own memory."""
    return xxhash.xxh3_128_digest(layout.header + content)


def digest_of_tensor(tensor: Tensor) -> bytes:
    """Returns the digest of a tensor's layout and values. Its place in memory does not count."""
    layout = layout_of(tensor)
    return saved_digest(layout, content_digest(tensor, layout))


def read_digest(tensors: Iterable[Tensor]) -> bytes:
    """Returns the digest of all tensors that an op reads, except kinds of tensors that have no bytes."""
    return xxhash.xxh3_128_digest(b"".join(digest_of_tensor(one) for one in tensors if unsupported_reason(one) is None))


def tensor_address(layout: Layout, content: bytes) -> bytes:
    """Returns the address of a stored tensor. Tensors with equal addresses are interchangeable, also in alignment."""
    return xxhash.xxh3_128_digest(layout.full_header + content)


def address_of(tensor: Tensor) -> bytes:
    """Returns the address of a tensor with its current contents."""
    layout = layout_of(tensor)
    return tensor_address(layout, content_digest(tensor, layout))
