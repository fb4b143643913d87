"""Puts the simulated device in the place of torch.cuda, whose Python is part of torch without CUDA, too.

Loaded by site/sitecustomize.py after torch. Where torch asks for a property of the hardware, an H100's is given.
"""

import atexit
import contextlib
import ctypes
import importlib.util
import os
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

DEVICES = 2
MEMORY_BYTES = int(os.environ.get("SIMULATED_CUDA_BYTES", str(16 << 30)))
NAME = "simulated accelerator"


def _load(name: str, path: str | Path) -> Any:
    """Loads a module from its file: this process may have no path to the package that holds it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native: Any = _load("_simulated_cuda", os.environ["SIMULATED_CUDA"])
atexit.register(native.shutdown)
native.settings(
    limit=MEMORY_BYTES,
    lazy=os.environ.get("SIMULATED_CUDA_LAZY", "") == "1",
    delay_us=(0, int(os.environ.get("SIMULATED_CUDA_DELAY_US", "0"))),
    kernel_us=int(os.environ.get("SIMULATED_CUDA_KERNEL_US", "0")),
)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    """Takes torch.cuda.Stream's arguments."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        made: Stream = super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority, **kwargs)
        return made


class Event(torch.Event):
    """Takes torch.cuda.Event's arguments, and is a plain torch.Event: `elapsed_time` accepts no subclass."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # type: ignore[misc]
        return torch.Event(device="cuda", enable_timing=enable_timing)


class _Device(contextlib.ContextDecorator):
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    if stream is None:
        yield None
        return
    with _Device(stream.device):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(before)


class _Cuda(types.ModuleType):
    """The class of torch.cuda. `torch.utils.checkpoint` saves no state of generators without `_initialized`."""

    @property
    def _initialized(self) -> bool:
        pinned = vars(self).get("_pinned")
        return native.is_initialized() if pinned is None else pinned

    @_initialized.setter
    def _initialized(self, value: bool) -> None:  # a test may set it
        vars(self)["_pinned"] = None if value == native.is_initialized() else value


def _sync_debug_mode(mode: int | str) -> None:
    native.settings(sync_debug={"default": 0, "warn": 1, "error": 2}.get(str(mode), mode))


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        total_memory=MEMORY_BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        gcnArchName="",
        uuid=f"simulated-{_index(device)}",
    )


_GENERATORS = tuple(native.default_generator(index) for index in range(DEVICES))


def _compile_kernel(code: str, name: str, *_: Any, **__: Any) -> "Callable[..., None]":
    """Compiles a kernel for the host, with one thread in each block. Takes torch.cuda._compile_kernel's arguments."""
    function = _load("simulated_cuda_kernels", Path(__file__).with_name("kernels.py")).compile_for_host(code, name)
    address = ctypes.cast(function, ctypes.c_void_p).value

    def word(argument: Any) -> int:
        if not isinstance(argument, torch.Tensor):
            return ctypes.c_int(argument).value  # torch passes Python's integers as C's int
        if not (argument.is_cuda or argument.is_pinned()):
            raise ValueError("All tensor arguments must be CUDA tensors or pinned CPU tensors")
        pointer = argument.data_ptr()
        shadow = native.shadow(pointer) if argument.is_cuda and pointer else pointer
        return ctypes.c_int64(shadow).value

    def kernel(
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (1, 1, 1),
        args: Sequence[Any] | None = None,
        shared_mem: int = 0,
        stream: torch.Stream | None = None,
    ) -> None:
        with _stream(stream):
            native.launch(name, address, grid[0], [word(argument) for argument in args or ()])

    kernel.keep = function  # type: ignore[attr-defined]  # the library must stay loaded
    return kernel


_REPLACED: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "device": _Device,
    "stream": _stream,
    "is_available": lambda: True,
    "is_initialized": lambda: torch.cuda._initialized,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": native.is_in_bad_fork,
    "device_count": lambda: DEVICES,
    "current_device": torch.accelerator.current_device_index,
    "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
    "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
    "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
    "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=1),
    "set_stream": torch.accelerator.set_stream,
    "default_generators": _GENERATORS,
    "get_rng_state": lambda device="cuda": _GENERATORS[_index(device)].get_state(),
    "set_rng_state": lambda state, device="cuda": _GENERATORS[_index(device)].set_state(state) and None,
    "manual_seed": lambda seed: _GENERATORS[_index()].manual_seed(int(seed)) and None,
    "manual_seed_all": lambda seed: [one.manual_seed(int(seed)) for one in _GENERATORS] and None,
    "initial_seed": lambda: _GENERATORS[_index()].initial_seed(),  # noqa: PLW0108  the current device may change
    "memory_allocated": lambda device=None: native.memory(_index(device))[0],
    "max_memory_allocated": lambda device=None: native.memory(_index(device))[1],
    "memory_reserved": lambda device=None: native.memory(_index(device))[2],
    "reset_peak_memory_stats": lambda device=None: native.reset_peak(_index(device)),
    "empty_cache": native.empty_cache,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": _properties,
    "is_current_stream_capturing": lambda: False,
    "set_per_process_memory_fraction": lambda share, device=None: native.settings(limit=int(share * MEMORY_BYTES)),
    "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(_index(device)),
    "set_sync_debug_mode": _sync_debug_mode,
    "_sleep": lambda cycles: native.sleep(cycles // 2000),
    "_compile_kernel": _compile_kernel,
}


def _replace() -> None:
    torch.cuda.__class__ = _Cuda  # for `_initialized`
    vars(torch.cuda).pop("_initialized", None)
    for name, value in _REPLACED.items():
        setattr(torch.cuda, name, value)
    torch._C._cudnn = types.SimpleNamespace(  # type: ignore[assignment]
        getVersionInt=lambda: 0, getRuntimeVersion=lambda: (0, 0, 0), getCompileVersion=lambda: (0, 0, 0)
    )
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    plain: Any = torch.UntypedStorage.__new__

    def new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Makes storages on the device, which torch leaves out of builds without CUDA."""
        if device is None:
            return plain(cls, *args, **kwargs)
        if torch.device(device).type != "cuda":
            return plain(cls, *args, device=device, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new_storage  # type: ignore[method-assign]


_replace()
cells = _load("simulated_cuda_cells", Path(__file__).with_name("cells.py")).register()
