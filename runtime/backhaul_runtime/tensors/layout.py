"""The memory layout of tensors, and exact copies.

Equal bits need more than equal values: kernels choose their code path by strides and by the alignment of addresses. So
a layout has both, and every tensor that is created from a layout has them again.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from backhaul_runtime.errors import TransferError, UnsupportedTensorError
from backhaul_runtime.torch_internals.private import (
    dispatch_kind,
    is_functorch_wrapped,
    is_memoryless_zero,
    is_plain,
    is_thin,
    with_lazy_bits,
)

ALIGNMENT_BYTES = 64
"""The alignment of torch's allocator on the host, and the widest vector register of today's CPUs, in bytes."""

CUDA_ALIGNMENT_BYTES = 256
"""torch tells cuBLASLt the alignment of each matrix up to this one, and cuBLASLt chooses kernels by it. On CUDA torch's
allocator aligns to 512 bytes."""

LARGE_BYTES = 1 << 20
"""From this size on, reusing memory is faster than requesting it from malloc."""

MAX_RANK = 32
MAX_SPAN_BYTES = 1 << 62

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MEANINGS = {
    "DTensor": ", whose parts are on several ranks (tensor parallelism)",
    "AsyncCollectiveTensor": ", the result of a collective that may still run",
}
"""What the names of some tensor subclasses mean to a user."""


@dataclass(frozen=True)
class Layout:
    """All properties of a tensor except its values. Live tensors share layouts, so derived properties are cached.

    Attributes:
        dtype: Any dtype of torch that is not quantized.
        shape: Sizes, rank 0 to 32.
        strides: Strides in elements, not negative.
        alignment_bytes: The address of the first element modulo `alignment_of` its device.
        conjugate: torch's lazy conjugate bit.
        negative: torch's lazy negative bit.
        device: The type of device, "cpu" or "cuda".
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment_bytes: int = 0
    conjugate: bool = False
    negative: bool = False
    device: str = "cpu"

    @property
    def dtype_name(self) -> str:
        """The name of the dtype in torch, without the module."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_on_accelerator(self) -> bool:
        """Whether reading a value would make the host wait, see NOTE [Staging]."""
        return self.device == "cuda"

    @cached_property
    def span_bytes(self) -> int:
        """The bytes from the first byte of the tensor to its last, including gaps."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a dense copy or gradient, in which elements do not share memory."""
        return max(self.span_bytes, math.prod(self.shape) * self.dtype.itemsize)

    @cached_property
    def memory_order(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shape and strides that visit every element once in memory order; None if elements overlap."""
        if 0 in self.shape:
            return (0,), (1,)
        dims = sorted(
            (stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1 and stride > 0
        )
        reach = 0
        for stride, size in dims:
            if stride <= reach:
                return None
            reach += (size - 1) * stride
        return tuple(size for _, size in reversed(dims)), tuple(stride for stride, _ in reversed(dims))

    @cached_property
    def payload_bytes(self) -> int:
        """The bytes to send: each element once, or the whole span if elements overlap."""
        order = self.memory_order
        return self.span_bytes if order is None else math.prod(order[0]) * self.dtype.itemsize

    @cached_property
    def is_dense_on_host(self) -> bool:
        """Whether its bytes can be read where they are: on the host, without gaps."""
        return self.device == "cpu" and self.payload_bytes == self.span_bytes

    @cached_property
    def memory_type(self) -> type[ctypes.Array[ctypes.c_char]]:
        """The type of a view of `span_bytes` bytes of memory."""
        return ctypes.c_char * self.span_bytes

    @cached_property
    def header(self) -> bytes:
        """The layout without its alignment, for digests of tensors in freshly allocated memory."""
        return f"{self.dtype}{self.shape}{self.strides}{self.conjugate}{self.negative}".encode()

    @cached_property
    def full_header(self) -> bytes:
        """The whole layout, for digests of interchangeable tensors."""
        return repr(self).encode()


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype with torch's name. Raises TransferError for any other text."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise TransferError(f'"{name}" is not a dtype of torch {torch.__version__}', dtype=name) from None


def unsupported_reason(tensor: Tensor) -> str | None:
    """Returns why a tensor has no bytes to send; None if it has some."""
    if not is_plain(type(tensor)) and not is_thin(type(tensor)):
        name = type(tensor).__name__
        return f"tensor subclass {name}{_MEANINGS.get(name, '')}"
    if tensor.layout is not torch.strided:
        return f"tensor with layout {tensor.layout}"
    if tensor.is_quantized:
        return f"quantized tensor ({tensor.dtype})"
    if tensor.is_nested:
        return "nested tensor"
    if is_memoryless_zero(tensor):
        return "zero tensor without memory"
    if tensor.device.type == "meta" or is_functorch_wrapped(tensor):
        return "tensor without memory of its own (meta device or torch.func)"
    if tensor.dim() > MAX_RANK:
        return f"tensor of rank {tensor.dim()}, at most {MAX_RANK} travel"
    return None


def with_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or real zeros for one of autograd's zeros without memory."""
    return torch.zeros_like(tensor) if is_memoryless_zero(tensor) else tensor


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Returns the accelerator that tensors are on, the first one if there are several; the CPU if none is on any."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def alignment_of(device: str) -> int:
    """Returns up to which alignment, in bytes, kernels on a type of device distinguish addresses."""
    return CUDA_ALIGNMENT_BYTES if device == "cuda" else ALIGNMENT_BYTES


def layout_of(tensor: Tensor) -> Layout:
    """Returns the layout of a tensor. Raises UnsupportedTensorError for a kind that cannot be sent."""
    # Dispatch keys determine the device, the lazy bits, and whether a tensor is of a kind that cannot be sent.
    kind = type(tensor), dispatch_kind(tensor)
    known = _kinds.get(kind)
    if known is None or tensor.dim() > MAX_RANK:
        if reason := unsupported_reason(tensor):
            raise UnsupportedTensorError(
                f"a {reason} cannot be sent: convert it to a plain dense tensor first", reason=reason
            )
        device = tensor.device.type
        known = _kinds[kind] = tensor.is_conj(), tensor.is_neg(), device, alignment_of(device)
    alignment = tensor.data_ptr() % known[3] if tensor.numel() else 0
    return _shared_layout(kind, tensor.dtype, tensor.shape, tensor.stride(), alignment)


_kinds: dict[tuple[type, int], tuple[bool, bool, str, int]] = {}


@lru_cache(maxsize=1 << 14)
def _shared_layout(
    kind: tuple[type, int], dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], alignment: int
) -> Layout:
    conjugate, negative, device, _ = _kinds[kind]
    aligned = alignment if alignment % dtype.itemsize == 0 else 0
    return Layout(dtype, tuple(shape), strides, aligned, conjugate, negative, device)


