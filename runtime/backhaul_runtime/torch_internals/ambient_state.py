"""The settings of torch that an op's numbers depend on. The recorder reads them in forward, and a replay applies them.

A setting belongs to the state if torch has a getter and a setter for it. Properties of a process that cannot be set,
such as its build of torch, belong to the fingerprint instead.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from struct import unpack
from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode

Value = bool | int | str
State = tuple[Value | None, ...]
"""The value of each setting, in the order of `settings()`; None for a setting that is left as it is."""


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]


_text = cache(str)  # settings are read before each op, so the text of a dtype is made only once


@cache
def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _dtype_setting(read: Callable[[], torch.dtype], write: Callable[[torch.dtype], object]) -> _Setting:
    return _Setting(lambda: _text(read()), lambda name: write(getattr(torch, str(name).removeprefix("torch."))))


def _autocast(device: str) -> dict[str, _Setting]:
    return {
        f"autocast_{device}": _Setting(
            lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)
        ),
        f"autocast_{device}_dtype": _dtype_setting(
            lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value)
        ),
    }


def _sdp(kernel: str) -> _Setting:
    return _Setting(getattr(torch._C, f"_get_{kernel}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{kernel}"))


def _own(name: str) -> _Setting:
    """Returns a setting that has a getter and a setter of its own."""
    return _Setting(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))


def _several(name: str) -> _Setting:
    """Returns a setting that is a tuple of booleans, as text such as "1,0". Older torch has only the first of them."""
    read, write = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")

    def text() -> str:
        value = read()
        return _joined(tuple(map(int, value if isinstance(value, tuple) else (value,))))

    return _Setting(text, lambda value: write(*(part == "1" for part in str(value).split(","))))


def _choice(name: str, kind: Any) -> _Setting:
    """Returns a setting whose values are members of an enumeration, as their names."""
    own = _own(name)
    return _Setting(lambda: own.read().name, lambda value: own.write(getattr(kind, value)))


def _or_minus_one(name: str) -> _Setting:
    """Returns a setting whose value is a number or None, for which -1 stands."""
    own = _own(name)
    return _Setting(
        lambda: -1 if (value := own.read()) is None else value, lambda value: own.write(None if value == -1 else value)
    )


def _precision(backend: str, op: str) -> _Setting:
    return _Setting(
        lambda: torch._C._get_fp32_precision_getter(backend, op),
        lambda value: torch._C._set_fp32_precision_setter(backend, op, value),
    )


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


_dispatch_modes = _DispatchModes()


@cache
def settings() -> Mapping[str, _Setting]:
    """Returns the settings of this process by name. They depend only on the build of torch and on having CUDA."""
    return {**_host_settings(), **(cuda_settings() if torch.cuda.is_available() else {})}


def _host_settings() -> dict[str, _Setting]:
    return {
        "grad": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "default_dtype": _dtype_setting(torch.get_default_dtype, torch.set_default_dtype),
        "flush_denormal": _Setting(_flushes_denormals, torch.set_flush_denormal),
        "dispatch_mode": _Setting(_dispatch_modes.read, _dispatch_modes.write),
        "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
        "autocast_cache": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **_autocast("cpu"),
        "deterministic": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "deterministic_fill": _own("deterministic_fill_uninitialized_memory"),
        "flash_sdp": _sdp("flash"),
        "mem_efficient_sdp": _sdp("mem_efficient"),
        "math_sdp": _sdp("math"),
        "overrideable_sdp": _sdp("overrideable"),
        "math_sdp_reduction": _Setting(
            torch._C._get_math_sdp_allow_fp16_bf16_reduction, torch._C._set_math_sdp_allow_fp16_bf16_reduction
        ),
        "sdp_priority": _Setting(
            lambda: _joined(tuple(torch._C._get_sdp_priority_order())),
            lambda text: torch._C._set_sdp_priority_order([int(part) for part in text.split(",")]),
        ),
        "mkldnn": _own("mkldnn_enabled"),
        "mkldnn_deterministic": _own("mkldnn_deterministic"),
        "nnpack": _own("nnpack_enabled"),
        **{f"mkldnn_{op}_precision": _precision("mkldnn", op) for op in ("matmul", "conv", "rnn")},
    }


def cuda_settings() -> dict[str, _Setting]:
    """Returns the settings that only ops on CUDA obey. Builds of torch without CUDA have them, too."""
    table = {
        **_autocast("cuda"),
        "cudnn_sdp": _sdp("cudnn"),
        **{name: _own(name) for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")},
        "cublas_fp16_reduction": _several("cublas_allow_fp16_reduced_precision_reduction"),
        "cublas_bf16_reduction": _several("cublas_allow_bf16_reduced_precision_reduction"),
        "cublas_fp16_accumulation": _own("cublas_allow_fp16_accumulation"),
        "cuda_matmul_precision": _precision("cuda", "matmul"),
        **{f"cudnn_{op}_precision": _precision("cuda", op) for op in ("conv", "rnn")},
        "blas_backend": _choice("blas_preferred_backend", torch._C._BlasBackend),
        "linalg_backend": _choice("linalg_preferred_backend", torch._C._LinalgBackend),
        "sm_carveout": _or_minus_one("sm_carveout_experimental"),
    }
    if hasattr(torch._C, "_get_cudnn_depthwise_kernel"):  # torch 2.13 and newer
        table["cudnn_depthwise_kernel"] = _own("cudnn_depthwise_kernel")
    return table


@cache
def _is_of_cuda() -> tuple[bool, ...]:
    names = cuda_settings()
    return tuple(name in names for name in settings())


def has_cuda() -> bool:
    """Whether states of this process have CUDA's settings."""
    return any(_is_of_cuda())


