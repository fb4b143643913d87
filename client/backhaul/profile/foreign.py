"""Detects that other programs used the cores of a measurement. On systems without /proc nothing is detected."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

MOST_FOREIGN = 0.05
"""A step counts as undisturbed if other programs used at most this part of the cores."""
MOST_TRIES = 4
"""Steps are repeated until enough were undisturbed, but at most this many times as often."""
_PROC = Path("/proc")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat in which a core was busy: user, nice, system, interrupts, and what the host took."""
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Columns of /proc/PID/stat after the name."""


def family(pids: Collection[int]) -> frozenset[int]:
    """Returns processes and the descendants that they have now."""
    parents = {}
    for entry in _PROC.iterdir() if _PROC.exists() else ():
        if entry.name.isdigit() and (columns := _stat(int(entry.name))):
            parents[int(entry.name)] = int(columns[_PARENT])
    members, size = {*pids}, -1
    while len(members) != size:
        size = len(members)
        members |= {pid for pid, parent in parents.items() if parent in members}
    return frozenset(members)


@dataclass(frozen=True, slots=True)
class CoreUse:
    """What some cores and some processes have used until a moment.

    Attributes:
        at_s: The moment, in seconds of `perf_counter`.
        busy_s: Seconds for which the cores were busy, added up.
        own_s: CPU seconds of the processes.
        cores: Number of cores that can be read.
    """

    at_s: float
    busy_s: float
    own_s: float
    cores: int

    @classmethod
    def now(cls, cores: Collection[int], pids: Collection[int]) -> Self:
        """Returns what was used until now."""
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        names = {f"cpu{core}" for core in cores}
        try:
            rows = [line.split() for line in (_PROC / "stat").read_text().splitlines()]
        except OSError:
            rows = []
        busy = [sum(int(row[1 + column]) for column in _BUSY) for row in rows if row and row[0] in names]
        own = sum(int(columns[_USER]) + int(columns[_SYSTEM]) for pid in pids if (columns := _stat(pid)))
        return cls(perf_counter(), sum(busy) / ticks_per_s, own / ticks_per_s, len(busy))

    def was_quiet(self, before: "CoreUse") -> bool:
        """Whether other programs hardly used the cores since an earlier moment."""
        foreign_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return foreign_s <= MOST_FOREIGN * self.cores * (self.at_s - before.at_s)


Watch = Callable[[], CoreUse]
"""Returns what the cores and processes of a measurement have used until now."""


def steps_wanted(rounds: int, watch: "Watch | None") -> int:
    """Returns how many steps may run until `rounds` of them were undisturbed."""
    return rounds if watch is None else MOST_TRIES * rounds


def _stat(pid: int) -> list[str]:
    """Returns the columns of a process after its name; empty if it has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