def check_layout(layout: Layout) -> None:
    """Raises TransferError for an impossible layout, before memory is allocated for it."""
    for problem, is_wrong in (
        ("shape and strides differ in length", len(layout.shape) != len(layout.strides)),
        (f"more than {MAX_RANK} dimensions", len(layout.shape) > MAX_RANK),
        ("a negative size or stride", min((*layout.shape, *layout.strides), default=0) < 0),
        ("a quantized dtype", layout.dtype in _QUANTIZED),
        ("a device that torch does not have", layout.device not in _DEVICES),
        ("an address that does not fit the dtype", layout.alignment_bytes % layout.dtype.itemsize != 0),
        ("a larger alignment than its device has", layout.alignment_bytes >= alignment_of(layout.device)),
        ("a conjugate bit without a complex dtype", layout.conjugate and not layout.dtype.is_complex),
    ):
        if is_wrong:
            raise TransferError(f"a tensor is declared with {problem}: {layout}")
    if layout.span_bytes > MAX_SPAN_BYTES or math.prod(layout.shape) * layout.dtype.itemsize > MAX_SPAN_BYTES:
        raise TransferError(f"a tensor is declared with more than 2**62 bytes: {layout}")


_DEVICES = {"cpu", "cuda", "mps", "xpu", "mtia", "hpu", "npu", "xla", "privateuseone"}
"""The types of devices whose tensors have memory. A trainer may use any of them."""

