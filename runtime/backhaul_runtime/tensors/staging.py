"""Copies between an accelerator and the host without blocking the thread that feeds the accelerator.

NOTE [Staging]
1. A device runs the work of a stream in order, and several streams side by side. So a tensor that another thread reads
   is marked by an event on the stream that produced it, and read on a side stream that waits for the event. Nothing
   waits for the computing stream, and only events are queued on it.
2. `on_side_stream` ends when the device has done the work queued in it, even after an error. The caller keeps what it
   reads alive until then, so no memory is reused while it is read.
3. Arriving tensors are copied on the stream of the thread that receives them, so later work of that thread sees them.
4. Host memory for copies is pinned. torch's allocator reuses it only after the copies have ended.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backhaul_runtime.tensors.layout import Layout, host_bytes, payload

PIECE_BYTES = 8 << 20
"""The bytes of a tensor that are in pinned memory at a time. Pinned memory is never returned to the system."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMoment:
    """A point in the work of a device.

    Attributes:
        device: The device, with its index.
        event: Happens when everything queued before it is done; None for a point in the past.
    """

    device: torch.device
    event: Any = None


def _cuda(device: torch.device) -> Any:
    """Returns the module that manages a device's streams; None for a device whose ops are synchronous."""
    return torch.cuda if device.type == "cuda" else None


def is_staged(device: torch.device) -> bool:
    """Whether copies to and from a device follow these rules."""
    return _cuda(device) is not None


def device_moments(tensors: Iterable[Tensor]) -> Sequence[DeviceMoment]:
    """Returns the current points of the calling thread's streams, for the accelerators of these tensors."""
    moments = []
    for device in {tensor.device for tensor in tensors}:
        if (cuda := _cuda(device)) is not None:
            event = cuda.Event()
            event.record(cuda.current_stream(device))
            moments.append(DeviceMoment(device, event))
    return moments


@cache
def _side_stream(device: torch.device) -> Any:
    return _cuda(device).Stream(device)


def last_moment(device: torch.device) -> Sequence[DeviceMoment]:
    """Returns a point in the past for an accelerator, for a reader that waits for nothing."""
    return [DeviceMoment(device)] if is_staged(device) else []


def on_side_stream(after: Sequence[DeviceMoment]) -> AbstractContextManager[None]:
    """Queues the block's work on side streams after these points. Waits for it at the end (Rule 2)."""
    return _aside(after) if after else nullcontext()


@contextmanager
def _aside(after: Sequence[DeviceMoment]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {mark.device for mark in after}:
            side = _side_stream(device)
            stack.enter_context(_cuda(device).stream(side))
            stack.callback(_wait_for, side, device)
        for mark in after:
            if mark.event is not None:
                _side_stream(mark.device).wait_event(mark.event)
        yield


def _wait_for(stream: Any, device: torch.device) -> None:
    done = _cuda(device).Event(blocking=True)  # without `blocking` the thread would spin
    done.record(stream)
    done.synchronize()


def use_here(tensor: Tensor) -> None:
    """Keeps memory from `on_side_stream` from being reused until the calling thread's stream is done with it."""
    if (cuda := _cuda(tensor.device)) is not None:
        tensor.record_stream(cuda.current_stream(tensor.device))


def page_locked(size_bytes: int) -> Tensor:
    """Returns uint8 [size_bytes] on the host with undefined elements, for asynchronous copies (Rule 4)."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def host_pieces(tensor: Tensor, layout: Layout, after: Sequence[DeviceMoment]) -> Iterator[Tensor]:
    """Yields a tensor's payload on the host, in order, as uint8 [n] each; see `layout.payload`.

    Args:
        tensor: A tensor on any device. It must not change until everything was read.
        layout: The layout of the tensor.
        after: The points at which it was complete, from `device_moments`. Empty on the host, where the only piece may
            share its memory.
    """
    if not after:
        yield payload(tensor.detach(), layout).cpu()
        return
    data: Tensor | None = None
    for begin in range(0, layout.payload_bytes, PIECE_BYTES):
        with on_side_stream(after if data is None else last_moment(tensor.device)):
            data = payload(tensor.detach(), layout) if data is None else data
            part = data[begin : begin + PIECE_BYTES]
            piece = page_locked(part.numel())
            piece.copy_(part, non_blocking=True)
        yield piece


def to_device(data: bytes | memoryview, target: Tensor) -> None:
    """Copies bytes into a uint8 tensor [n] on an accelerator (Rule 3). The bytes may be changed afterwards."""
    if data:
        piece = page_locked(len(data))
        np.copyto(np.frombuffer(host_bytes(piece), np.uint8), np.frombuffer(data, np.uint8))
        target.copy_(piece, non_blocking=True)
