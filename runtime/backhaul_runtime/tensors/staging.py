"""Between an accelerator and the host, without keeping the thread that feeds the accelerator waiting.

NOTE [Staging]
1. A device runs what is queued on a stream in order, and streams beside each other. So what another thread reads is
   marked by an event on the stream that made it, and read on a side stream that waits for the mark. Nobody waits for
   the stream that computes, and nothing is queued on it but marks.
2. `on_side_stream` ends when the device has done what was queued in it, also after an error. Whoever uses it holds what
   it reads until then, so no memory is given out again while it is read.
3. What arrives is copied on the stream of the thread that takes it in: what that thread queues next finds it there.
4. The host's memory for copies is pinned. It is torch's, which gives it out again only once copies have ended.
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
"""Pinned at a time of a tensor that is read: it is never given back to the system."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMoment:
    """A moment on a device.

    Attributes:
        device: The device, with its index.
        event: What was queued before it is done once this has happened; None for a moment that is past.
    """

    device: torch.device
    event: Any = None


def _cuda(device: torch.device) -> Any:
    """What knows a device's streams, None where ops have ended when they return."""
    return torch.cuda if device.type == "cuda" else None


def is_staged(device: torch.device) -> bool:
    """Whether copies to and from a device go by these rules."""
    return _cuda(device) is not None


def device_moments(tensors: Iterable[Tensor]) -> Sequence[DeviceMoment]:
    """Now, on the calling thread's streams, for the accelerators among the devices of these tensors."""
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
    """For what waits for nothing: a moment that is past, if the device is an accelerator."""
    return [DeviceMoment(device)] if is_staged(device) else []


def on_side_stream(after: Sequence[DeviceMoment]) -> AbstractContextManager[None]:
    """What the block queues on these marks' devices runs on side streams, after the marks. Waits for it (Rule 2)."""
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
    done = _cuda(device).Event(blocking=True)  # else the thread would spin
    done.record(stream)
    done.synchronize()


def use_here(tensor: Tensor) -> None:
    """Keeps memory taken `on_side_stream`, also if it is freed, until the calling thread's stream is done with it."""
    if (cuda := _cuda(tensor.device)) is not None:
        tensor.record_stream(cuda.current_stream(tensor.device))


def page_locked(size_bytes: int) -> Tensor:
    """uint8 [size_bytes] on the host with undefined elements, for asynchronous copies (Rule 4)."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def host_pieces(tensor: Tensor, layout: Layout, after: Sequence[DeviceMoment]) -> Iterator[Tensor]:
    """A tensor's payload on the host, in order, as uint8 [n] each; see `layout.payload`.

    Args:
        tensor: On any device; must not change until all is read.
        layout: The layout of the tensor.
        after: When it was made, from `device_moments`. Empty on the host, where its one piece may share its memory.
    """
    if not after:
        yield payload(tensor.detach(), layout).cpu()
        return
    with on_side_stream(after):
        data = payload(tensor.detach(), layout)
    for part in torch.split(data, PIECE_BYTES):
        with on_side_stream(last_moment(data.device)):
            piece = page_locked(part.numel())
            piece.copy_(part, non_blocking=True)
        yield piece


def to_device(data: bytes | memoryview, target: Tensor) -> None:
    """Copies bytes into a uint8 tensor [n] on an accelerator (Rule 3). They may change once this returns."""
    if data:
        piece = page_locked(len(data))
        np.copyto(np.frombuffer(host_bytes(piece), np.uint8), np.frombuffer(data, np.uint8))
        target.copy_(piece, non_blocking=True)
