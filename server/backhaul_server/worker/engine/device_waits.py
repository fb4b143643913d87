"""Threads that wait for the device, so that the event loop never does.

While the event loop waited, no request of any session would be answered and no progress reported, and trainers would
take the worker for lost. So the event loop only queues work on the device. What has to wait runs here: the reading of
digests, and waits for copies to the host.

There is one thread for each stream that is waited for. A device does the work of a stream in order, so a thread that
waits for one part of it delays no other part that would be done earlier. On the CPU nothing waits, and no thread is
started.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch

from backhaul_runtime.tensors.staging import DeviceMoment, Side, last_moment, queued_aside, wait_for

T = TypeVar("T")


class DeviceWaits:
    """The threads in which a worker waits for its device. Event loop only.

    Args:
        device: The device of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._for_side = {side: _thread(side.name.lower()) for side in (Side.TO_DEVICE, Side.TO_HOST)}
        self._for_results = _thread("results")  # of the stream on which the executor's thread computes

    def queued(self, side: Side) -> AbstractContextManager[None]:
        """Queues the block's work on a side stream, see NOTE [Staging]. On the CPU the block runs as it is."""
        return queued_aside(side, last_moment(self._device))

    async def run(self, side: Side, work: Callable[[], T]) -> T:
        """Runs work that queues ops on a side stream and waits for them. Returns its result, or raises its error."""

        def aside() -> T:
            with self.queued(side):
                return work()

        return await _ended(self._for_side[side], aside)

    async def copied(self, side: Side, moments: Iterable[DeviceMoment]) -> None:
        """Waits until the copies on a side stream that end at these moments are complete."""
        if coming := [moment for moment in moments if not moment.has_come]:
            await _ended(self._for_side[side], partial(wait_for, coming))

    async def computed(self, moments: Iterable[DeviceMoment]) -> None:
        """Waits until the executor's work before these moments is done."""
        if coming := [moment for moment in moments if not moment.has_come]:
            await _ended(self._for_results, partial(wait_for, coming))

    async def close(self) -> None:
        """Waits until the threads have ended. Nothing may wait any more."""
        for thread in (*self._for_side.values(), self._for_results):
            await asyncio.to_thread(thread.shutdown)


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"backhaul-wait-{name}")


async def _ended(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Runs work in a thread. Ends only when the work has ended, also if it is cancelled.

    Until then the work reads tensors. So its caller must not give up their memory, or what is charged for them.
    """
    running = asyncio.get_running_loop().run_in_executor(thread, work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # marks it as retrieved
        raise cancelled
    return running.result()
