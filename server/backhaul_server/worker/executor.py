"""One thread that owns the device, and the order in which it works."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from backhaul_server.worker.fair_queue import FairQueue, Job


class Executor:
    """Runs jobs one by one. Construct and use it in a running event loop's thread; `close` ends it.

    Args:
        ahead: Gives a job that has begun, for when none waits that can begin.
    """

    def __init__(self, ahead: Callable[[], Job | None]) -> None:
        self._ahead = ahead
        self._queue = FairQueue()
        self._running: Job | None = None
        self._running_since = 0.0
        self._came = asyncio.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._task = asyncio.create_task(self._serve())

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self._queue) + (self._running is not None)

    def submit(self, job: Job) -> None:
        """Adds a job to its session's line."""
        self._queue.push(job)
        self._came.set()

    def wake(self) -> None:
        """There may be something to do ahead, or room for a job that waits."""
        self._came.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing was found to do."""
        return self._running is None and not self._came.is_set()

    def place(self, job: Job | None) -> tuple[bool, float]:
        """Whether a job runs, and else the expected seconds of work before it."""
        if job is None or job is self._running:
            return job is not None, 0.0
        left = 0.0
        if self._running is not None:
            # One that takes longer than expected may well take as long again.
            left = abs(self._running.expected_s - (monotonic() - self._running_since))
        return False, left + self._queue.ahead_of(job)

    async def close(self) -> None:
        """Waits for the job that runs and drops the others."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._running = self._queue.pop() or self._ahead()
            if self._running is None:
                self._came.clear()
                await self._came.wait()
                continue
            self._running_since = monotonic()
            await loop.run_in_executor(self._pool, self._running.work)
            self._end()

    def _end(self) -> None:
        job, self._running = self._running, None
        assert job is not None
        job.end()
