"""Measures the work that a thread does or queues: see NOTE [Durations]."""

from collections.abc import Sequence
from time import perf_counter, time

import torch
from torch import Tensor

from backhaul_runtime.tensors.durations import DeviceSpan, Duration
from backhaul_runtime.tensors.layout import device_of
from backhaul_runtime.tensors.staging import timed_moment


class Stopwatch:
    """Measures the work that the calling thread does or queues from now until `stop`.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, timed_moment(device)
        self._began_at_s, self._began_s = (time(), 0.0) if self._began is not None else (0.0, perf_counter())

    def stop(self) -> Duration:
        """Returns the duration of the work so far. Call it in the same thread, under the same stream."""
        ended = timed_moment(self._device)
        if self._began is None or ended is None:
            return perf_counter() - self._began_s
        return DeviceSpan(self._began, ended, self._began_at_s)


def device_of_work(tensors: Sequence[Tensor]) -> torch.device:
    """Returns the device that code probably computes on.

    Args:
        tensors: The tensors that the code takes. Without any, it is the current accelerator if this process uses one.
    """
    if not tensors and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return device_of(tensors)