def without_cuda(state: State) -> State:
    """Returns the state of a program that uses no CUDA device. It runs where CUDA's settings are unknown."""
    return tuple(None if is_of_cuda else value for value, is_of_cuda in zip(state, _is_of_cuda(), strict=True))


def limited(state: State, states: Sequence[State]) -> State:
    """Returns the state with the settings that other states have: those of a program, for its backward."""
    if not states:
        return state
    return tuple(None if other is None else value for value, other in zip(state, states[0], strict=True))


_clears = itertools.count(1)
_cleared = 0
_clear_autocast_cache = torch.clear_autocast_cache


def _clear_and_count() -> None:
    global _cleared
    _cleared = next(_clears)
    _clear_autocast_cache()


# Autocast calls this when a thread leaves its outermost region, and nothing else shows where a region ends. Without the
# count, a replay of two regions would use the casts of the first one in the second.
torch.clear_autocast_cache = _clear_and_count


def cleared_casts() -> int:
    """Returns a number that changes whenever any thread clears autocast's cache, as on leaving its outermost region."""
    return _cleared


@cache
def _readers() -> tuple[Callable[[], Any], ...]:
    return tuple(setting.read for setting in settings().values())


def capture() -> State:
    """Returns the present settings of the calling thread."""
    return tuple([read() for read in _readers()])


@cache
def _autocast_switches() -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(settings()) if name in {"autocast_cpu", "autocast_cuda"})


def is_autocast(state: State) -> bool:
    """Whether autocast is on for any kind of device in a state."""
    return any(state[position] for position in _autocast_switches())


def with_present_modes(state: State) -> State:
    """Returns the state with `dispatch_mode` as the calling thread has it at present."""
    return from_mapping({**to_mapping(state), "dispatch_mode": _dispatch_modes.read()})


def with_grad(state: State) -> State:
    """Returns the state with gradients enabled."""
    return from_mapping({**to_mapping(state), "grad": True})


def apply(state: State, current: State) -> None:
    """Changes the calling thread's settings from `current` to `state`; only those that differ are written."""
    for setting, value, present in zip(settings().values(), state, current, strict=True):
        if value is not None and value != present:
            setting.write(value)


