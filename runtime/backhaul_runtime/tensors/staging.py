"""Copies between an accelerator and the host without blocking the thread that feeds the accelerator.

NOTE [Staging]
1. A device runs the work of a stream in order, and several streams side by side. So a tensor that another thread reads
   is marked by an event on the stream that produced it, and read on a side stream that waits for the event. Nothing
   waits for the computing stream, and only events are queued on it.
2. There is one side stream for each `Side`, so that a tensor on its way to the host waits neither for tensors that
   arrive nor for the digests of a replay that is still queued.
3. Whoever queues work on a side stream keeps what it reads alive until the device has done that work, so no memory is
   reused while it is read. Digests are read at once. Pieces from `host_pieces` come with the moment at which they are
   complete, and a message keeps the tensor until that moment was waited for.
4. Arriving tensors are copied on the stream of the thread that receives them, so later work of that thread sees them.
   A worker receives on a side stream, and hands a tensor to other threads once its digest was read from that stream:
   then the copies are complete, and no thread needs to wait for an event.
5. Host memory for copies is pinned. torch's allocator reuses it only after the copies have ended.
6. The thread that queues a copy need not be the one that waits for it. A worker's event loop queues copies, and
   another thread waits: see `DeviceWaits` in `backhaul_server.worker.engine.device_waits`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backhaul_runtime.tensors.layout import Layout, host_bytes, payload

PIECE_BYTES = 8 << 20
"""The bytes of a tensor that are in pinned memory at a time. Pinned memory is never returned to the system."""


class Side(Enum):
    """What a side stream is for."""

    DIGESTS = "digests"
    TO_HOST = "tensors that are sent"
    TO_DEVICE = "tensors that arrive"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMoment:
    """A point in the work of a device.

    Attributes:
        device: The device, with its index.
        event: Happens when everything queued before it is done; None for a point in the past.
    """

    device: torch.device
    event: Any = None

    @property
    def has_come(self) -> bool:
        """Whether everything queued before is done. Does not wait."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Blocks the calling thread until everything queued before is done."""
        if not self.has_come:
            self.event.synchronize()


def _cuda(device: torch.device) -> Any:
    """Returns the module that manages a device's streams; None for a device whose ops are synchronous."""
    return torch.cuda if device.type == "cuda" else None


def is_staged(device: torch.device) -> bool:
    """Whether copies to and from a device follow these rules."""
    return _cuda(device) is not None


def device_moments(tensors: Iterable[Tensor]) -> Sequence[DeviceMoment]:
    """Returns the current points of the calling thread's streams, for the accelerators of these tensors."""
    return [moment for device in {tensor.device for tensor in tensors} for moment in present_moment(device)]


def present_moment(device: torch.device) -> Sequence[DeviceMoment]:
    """Returns the current point of the calling thread's stream of an accelerator; nothing for the host."""
    if (cuda := _cuda(device)) is None:
        return []
    event = cuda.Event(blocking=True)  # without `blocking` a thread that waits would spin
    event.record(cuda.current_stream(device))
    return [DeviceMoment(device, event)]


def timed_moment(device: torch.device) -> DeviceMoment | None:
    """Returns the current point of the calling thread's stream, whose time is noted; None for a synchronous device."""
    if (cuda := _cuda(device)) is None:
        return None
    event = cuda.Event(enable_timing=True, blocking=True)
    event.record(cuda.current_stream(device))
    return DeviceMoment(device, event)


def last_moment(device: torch.device) -> Sequence[DeviceMoment]:
    """Returns a point in the past for an accelerator, for a reader that waits for nothing."""
    return [DeviceMoment(device)] if is_staged(device) else []


def wait_for(moments: Sequence[DeviceMoment]) -> None:
    """Waits until all of these moments have come. Blocks the calling thread."""
    for moment in reversed(moments):  # the last one of a stream comes last: the others need no further wait
        moment.wait()


@cache
def _side_stream(device: torch.device, side: Side) -> Any:
    return _cuda(device).Stream(device)


def queued_aside(side: Side, after: Sequence[DeviceMoment]) -> AbstractContextManager[None]:
    """Queues the block's work on the side streams of these points' devices, after the points. Does not wait."""
    return _aside(side, after) if after else nullcontext()


@contextmanager
def _aside(side: Side, after: Sequence[DeviceMoment]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in {mark.device for mark in after}:
            stack.enter_context(_cuda(device).stream(_side_stream(device, side)))
        for mark in after:
            if mark.event is not None:
                _side_stream(mark.device, side).wait_event(mark.event)
        yield


def use_here(tensor: Tensor) -> None:
    """Keeps memory from a side stream from being reused until the calling thread's stream is done with it."""
    if (cuda := _cuda(tensor.device)) is not None:
        tensor.record_stream(cuda.current_stream(tensor.device))


def page_locked(size_bytes: int) -> Tensor:
    """Returns uint8 [size_bytes] on the host with undefined elements, for asynchronous copies (Rule 5)."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def host_pieces(
    tensor: Tensor, layout: Layout, after: Sequence[DeviceMoment]
) -> Iterator[tuple[Tensor, Sequence[DeviceMoment]]]:
    """Yields a tensor's payload on the host, in order, as uint8 [n] each; see `layout.payload`.

    Args:
        tensor: A tensor on any device. It must not change until everything was read.
        layout: The layout of the tensor.
        after: The points at which it was complete, from `device_moments`. Empty on the host, where the only piece may
            share its memory.

    Yields:
        Each piece, and the moments at which it is complete; see `wait_for`. Until then its bytes must not be read, and
        the caller must keep `tensor`.
    """
    if not after:
        yield payload(tensor.detach(), layout).cpu(), []
        return
    data: Tensor | None = None
    for begin in range(0, layout.payload_bytes, PIECE_BYTES):
        with queued_aside(Side.TO_HOST, after if data is None else last_moment(tensor.device)):
            data = payload(tensor.detach(), layout) if data is None else data
            part = data[begin : begin + PIECE_BYTES]
            piece = page_locked(part.numel())
            piece.copy_(part, non_blocking=True)
            complete = present_moment(tensor.device)
        yield piece, complete


def to_device(data: bytes | memoryview, target: Tensor) -> None:
    """Copies bytes into a uint8 tensor [n] on an accelerator (Rule 4). The bytes may be changed afterwards."""
    if data:
        piece = page_locked(len(data))
        np.copyto(np.frombuffer(host_bytes(piece), np.uint8), np.frombuffer(data, np.uint8))
        target.copy_(piece, non_blocking=True)
