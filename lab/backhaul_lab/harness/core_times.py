"""Detects whether other processes used a core during a measurement. Imports no torch; reads Linux' /proc.

NOTE [Noise]
A trainer that waits for its worker uses no CPU, so the ratio of wall time to CPU time does not show disturbances. Two
other measures do. A core is noisy if either of them exceeds the fraction NOISY of the elapsed time:
1. The time that the computing thread of each process was runnable but not running (`schedstat`, in nanoseconds), minus
   the time that our other threads and processes ran on its core, including those that have ended.
2. The time that the core was busy, or stolen by the hypervisor, minus the time that our processes ran (`/proc/stat`).
   Our own threads do not distort it, but it is sampled at clock ticks: hence TICK_ALLOWANCE_S.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backhaul.doctor.profile.thread_times import ThreadTimes, thread_times

NOISY = 0.05
TICK_ALLOWANCE_S = 0.03
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
_CHILDREN_TICKS = slice(13, 15)
"""Fields cutime and cstime of /proc/PID/stat, counted from the one after the name."""


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """CPU times of a core at one moment.

    Attributes:
        at_s: The moment, in seconds of a monotonic clock.
        busy_s: Seconds since boot that the core was busy or stolen, without interrupts, which belong to no process.
        processes_ran_s: Seconds that each of our processes on the core has run, by pid.
        threads: Times of our processes' threads, by pid and thread id.
    """

    at_s: float
    busy_s: float
    processes_ran_s: dict[int, float]
    threads: dict[int, dict[int, ThreadTimes]]


@dataclass
class Core:
    """A core and the processes that were pinned to it.

    Attributes:
        number: Number of the core, as the kernel counts cores.
        pids: Ids of our processes that are pinned to the core.
    """

    number: int
    pids: list[int] = field(default_factory=list)

    def times(self) -> CoreTimes:
        """Returns the times of the core now, without processes that have ended."""
        return CoreTimes(
            time.perf_counter(),
            _busy_s(self.number),
            {pid: ran for pid in self.pids if (ran := process_ran_s(pid)) is not None},
            {pid: thread_times(pid) for pid in self.pids},
        )


class MachineTimes:
    """How much the cores of this machine that we may use have worked until now, for others and for us.

    Args:
        ours_s: CPU seconds that our processes have used so far.
    """

    def __init__(self, ours_s: float) -> None:
        self._at_s, self._ours_s = time.monotonic(), ours_s
        self._cores = sorted(os.sched_getaffinity(0))
        self._busy_s = sum(map(_busy_s, self._cores))

    def foreign_share(self, before: "MachineTimes") -> float:
        """Returns the fraction of the cores' time since a moment that others than our processes used, at least 0."""
        wall_s = (self._at_s - before._at_s) * len(self._cores)
        return max(0.0, (self._busy_s - before._busy_s - self._ours_s + before._ours_s) / wall_s)


def foreign_share(before: CoreTimes, after: CoreTimes) -> float:
    """Returns the fraction of the time between that other processes took from ours, see NOTE [Noise].

    The fraction is 0 if it cannot be distinguished from none.
    """
    wall_s = after.at_s - before.at_s
    ran_s = sum(ran - before.processes_ran_s.get(pid, 0.0) for pid, ran in after.processes_ran_s.items())
    by_core_s = after.busy_s - before.busy_s - ran_s - TICK_ALLOWANCE_S
    by_delay_s = max((_delayed_by_others_s(before, after, pid, ran_s) for pid in after.threads), default=0.0)
    return max(0.0, by_core_s, by_delay_s) / wall_s


def _delayed_by_others_s(before: CoreTimes, after: CoreTimes, pid: int, ours_s: float) -> float:
    """Returns how long other processes delayed a process' busiest thread: its delay minus our other threads' time."""
    earlier = before.threads.get(pid, {})
    none = ThreadTimes(0.0, 0.0)
    ran = {thread: times.ran_s - earlier.get(thread, none).ran_s for thread, times in after.threads[pid].items()}
    if not ran:
        return 0.0
    lead = max(ran, key=lambda thread: ran[thread])
    delayed_s = after.threads[pid][lead].delayed_s - earlier.get(lead, none).delayed_s
    return delayed_s - (ours_s - ran[lead])


def pin(core: int, pid: int = 0) -> None:
    """Restricts all threads of a process, by default this one, to one core. Later threads inherit the restriction."""
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def settle(cores: Sequence[Core], quiet_s: float = 0.03, timeout_s: float = 5.0) -> None:
    """Waits until our processes on these cores are idle, or until the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before = _ran_s(cores)
        time.sleep(quiet_s)
        if _ran_s(cores) - before < quiet_s / 10:
            return


def _ran_s(cores: Sequence[Core]) -> float:
    return sum(process_ran_s(pid) or 0.0 for core in cores for pid in core.pids)


def process_ran_s(pid: int) -> float | None:
    """Returns the CPU seconds of a process since it began, None if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # The id that clock_getcpuclockid(3) returns.
    except OSError:
        return None


def children_ran_s(pid: int) -> float:
    """Returns the CPU seconds of the ended children of a process that it has waited for, and of their children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended, or this is not Linux
        return 0.0
    return sum(map(int, fields[_CHILDREN_TICKS])) / _TICKS_PER_S


def _busy_s(core: int) -> float:
    """Returns the seconds since boot that a core was busy or stolen, without interrupts."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            return sum(int(ticks[column]) for column in (_USER, _NICE, _SYSTEM, _STEAL)) / _TICKS_PER_S
    raise ValueError(f"core {core} is not online: /proc/stat does not list it")
