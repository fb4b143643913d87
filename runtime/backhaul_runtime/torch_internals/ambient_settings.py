"""The settings of torch that an op's numbers depend on: how each is read and written, and which values it may have.

A setting belongs here if torch has a getter and a setter for it. Properties of a process that cannot be set, such as
its build of torch, belong to the fingerprint instead.

The values of settings travel in messages, so each is a boolean, an integer or a text. The table of CUDA's settings can
be built on a machine without CUDA, because torch's functions exist in builds for the CPU too.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from struct import unpack
from typing import Any

import torch

from backhaul_runtime.torch_internals.attention_order import attention_order
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode

Value = bool | int | str


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of torch.

    Attributes:
        read: Returns the present value for the calling thread. It runs before each op.
        write: Sets a value that `is_possible` has accepted.
        is_possible: Whether the setting can have a value, which has the type of the present one but is untrusted.
        possible: The values that the setting can have, in words.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    is_possible: Callable[[Any], bool] = lambda value: isinstance(value, bool)
    possible: str = "a boolean"


_text = cache(str)  # settings are read before each op, so the text of a dtype is made only once
_name = cache(lambda member: str(member.name))  # that of an enumeration of torch likewise


@cache
def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, map(int, numbers)))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_FLOATING = {str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}


def _dtype_setting(read: Callable[[], torch.dtype], write: Callable[[torch.dtype], object]) -> Setting:
    return Setting(
        lambda: _text(read()),
        lambda name: write(getattr(torch, str(name).removeprefix("torch."))),
        _FLOATING.__contains__,
        "a floating dtype",
    )


def _one_of(read: Callable[[], Any], write: Callable[[Any], object], *values: Value) -> Setting:
    return Setting(read, write, values.__contains__, "one of " + ", ".join(map(str, values)))


def _autocast(device: str) -> dict[str, Setting]:
    return {
        f"autocast_{device}": Setting(
            lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)
        ),
        f"autocast_{device}_dtype": _dtype_setting(
            lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value)
        ),
    }


def _sdp(kernel: str) -> Setting:
    return Setting(getattr(torch._C, f"_get_{kernel}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{kernel}"))


def _switch(name: str) -> Setting:
    return Setting(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))


def _precision(backend: str, op: str, write: Callable[[str], object], *values: str) -> Setting:
    return _one_of(lambda: torch._C._get_fp32_precision_getter(backend, op), write, "none", "ieee", *values)


def _mkldnn_precision(op: str) -> Setting:
    write = torch._C._set_fp32_precision_setter
    return _precision("mkldnn", op, lambda value: write("mkldnn", op, value), "tf32", "bf16")


# The smallest denormal. A literal would not do: while denormals are flushed, parsing it may already give zero.
_LEAST: float = unpack("<d", (1).to_bytes(8, "little"))[0]


def _flushes_denormals() -> bool:
    """Whether the calling thread flushes denormals. Torch has only a setter, but Python's floats obey the same bit."""
    return _LEAST * 1.0 == 0.0


class _DispatchModes(threading.local):
    """The setting that says whether a dispatch mode is on in the calling thread.

    It belongs to the state because torch composes some ops of others while a mode is on, and those round differently.
    Writing True enters a mode that does nothing. Writing False disables the modes of the thread until the next write.
    """

    own: AbstractContextManager[Any] | None = None
    is_on = False

    def read(self) -> bool:
        return self.is_on if self.own is not None else torch._C._len_torch_dispatch_stack() > 0

    def write(self, value: bool) -> None:
        if self.own is not None:
            self.own.__exit__(None, None, None)
            self.own = None
        if value != self.read():
            self.own = DispatchMode() if value else torch._C._DisableTorchDispatch()
            self.is_on = value
            self.own.__enter__()


dispatch_modes = _DispatchModes()


def max_threads() -> int:
    """Returns the largest number of threads that a program may use. It is bounded because torch never ends a thread."""
    return max(64, 4 * (os.cpu_count() or 1))


@cache
def settings_of_all() -> Mapping[str, Setting]:
    """Returns the settings that programs on any device depend on, by name."""
    return {
        "grad": Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "default_dtype": _dtype_setting(torch.get_default_dtype, torch.set_default_dtype),
        "flush_denormal": Setting(_flushes_denormals, torch.set_flush_denormal),
        "dispatch_mode": Setting(dispatch_modes.read, dispatch_modes.write),
        "threads": Setting(
            torch.get_num_threads,
            torch.set_num_threads,
            lambda value: 1 <= value <= max_threads(),
            f"a number from 1 to {max_threads()}",
        ),
        "autocast_cache": Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **_autocast("cpu"),
        "deterministic": _one_of(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0, 1, 2),
        "deterministic_fill": _switch("deterministic_fill_uninitialized_memory"),
        "flash_sdp": _sdp("flash"),
        "mem_efficient_sdp": _sdp("mem_efficient"),
        "math_sdp": _sdp("math"),
        "overrideable_sdp": _sdp("overrideable"),
        "math_sdp_reduction": Setting(
            torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction
        ),
        "cpu_fp16_reduction": _switch("cpu_allow_fp16_reduced_precision_reduction"),
        "mkldnn": _switch("mkldnn_enabled"),
        "mkldnn_deterministic": _switch("mkldnn_deterministic"),
        "nnpack": _switch("nnpack_enabled"),
        # Before those of CUDA, see `_write_matmul_precision`.
        **{f"mkldnn_{op}_precision": _mkldnn_precision(op) for op in ("matmul", "conv", "rnn")},
    }