_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def allocate(
    layout: Layout, device: torch.device | str | None = None, take_large: Callable[[int], Tensor] | None = None
) -> Tensor:
    """Allocates a tensor of this layout, owned by the caller. Elements are undefined, gaps between them are zero.

    Args:
        layout: The layout of the new tensor.
        device: The device of the new tensor; None for this process's device of the layout's type.
        take_large: Returns uint8 [n] on the host, for a tensor of LARGE_BYTES or more without gaps.
    """
    itemsize = layout.dtype.itemsize
    size = layout.span_bytes + layout.alignment_bytes
    gaps = layout.payload_bytes < layout.span_bytes
    if not gaps and not layout.alignment_bytes and (take_large is None or size < LARGE_BYTES):
        return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device or layout.device)
    make = torch.zeros if gaps else torch.empty
    if take_large is not None and size >= LARGE_BYTES and not gaps:
        storage = take_large(size).untyped_storage()
    else:
        storage = make(size, dtype=torch.uint8, device=device or layout.device).untyped_storage()
    tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
    tensor.set_(storage, layout.alignment_bytes // itemsize, layout.shape, layout.strides)
    return tensor


def with_bits(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns a view of the tensor with the lazy bits of the layout."""
    return with_lazy_bits(tensor, conjugate=layout.conjugate, negative=layout.negative)


def as_laid_out(alias: Tensor, layout: Layout, offset: int) -> Tensor:
    """Returns a tensor of a layout in the storage of another tensor, with a version counter of its own.

    Args:
        alias: A tensor in the storage, of any dtype.
        layout: The layout of the tensor.
        offset: The offset of the tensor in the storage, in elements.

    Raises:
        UnsupportedTensorError: The storage was freed or shrunk.
    """
    _check_memory(alias, offset * layout.dtype.itemsize + layout.span_bytes)
    view = torch.empty(0, dtype=layout.dtype, device=alias.device)
    return with_bits(view.set_(alias.untyped_storage(), offset, layout.shape, layout.strides), layout)


def byte_view(tensor: Tensor, offset_bytes: int, size_bytes: int) -> Tensor:
    """Returns a uint8 view of a range of a tensor's storage. The offset counts from the start of the storage.

    Raises:
        UnsupportedTensorError: The storage was freed or shrunk, as FSDP does between uses.
    """
    _check_memory(tensor, offset_bytes + size_bytes)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset_bytes, (size_bytes,), (1,))


def _check_memory(tensor: Tensor, end_bytes: int) -> None:
    size = tensor.untyped_storage().nbytes()
    if size < end_bytes:  # set_ would enlarge the storage
        raise UnsupportedTensorError(f"a tensor's memory was freed: {size} of {end_bytes} bytes are left")


def view_at(tensor: Tensor, offset_bytes: int, layout: Layout) -> Tensor:
    """Returns a view at an offset after the first element of a tensor. Raises the errors of `byte_view`."""
    start = int(tensor.storage_offset()) * tensor.element_size() + offset_bytes
    _check_memory(tensor, start + layout.span_bytes)
    view = torch.empty(0, dtype=layout.dtype, device=tensor.device)
    view.set_(tensor.untyped_storage(), start // layout.dtype.itemsize, layout.shape, layout.strides)
    return with_bits(view, layout)


def host_bytes(data: Tensor) -> memoryview:
    """Returns the writable memory of a contiguous uint8 tensor on the host. Keep the tensor alive meanwhile.

    `Tensor.numpy` is not used: torch would never again allow resizing the storage, which may be the user's.
    """
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def dense_bytes(tensor: Tensor, layout: Layout) -> memoryview:
    """Returns the memory of a dense tensor on the host, read-only. Keep the tensor alive. Raises as `byte_view`."""
    return memoryview(dense_memory(tensor, layout)).cast("B").toreadonly()


def dense_memory(tensor: Tensor, layout: Layout) -> ctypes.Array[ctypes.c_char]:
    """Returns the memory of a dense tensor on the host, as `dense_bytes`. It takes a third of the time."""
    end_bytes = tensor.storage_offset() * layout.dtype.itemsize + layout.span_bytes
    if tensor.untyped_storage().nbytes() < end_bytes:
        _check_memory(tensor, int(end_bytes))
    return layout.memory_type.from_address(tensor.data_ptr())


def payload(tensor: Tensor, layout: Layout) -> Tensor:
    """Returns the bytes to send as a contiguous uint8 tensor [payload_bytes] on the tensor's device.

    The result is a view of the tensor's memory if that has no gaps, and a copy otherwise.
    """
    start = int(tensor.storage_offset()) * layout.dtype.itemsize
    if layout.payload_bytes == layout.span_bytes:
        return byte_view(tensor, start, layout.span_bytes)
    _check_memory(tensor, start + layout.span_bytes)
    shape, strides = layout.memory_order or ((), ())
    plain = torch.empty(0, dtype=_carrier(layout), device=tensor.device)
    plain.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)
    packed = plain.contiguous()
    return byte_view(packed, 0, layout.payload_bytes)


def from_payload(data: Tensor, layout: Layout) -> Tensor:
    """Returns a tensor of this layout from its payload, on the payload's device, owned by the caller."""
    tensor = allocate(layout, data.device)
    fill(tensor, data, layout)
    return with_bits(tensor, layout)


def fill(tensor: Tensor, data: Tensor, layout: Layout) -> None:
    """Writes a payload (uint8 [payload_bytes]) into a tensor from `allocate`."""
    if layout.payload_bytes == layout.span_bytes:
        payload(tensor, layout).copy_(data)
        return
    shape, strides = layout.memory_order or ((), ())
    src = torch.empty(0, dtype=_carrier(layout), device=data.device)
    src.set_(data.untyped_storage(), data.storage_offset() // layout.dtype.itemsize, shape, _contiguous(shape))
    target = torch.empty(0, dtype=_carrier(layout), device=tensor.device)
    target.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)
    target.copy_(src)


def copy_exact(tensor: Tensor, layout: Layout | None = None, device: torch.device | str | None = None) -> Tensor:
    """Returns a detached copy with the same strides, alignment and lazy bits, by default on the same device.

    The caller owns the copy. The original may be changed afterwards.
    """
    layout = layout or layout_of(tensor)
    if device is None and layout.is_dense_on_host and layout.span_bytes < LARGE_BYTES:  # in a fifth of the time
        copy = allocate(layout)
        ctypes.memmove(copy.data_ptr(), dense_memory(tensor, layout), layout.span_bytes)
        return with_bits(copy, layout)
    with torch.no_grad():
        return from_payload(payload(tensor.detach(), layout).to(device or tensor.device), layout)


def _carrier(layout: Layout) -> torch.dtype:
    """Returns a dtype of the same size that torch can copy, because it cannot copy all of its own dtypes."""
    return _CARRIERS[layout.dtype.itemsize]


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