@contextmanager
def restored() -> Iterator[None]:
    """Restores on exit the settings that the calling thread had on entry.

    Also clears autocast's cache, unless the thread is inside an autocast region, whose casts the cache then holds.
    """
    before = capture()
    try:
        yield
    finally:
        apply(before, capture())
        if torch.autocast_increment_nesting() == 1:  # the thread is in no region
            torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()


def threads_of(state: State) -> int:
    """Returns the number of threads that an op uses in a state."""
    return int(state[_place("threads")] or 1)


@cache
def _place(name: str) -> int:
    return list(settings()).index(name)


def to_mapping(state: State) -> dict[str, Value]:
    """Returns the values of a state by the names of its settings, which is the form that messages carry."""
    return {name: value for name, value in zip(settings(), state, strict=True) if value is not None}


def from_mapping(values: Mapping[str, Value]) -> State:
    """Returns the state of this process that a sender's values describe. The values are untrusted.

    A setting that the sender does not have keeps the present value of the calling thread. If none of CUDA's settings
    was sent, they are left as they are.

    Raises:
        ProgramError: This process does not have a setting, or a value has another type or is not allowed.
    """
    known = settings()
    present = to_mapping(capture())
    for name, value in values.items():
        if name not in known:
            raise ProgramError(
                f'this process has no setting "{name}": its build of torch or its devices differ from the sender\'s',
                setting=name,
            )
        if type(value) is not type(present[name]):
            raise ProgramError(
                f'the setting "{name}" can\'t be {value!r}: not of type {type(present[name]).__name__}', setting=name
            )
    _check_values(values)
    state = tuple({**present, **values}.values())
    return state if values.keys() & cuda_settings().keys() else without_cuda(state)


def _check_values(values: Mapping[str, Value]) -> None:
    """Raises ProgramError for a dtype, precision, count or order that torch must not be given."""
    for name, value in values.items():
        if name.endswith("dtype") and value not in _FLOATING:
            raise ProgramError(f'the setting "{name}" can\'t be {value!r}: not a floating dtype', setting=name)
        allowed = _ALLOWED.get(name) or (_PRECISIONS if name.endswith("precision") else None)
        if allowed is not None and value not in allowed:
            raise ProgramError(
                f'the setting "{name}" can\'t be {value!r}: it is one of {", ".join(sorted(allowed))}', setting=name
            )
    if not 1 <= int(values.get("threads", 1)) <= max_threads():
        raise ProgramError(f"the program runs with {values['threads']} threads, 1 to {max_threads()} are allowed")
    if values.get("deterministic", 0) not in {0, 1, 2}:
        raise ProgramError(f'the setting "deterministic" can\'t be {values["deterministic"]!r}: it is 0, 1 or 2')
    present = str(settings()["sdp_priority"].read())
    order = str(values.get("sdp_priority", present))
    # torch does not check the length: it would write a longer list past the end of its own.
    if sorted(order.split(",")) != sorted(present.split(",")):
        raise ProgramError(f'the setting "sdp_priority" can\'t be {order!r}: it is a permutation of {present}')


def max_threads() -> int:
    """Returns the largest number of threads that a program may use. It is bounded because torch never ends a thread."""
    return max(64, 4 * (os.cpu_count() or 1))


_PRECISIONS = frozenset({"none", "ieee", "tf32", "bf16"})


def _members(kind: Any) -> frozenset[str]:
    """Returns the names of the members of an enumeration that torch defines in C++."""
    return frozenset(kind.__members__)


_ALLOWED = {
    "cublas_fp16_reduction": frozenset({"0", "1", "0,0", "0,1", "1,1"}),
    "cublas_bf16_reduction": frozenset({"0", "1", "0,0", "0,1", "1,1"}),
    "blas_backend": _members(torch._C._BlasBackend),
    "linalg_backend": _members(torch._C._LinalgBackend),
    "cudnn_depthwise_kernel": frozenset({"auto", "cudnn", "native"}),
}
"""The values that torch takes of settings that are text. It may refuse some of them in builds without the library."""

_FLOATING = {str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
