"""Everything settable that an op's numbers depend on: taken at forward, applied for a replay.

A setting counts as state if it has a getter and a setter in torch. What has none is the fingerprint's business.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from struct import unpack
from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode

Value = bool | int | str
State = tuple[Value, ...]
"""One value per setting, in the order of `settings()`."""


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]


_text = cache(str)  # read before each op, these are worth keeping


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


def _pair(name: str) -> _Setting:
    return _Setting(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))


def _precision(backend: str, op: str) -> _Setting:
    return _Setting(
        lambda: torch._C._get_fp32_precision_getter(backend, op),
        lambda value: torch._C._set_fp32_precision_setter(backend, op, value),
    )


_LEAST: float = unpack("<d", (1).to_bytes(8, "little"))[0]  # no literal: reading one may already flush


def _flushes_denormals() -> bool:
    """Torch has only a setter. The bit is the thread's, and Python's own floats obey it."""
    return _LEAST * 1.0 == 0.0


class _DispatchModes(threading.local):
    """Whether a dispatch mode is on. Some ops are composed of others then, and round elsewhere.

    What we switch on is a mode that does nothing; what we switch off are those of the thread, for the time.
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
    """The settings this process has, by name. Depends only on the build and on whether it has CUDA."""
    table = {
        "grad": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "default_dtype": _dtype_setting(torch.get_default_dtype, torch.set_default_dtype),
        "flush_denormal": _Setting(_flushes_denormals, torch.set_flush_denormal),
        "dispatch_mode": _Setting(_dispatch_modes.read, _dispatch_modes.write),
        "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
        "autocast_cache": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **_autocast("cpu"),
        "deterministic": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "deterministic_fill": _pair("deterministic_fill_uninitialized_memory"),
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
        "mkldnn": _pair("mkldnn_enabled"),
        "mkldnn_deterministic": _pair("mkldnn_deterministic"),
        "nnpack": _pair("nnpack_enabled"),
        **{f"mkldnn_{op}_precision": _precision("mkldnn", op) for op in ("matmul", "conv", "rnn")},
    }
    if torch.cuda.is_available():
        table |= {
            **_autocast("cuda"),
            "cudnn_sdp": _sdp("cudnn"),
            **{name: _pair(name) for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")},
            "cublas_fp16_reduction": _pair("cublas_allow_fp16_reduced_precision_reduction"),
            "cublas_bf16_reduction": _pair("cublas_allow_bf16_reduced_precision_reduction"),
            "cublas_fp16_accumulation": _pair("cublas_allow_fp16_accumulation"),
            "cuda_matmul_precision": _precision("cuda", "matmul"),
            **{f"cudnn_{op}_precision": _precision("cuda", op) for op in ("conv", "rnn")},
        }
    return table


_clears = itertools.count(1)
_cleared = 0
_clear_autocast_cache = torch.clear_autocast_cache


def _clear_and_count() -> None:
    global _cleared
    _cleared = next(_clears)
    _clear_autocast_cache()


torch.clear_autocast_cache = _clear_and_count  # nothing else tells one region from the next


def cleared_casts() -> int:
    """How often autocast's cache was cleared, by any thread: torch does so as one leaves its outermost region."""
    return _cleared


@cache
def _readers() -> tuple[Callable[[], Any], ...]:
    return tuple(setting.read for setting in settings().values())


def capture() -> State:
    """The settings of the calling thread, now."""
    return tuple([read() for read in _readers()])


@cache
def _autocast_switches() -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(settings()) if name in {"autocast_cpu", "autocast_cuda"})


def is_autocast(state: State) -> bool:
    """Whether autocast was on for any kind of device."""
    return any(state[position] for position in _autocast_switches())


def with_present_modes(state: State) -> State:
    """The state, but with whatever dispatch modes the calling thread has now."""
    return from_mapping({**to_mapping(state), "dispatch_mode": _dispatch_modes.read()})


def apply(state: State, current: State) -> None:
    """Changes the calling thread's settings from `current` to `state`; only those that differ are written."""
    for setting, value, present in zip(settings().values(), state, current, strict=True):
        if value != present:
            setting.write(value)


@contextmanager
def restored() -> Iterator[None]:
    """Puts the settings back that were there on entry, and drops autocast's cached casts if nobody else's are there."""
    before = capture()
    try:
        yield
    finally:
        apply(before, capture())
        if torch.autocast_increment_nesting() == 1:
            torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()


def threads_of(state: State) -> int:
    """How many threads ops take in a state."""
    return int(state[_place("threads")])


@cache
def _place(name: str) -> int:
    return list(settings()).index(name)


def to_mapping(state: State) -> dict[str, Value]:
    """The state by name, as it travels."""
    return dict(zip(settings(), state, strict=True))


def from_mapping(values: Mapping[str, Value]) -> State:
    """The state for this process. Raises ProgramError for a setting it does not have or a value of another type.

    A setting that the sender does not have keeps this process's present value.
    """
    known = settings()
    present = to_mapping(capture())
    for name, value in values.items():
        if name not in known:
            raise ProgramError(f'this process has no setting "{name}": its torch or its devices differ', setting=name)
        if type(value) is not type(present[name]):
            raise ProgramError(f'the setting "{name}" can\'t be {value!r}', setting=name)
    _check_values(values)
    return tuple({**present, **values}.values())


def _check_values(values: Mapping[str, Value]) -> None:
    """Values are as hostile as any input: names of dtypes and precisions are looked up, counts are bounded."""
    for name, value in values.items():
        if name.endswith("dtype") and value not in _FLOATING:
            raise ProgramError(f'the setting "{name}" can\'t be {value!r}: not a floating dtype', setting=name)
        if name.endswith("precision") and value not in {"none", "ieee", "tf32", "bf16"}:
            raise ProgramError(f'the setting "{name}" can\'t be {value!r}', setting=name)
    if not 1 <= int(values.get("threads", 1)) <= max_threads():
        raise ProgramError(f"{values['threads']} threads are asked for, at most {max_threads()} are given")
    if values.get("deterministic", 0) not in {0, 1, 2}:
        raise ProgramError(f'the setting "deterministic" can\'t be {values["deterministic"]!r}')
    present = str(settings()["sdp_priority"].read())
    order = str(values.get("sdp_priority", present))
    if sorted(order.split(",")) != sorted(present.split(",")):  # torch writes a longer list past the end of its own
        raise ProgramError(f'the setting "sdp_priority" can\'t be {order!r}: it is an order of {present}')


def max_threads() -> int:
    """Most threads that a program may ask for: each keeps its stack for good, so their number is bounded."""
    return max(64, 4 * (os.cpu_count() or 1))


_FLOATING = {str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
