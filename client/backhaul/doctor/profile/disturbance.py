"""How much other programs disturb a measurement, from Linux' /proc. Imports no torch.

A computing thread that is runnable but does not run (`schedstat`) was delayed by others, or by our own threads. Others
can have delayed it for at most as long as they ran on our cores (`/proc/stat` without what our processes ran).
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backhaul.doctor.profile.thread_times import ThreadTimes, thread_times

NOISY = 0.05
"""A measurement is disturbed if a computing thread waited for its core for a larger share of its time."""

_NONE = ThreadTimes(0.0, 0.0)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7


@dataclass(frozen=True, slots=True)
class Times:
    """What ran on the cores of this machine that this process may use, until some moment.

    Attributes:
        busy_s: Seconds for which the cores were busy or stolen by the hypervisor, all together.
        processes: The times of our threads, by the id of their process and their own.
    """

    busy_s: float
    processes: dict[int, dict[int, ThreadTimes]]


def times() -> Times:
    """Returns the times of this process and those that it has started, such as a worker.

    They are zeros where there is no /proc.
    """
    pids = [os.getpid()]
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            pids += map(int, task.read_text().split())
    return Times(_busy_s(), {pid: thread_times(pid) for pid in pids})


def disturbed_share(before: Times, after: Times) -> float:
    """Returns the share of the time between in which other programs delayed a computing thread, from 0 to 1.

    Of each process the thread counts that ran the longest, and of these the one that was delayed the most.
    """
    ours_s = 0.0
    delays: list[tuple[float, float]] = []
    for pid, threads in after.processes.items():
        earlier = before.processes.get(pid, {})
        ran_s = {thread: one.ran_s - earlier.get(thread, _NONE).ran_s for thread, one in threads.items()}
        ours_s += sum(ran_s.values())
        lead = max(ran_s, key=lambda thread: ran_s[thread], default=None)
        if lead is not None:
            delays.append((threads[lead].delayed_s - earlier.get(lead, _NONE).delayed_s, ran_s[lead]))
    foreign_s = max(0.0, after.busy_s - before.busy_s - ours_s)
    return max(
        (min(delayed_s, foreign_s) / (ran_s + delayed_s) for delayed_s, ran_s in delays if delayed_s > 0), default=0.0
    )


def _busy_s() -> float:
    ticks = 0
    with suppress(OSError):
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *columns = line.split()
            if name in cores:
                ticks += sum(int(columns[column]) for column in (_USER, _NICE, _SYSTEM, _STEAL))
    return ticks / _TICKS_PER_S
