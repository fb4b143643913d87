"""Random projections of tensors: they estimate the difference between tensors computed on different hardware.

The projection of x has the count of its non-finite values, its norm, and 8 projections on vectors of signs that both
sides generate equally. For the difference e of two tensors each projection of e has expectation 0 and variance |e|^2,
whatever e is (Johnson and Lindenstrauss 1984; with signs: Achlioptas 2003). So the root mean square of the 8
differences estimates |e|. Divided by the norm it is the drift.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from backhaul_runtime.tensors.layout import unsupported_reason

PROJECTIONS = 8
SIZE = PROJECTIONS + 2
_BLOCK = 4096
_CHUNK = 64 * _BLOCK  # fits into the cache of a core
_ACCELERATOR_CHUNK = 1024 * _BLOCK  # 32 MiB in float64, so that few kernels are launched
_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, odd, as int64

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
"""The largest drift that counts as rounding, by dtype. Other floating dtypes use that of bfloat16.

For float32 it is 70 times the largest drift of AVX2 and SSE4.1 against AVX-512 over the tests' cases
(docs/guarantees.md), and far below the effect of another mask or another expert. The others are in proportion to a few
of their roundings.
"""


def project(tensor: Tensor) -> tuple[float, ...]:
    """Returns SIZE numbers in float64 for a floating or complex tensor: non-finite count, norm, projections."""
    return read_projections([[measured(tensor)]])[0]


def projections(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Returns the projections of all tensors with real values, one after the other. Waits once for an accelerator."""
    return read_projections([unread_projections(tensors)])[0]


def unread_projections(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the measurements of all tensors with real values, on their devices. Does not wait for them."""
    return [
        measured(tensor)
        for tensor in tensors
        if unsupported_reason(tensor) is None and (tensor.is_floating_point() or tensor.is_complex())
    ]


def read_projections(groups: Sequence[Sequence[Tensor]]) -> list[tuple[float, ...]]:
    """Returns the projections of groups of tensors from their measurements. Waits once for each accelerator."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for group in groups:
        for measurement in group:
            by_device.setdefault(measurement.device, []).append(measurement)
    rows = {device: iter(torch.stack(measurements).tolist()) for device, measurements in by_device.items()}
    return [tuple([number for one in group for number in _numbers(next(rows[one.device]))]) for group in groups]


def _numbers(row: list[float]) -> list[float]:
    count, square, *projections = row
    return [count, math.sqrt(square), *projections]


def measured(tensor: Tensor) -> Tensor:
    """Returns a float64 tensor [SIZE] on the tensor's device: as `project`, with the norm squared. Does not wait."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = values.detach().flatten()
    on_host = flat.device.type == "cpu"
    length = _CHUNK if on_host else _ACCELERATOR_CHUNK
    total = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), length):
        chunk = flat[start : start + length].to(torch.float64)
        sums = _sums(chunk, start // _BLOCK) if on_host else None
        # Elsewhere the question would wait for the device, and the answer that always holds costs less than the wait.
        if sums is None or not sums.isfinite().all():
            sums = _sums(chunk.nan_to_num(0.0, 0.0, 0.0), start // _BLOCK)
            sums[0] = (~chunk.isfinite()).sum()
        total += sums
    return total


def _sums(values: Tensor, first_block: int) -> Tensor:
    if values.numel() % _BLOCK:
        values = torch.nn.functional.pad(values, (0, -values.numel() % _BLOCK))
    blocks = values.view(-1, _BLOCK)
    device, stream = str(values.device), 0
    if values.is_cuda:
        stream = torch.cuda.current_stream(values.device).stream_id
    projections = (
        _signs(first_block, len(blocks), device, stream).T @ blocks * _signs(0, _BLOCK, device, stream).T
    ).sum(1)
    return torch.cat([values.new_zeros(1), values.dot(values).view(1), projections])


@lru_cache(maxsize=1 << 10)
def _signs(first: int, count: int, device: str, stream: int) -> Tensor:
    """Returns signs [count, PROJECTIONS], equal on every machine: bits of a multiplicative hash of the row.

    Each stream of a device gets a tensor of its own, because another stream would have to wait until it is made.
    """
    rows = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    mixed = rows * _WEIGHT
    mixed = (mixed ^ (mixed >> 29)) * _WEIGHT
    bits = (mixed.unsqueeze(1) >> torch.arange(40, 40 + PROJECTIONS, device=device)) & 1
    return (1 - 2 * bits).to(torch.float64)


def drift(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the estimated norm of the difference relative to our norm; infinite if other values are not finite.

    The projections of several tensors may follow each other; the largest drift counts.
    """
    if len(ours) != len(theirs) or len(ours) % SIZE:
        return math.inf
    largest = 0.0
    for start in range(0, len(ours), SIZE):
        count, norm, *projections = ours[start : start + SIZE]
        other_count, other_norm, *others = theirs[start : start + SIZE]
        differences = [a - b for a, b in zip(projections, others, strict=True)] + [norm - other_norm]
        distance = math.sqrt(sum(d * d for d in differences) / PROJECTIONS)
        if count != other_count or not math.isfinite(distance):
            return math.inf
        if distance:
            largest = max(largest, distance / norm if norm else math.inf)
    return largest


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest drift that counts as rounding, see TOLERANCES. A complex dtype uses that of its parts."""
    return TOLERANCES.get(dtype.to_real() if dtype.is_complex else dtype, TOLERANCES[torch.bfloat16])
