"""The thread that runs all programs of a worker, and owns its device."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar

from backhaul_runtime.process.threads import only_in
from backhaul_server.worker.engine.fair_queue import FairQueue, Job

T = TypeVar("T")

GRACE_S = 2.0
"""Seconds after its deadline within which the op that then runs has to end."""


class Executor:
    """Runs jobs one by one in a thread. Construct and use it in a running event loop's thread; `close` ends it.

    The host's clock measures jobs, because runs end with a wait for their device.

    Args:
        speculate: Returns a job that has begun already, or None. Called when no queued job can begin.
        overdue: Called with a job that still runs after `limit_s` and `GRACE_S`: a single op takes that long, which
            nothing in this process can cancel.
        limit_s: Seconds that a job may take. It ends by itself then, unless a single op takes longer.
    """

    def __init__(self, speculate: Callable[[], Job | None], overdue: Callable[[Job], None], limit_s: float) -> None:
        self._limit_s = limit_s
        self._speculate = speculate
        self._overdue = overdue
        self._watch: asyncio.TimerHandle | None = None
        self._queue = FairQueue()
        self._running: Job | None = None
        self._running_since = 0.0
        self._busy_s = 0.0
        self._is_woken = self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._next: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="executor", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Returns the number of jobs that wait or run."""
        return len(self._queue) + (self._running is not None)

    @property
    def busy_s(self) -> float:
        """Seconds that jobs have run since the start, with the one that runs now."""
        return self._busy_s + (monotonic() - self._running_since if self._running is not None else 0.0)

    def submit(self, job: Job) -> None:
        """Appends a job to its session's queue."""
        self._queue.push(job)
        self.wake()

    async def run(self, account: str, name: str, work: Callable[[], T]) -> T:
        """Runs work that belongs to no session, when it is the turn of its credential. Returns or raises what it does.

        Args:
            account: The name of the credential.
            name: What the work is, for the log.
            work: Called in the executor's thread. It must be short.
        """
        ended: asyncio.Future[T] = self._loop.create_future()
        outcome: list[Callable[[], None]] = []

        def catching() -> None:
            try:
                outcome.append(partial(ended.set_result, work()))
            except Exception as error:
                outcome.append(partial(ended.set_exception, error))

        def end() -> None:
            if not ended.done():  # else nobody waits any more
                outcome.pop()()

        self.submit(Job(account, name, lambda: True, catching, end, 0.0, name))
        return await ended

    @property
    def has_waiting(self) -> bool:
        """Whether jobs wait in the queue. Any thread may ask."""
        return bool(self._queue)

    def wake(self) -> None:
        """Looks for a job in the next turn of the loop: there may be speculative work, or room for a waiting job."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._begin)

    @property
    def is_idle(self) -> bool:
        """Whether no job runs, and none is being looked for."""
        return self._running is None and not self._is_woken

    def position(self, job: Job | None) -> tuple[bool, float]:
        """Returns whether a job runs, and else the expected seconds of work before it. None counts as not queued."""
        if job is None or job is self._running:
            return job is not None, 0.0
        queued_s = 0.0
        if self._running is not None:
            # A job that takes longer than expected may well take as long again.
            queued_s = abs(self._running.expected_s - (monotonic() - self._running_since))
        return False, queued_s + self._queue.queued_before(job)

    async def close(self) -> None:
        """Waits until the running job has ended, and drops the others."""
        self._is_closed = True
        self._next.put(None)
        await asyncio.to_thread(self._thread.join)

    def _begin(self) -> None:
        self._is_woken = False
        if self._running is None and not self._is_closed:
            self._running = self._queue.pop() or self._speculate()
            if self._running is not None:
                self._running_since = monotonic()
                self._watch = self._loop.call_later(self._limit_s + GRACE_S, self._overdue, self._running)
                self._next.put(self._running)

    @only_in("executor")
    def _work(self) -> None:
        """Runs in the executor's thread."""
        while (job := self._next.get()) is not None:
            job.work()
            del job  # while the thread waits, a reference would keep the job's segment alive
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._busy_s = self.busy_s
        job, self._running = self._running, None
        if self._watch is not None:
            self._watch.cancel()
        if job is not None and not self._is_closed:
            try:
                job.end()
            finally:
                self._begin()
