"""CPU times of the threads of a process, from Linux' /proc. Imports no torch."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Seconds that one thread has run, and has been runnable but not running, since it began."""

    ran_s: float
    delayed_s: float


def thread_times(pid: int | str = "self") -> dict[int, ThreadTimes]:
    """Returns the times of the threads of a process, by thread id; of none if it has ended or there is no /proc."""
    times = {}
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError):  # the thread has just ended
                ran_ns, delayed_ns, _ = map(int, (thread / "schedstat").read_text().split())
                times[int(thread.name)] = ThreadTimes(ran_ns / 1e9, delayed_ns / 1e9)
    return times
