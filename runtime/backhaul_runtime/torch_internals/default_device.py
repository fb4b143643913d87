"""Tensors that code makes on the default device, which the caller may have set: a replay runs under another one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors


def watched_default_device(note: Callable[[], object]) -> AbstractContextManager[object]:
    """Calls `note` when a call in the block leaves the device of a tensor to the default device.

    Does nothing if the default device of the calling thread is the CPU, as it is in a replay. Otherwise
    `torch.set_default_device` or a `with torch.device(...)` is in effect.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    device = next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)
    return nullcontext() if device is None or device.type == "cpu" else _DefaultDeviceWatch(note)


class _DefaultDeviceWatch(TorchFunctionMode):
    def __init__(self, note: Callable[[], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is None and function in _device_constructors():
            self._note()
        return function(*args, **kwargs)