@cache
def settings_of_cuda() -> Mapping[str, Setting]:
    """Returns the further settings that programs on CUDA depend on, by name. Needs no CUDA.

    The settings that only some versions of torch have are left out by the others. Those versions compute different
    numbers anyway, so they do not recompute for each other.
    """
    has_libraries = torch.version.cuda is not None  # torch raises an exception for a library that its build lacks
    table = {
        **_autocast("cuda"),
        "cudnn_sdp": _sdp("cudnn"),
        "sdp_priority": Setting(
            lambda: _joined(attention_order()),
            lambda text: torch._C._set_sdp_priority_order(_numbers(text)),
            _is_attention_order,
            "a permutation of the present order",
        ),
        **{name: _switch(name) for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")},
        **{f"cublas_{dtype}_reduction": _reduction(dtype) for dtype in ("fp16", "bf16")},
        "cublas_fp16_accumulation": _switch("cublas_allow_fp16_accumulation"),
        "cuda_matmul_precision": _precision("cuda", "matmul", _write_matmul_precision, "tf32"),
        "cudnn_conv_precision": _precision("cuda", "conv", lambda value: _write_cudnn_precision("conv", value), "tf32"),
        "cudnn_rnn_precision": _precision("cuda", "rnn", lambda value: _write_cudnn_precision("rnn", value), "tf32"),
        "blas_backend": _backend("blas", torch._C._BlasBackend, "Cublas", *(["Cublaslt"] if has_libraries else [])),
        "linalg_backend": _backend(
            "linalg",
            torch._C._LinalgBackend,
            "Default",
            *(["Cusolver"] if has_libraries else []),
            *(["Magma"] if torch.cuda.has_magma else []),
        ),
        "sm_carveout": Setting(
            lambda: _text(torch._C._get_sm_carveout_experimental()),
            lambda text: torch._C._set_sm_carveout_experimental(None if text == "None" else int(text)),
            _is_carveout,
            f"None or a number from 0 to {_MAX_SM}",
        ),
    }
    if hasattr(torch._C, "_get_cudnn_depthwise_kernel"):
        table["cudnn_depthwise"] = _one_of(
            torch._C._get_cudnn_depthwise_kernel, torch._C._set_cudnn_depthwise_kernel, "auto", "cudnn", "native"
        )
    if hasattr(torch._C, "_get_fa3_sdp_enabled"):
        table["fa3_sdp"] = Setting(
            torch._C._get_fa3_sdp_enabled,
            torch._C._set_sdp_use_fa3,
            lambda value: not value or torch._C._get_fa3_sdp_enabled(),
            "false, or true where FlashAttention 3 is on",
        )
    if hasattr(torch._C, "_cuda_get_cudnn_benchmark_limit"):  # only builds with CUDA have it
        table["cudnn_benchmark_limit"] = Setting(
            torch._C._cuda_get_cudnn_benchmark_limit,
            torch._C._cuda_set_cudnn_benchmark_limit,
            lambda value: 0 <= value <= _MAX_BENCHMARKS,
            f"a number from 0 to {_MAX_BENCHMARKS}",
        )
    return table


_MAX_SM = 1024  # more multiprocessors than any GPU has
_DIGITS = 4
_MAX_BENCHMARKS = 1000


def _reduction(dtype: str) -> Setting:
    """Whether cuBLAS may reduce in lower precision, and whether it may split the sum: "1,1", "0,1" or "0,0"."""
    name = f"cublas_allow_{dtype}_reduced_precision_reduction"
    read, write = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    return _one_of(lambda: _joined(read()), lambda text: write(*map(bool, _numbers(text))), "1,1", "0,1", "0,0")


def _write_matmul_precision(value: str) -> None:
    """Sets the precision of cuBLAS in torch's older switch too.

    cuBLAS's kernels raise an exception if the older and the newer switch contradict each other. The older one also
    sets the precision of oneDNN, which is written before this one and must not change.
    """
    of_mkldnn = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    older = ("medium" if of_mkldnn == "bf16" else "high") if value == "tf32" else "highest"
    torch._C._set_float32_matmul_precision(older)
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", of_mkldnn)
    torch._C._set_fp32_precision_setter("cuda", "matmul", value)


def _write_cudnn_precision(op: str, value: str) -> None:
    """Sets the precision of cuDNN in torch's older switch too, which is one for both kinds of ops."""
    other = "rnn" if op == "conv" else "conv"
    of_other = torch._C._get_fp32_precision_getter("cuda", other)
    torch._C._set_cudnn_allow_tf32(value == "tf32")
    torch._C._set_fp32_precision_setter("cuda", other, of_other)
    torch._C._set_fp32_precision_setter("cuda", op, value)


def _is_attention_order(text: str) -> bool:
    # torch does not check the length: it would write a longer list past the end of its own.
    return sorted(text.split(",")) == sorted(_joined(tuple(torch._C._get_sdp_priority_order())).split(","))


def _is_carveout(text: str) -> bool:
    return text == "None" or (text.isascii() and text.isdecimal() and len(text) <= _DIGITS and int(text) <= _MAX_SM)


def _backend(kind: str, members: Any, *possible: str) -> Setting:
    """The library that torch prefers for a kind of algebra, by the name of the enumeration's member."""
    read, write = (
        getattr(torch._C, f"_get_{kind}_preferred_backend"),
        getattr(torch._C, f"_set_{kind}_preferred_backend"),
    )
    return _one_of(lambda: _name(read()), lambda name: write(members.__members__[name]), *possible)
