"""A discrete-event simulation of threads that share cores, and of links that carry bytes. Imports no torch.

A thread is a generator. It waits for whatever it yields: `Compute` on a core, which its threads share equally;
`Transfer` over a link, which carries one transfer at a time; an `Event`; or another thread's generator, which runs
concurrently.
"""

from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

_EPSILON_S = 1e-12


@dataclass(eq=False)
class SimulatedCore:
    """A core that divides its time equally among the threads that compute on it.

    Attributes:
        speed: Speed relative to the core that the costs were measured on.
    """

    speed: float = 1.0


@dataclass(eq=False)
class SimulatedLink:
    """One direction of a connection.

    Attributes:
        bytes_per_s: Bandwidth in bytes per second.
        latency_s: Delay between sending and receiving the last byte, in seconds.
        free_at_s: Simulated time at which the last queued transfer has been sent.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    free_at_s: float = 0.0


@dataclass(eq=False)
class Event:
    """An event that happens once. It resumes the waiting threads; threads that wait for it later continue at once."""

    has_happened: bool = False
    waiting: "list[Thread]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Compute:
    """A request to compute for `cpu_s` seconds on a core of speed 1."""

    core: SimulatedCore
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A request to send bytes over a link."""

    link: SimulatedLink
    size_bytes: float


Thread = Generator[Any, None, None]


@dataclass(slots=True)
class _Task:
    thread: Thread
    left_s: float


class Simulation:
    """Runs simulated threads until all of them have ended or are blocked forever.

    Attributes:
        now_s: The simulated time in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[Thread] = deque()
        self._tasks: dict[SimulatedCore, list[_Task]] = {}
        self._timers: list[tuple[float, int, Thread]] = []
        self._numbers = count()

    def start(self, thread: Thread) -> Event:
        """Starts a thread. Returns an event that happens when the thread ends."""
        ended = Event()

        def whole() -> Thread:
            yield from thread
            self.happens(ended)

        self._ready.append(whole())
        return ended

    def happens(self, event: Event) -> None:
        """Marks an event as happened and resumes the threads that wait for it."""
        event.has_happened = True
        self._ready.extend(event.waiting)
        event.waiting.clear()

    def run(self) -> None:
        """Runs until all threads have ended or wait for events that never happen."""
        while self._ready or self._timers or any(self._tasks.values()):
            while self._ready:
                thread = self._ready.popleft()
                with suppress(StopIteration):
                    self._wait(thread, next(thread))
            self._advance()

    def _wait(self, thread: Thread, wanted: Any) -> None:
        if isinstance(wanted, Compute):
            self._tasks.setdefault(wanted.core, []).append(_Task(thread, wanted.cpu_s))
        elif isinstance(wanted, Transfer):
            link = wanted.link
            link.free_at_s = max(link.free_at_s, self.now_s) + wanted.size_bytes / link.bytes_per_s
            heappush(self._timers, (link.free_at_s + link.latency_s, next(self._numbers), thread))
        else:
            event = wanted if isinstance(wanted, Event) else self.start(wanted)
            if event.has_happened:
                self._ready.append(thread)
            else:
                event.waiting.append(thread)

    def _advance(self) -> None:
        """Advances the time to the next moment at which a task or a transfer ends."""
        ends = [
            min(task.left_s for task in tasks) * len(tasks) / core.speed for core, tasks in self._tasks.items() if tasks
        ]
        if self._timers:
            ends.append(self._timers[0][0] - self.now_s)
        if not ends:
            return
        passed_s = max(0.0, min(ends))
        self.now_s += passed_s
        for core, tasks in self._tasks.items():
            for task in tasks:
                task.left_s -= passed_s * core.speed / len(tasks)
            for task in [task for task in tasks if task.left_s <= _EPSILON_S]:
                tasks.remove(task)
                self._ready.append(task.thread)
        while self._timers and self._timers[0][0] <= self.now_s + _EPSILON_S:
            self._ready.append(heappop(self._timers)[2])
