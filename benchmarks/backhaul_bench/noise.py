"""Whether a core was ours while something was timed. Free of torch; reads Linux' /proc.

NOTE [Noise]
A trainer that waits for its worker uses no CPU, so wall time over CPU time says nothing of neighbours. Two other
accounts do, and a core is noisy if either finds more than NOISY of the time:
1. What the computing thread of each process stood runnable without running (`schedstat`, to the nanosecond), less what
   our other threads and processes on its core ran meanwhile, also those that have ended: they are ours.
2. What the core was busy, or stolen by the hypervisor, less what our processes ran (`/proc/stat`). Not fooled by
   threads of ours, but sampled at clock ticks: hence the allowance.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOISY = 0.05
TICK_ALLOWANCE_S = 0.03
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Of one thread since it began."""

    ran_s: float
    delayed_s: float


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """A core at one moment.

    Attributes:
        at_s: By a clock that only advances.
        busy_s: Anything that ran on it since boot, and what was stolen; interrupts apart, which are nobody's.
        processes_ran_s: What each of our processes on it has run, by pid.
        threads: Those of our processes, by thread id.
    """

    at_s: float
    busy_s: float
    processes_ran_s: dict[int, float]
    threads: dict[int, dict[int, ThreadTimes]]


@dataclass
class Core:
    """A core and the processes that were pinned to it.

    Attributes:
        number: As the kernel counts cores.
        pids: Our processes there.
    """

    number: int
    pids: list[int] = field(default_factory=list)

    def times(self) -> CoreTimes:
        """Its accounts now. Processes that have ended are left out."""
        return CoreTimes(
            time.perf_counter(),
            _busy_s(self.number),
            {pid: ran for pid in self.pids if (ran := _process_ran_s(pid)) is not None},
            {pid: _threads(pid) for pid in self.pids},
        )


def foreign_share(before: CoreTimes, after: CoreTimes) -> float:
    """The part of the time between that others took from us, see NOTE [Noise]; 0 if it can't be told from none."""
    wall_s = after.at_s - before.at_s
    ran_s = sum(ran - before.processes_ran_s.get(pid, 0.0) for pid, ran in after.processes_ran_s.items())
    by_core_s = after.busy_s - before.busy_s - ran_s - TICK_ALLOWANCE_S
    by_delay_s = max((_delayed_by_others_s(before, after, pid, ran_s) for pid in after.threads), default=0.0)
    return max(0.0, by_core_s, by_delay_s) / wall_s


def _delayed_by_others_s(before: CoreTimes, after: CoreTimes, pid: int, ours_s: float) -> float:
    """Of the thread that ran most, by what is not among the time that all of ours ran on its core."""
    earlier = before.threads.get(pid, {})
    none = ThreadTimes(0.0, 0.0)
    ran = {thread: times.ran_s - earlier.get(thread, none).ran_s for thread, times in after.threads[pid].items()}
    if not ran:
        return 0.0
    lead = max(ran, key=lambda thread: ran[thread])
    delayed_s = after.threads[pid][lead].delayed_s - earlier.get(lead, none).delayed_s
    return delayed_s - (ours_s - ran[lead])


def pin(core: int, pid: int = 0) -> None:
    """Lets all threads of a process, this one by default, run on one core only; later threads inherit it."""
    for thread in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def settle(cores: Sequence[Core], quiet_s: float = 0.03, timeout_s: float = 5.0) -> None:
    """Returns when our processes on these cores have nothing left to do, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before = _ran_s(cores)
        time.sleep(quiet_s)
        if _ran_s(cores) - before < quiet_s / 10:
            return


def _ran_s(cores: Sequence[Core]) -> float:
    return sum(_process_ran_s(pid) or 0.0 for core in cores for pid in core.pids)


def _process_ran_s(pid: int) -> float | None:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the CPU clock of a process, as clock_getcpuclockid(3) makes it
    except OSError:
        return None


def _threads(pid: int) -> dict[int, ThreadTimes]:
    found = {}
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            ran_ns, delayed_ns, _ = (thread / "schedstat").read_text().split()
            found[int(thread.name)] = ThreadTimes(int(ran_ns) / 1e9, int(delayed_ns) / 1e9)
    except OSError:  # it ends just now
        pass
    return found


def _busy_s(core: int) -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            return sum(int(ticks[column]) for column in (_USER, _NICE, _SYSTEM, _STEAL)) / _TICKS_PER_S
    raise ValueError(f"core {core} is not online: /proc/stat does not have it")
