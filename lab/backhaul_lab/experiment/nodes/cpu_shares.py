"""Holds nodes to their shares of a core: by the kernel's quota where that is allowed, else by stopping them in turns.

NOTE [Groups]
1. A group is a directory of the cgroup filesystem. Processes that a member starts are members, too.
2. Groups are not freed with their processes. A small process of its own removes them when this one has ended, however
   that happens; it notices by its stdin. So it outlives only a machine that stops.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from backhaul_lab.harness import throttle

PERIOD_US = 20_000
"""Period of the quota: short beside a step, and long beside a context switch."""
_LEAST_QUOTA_US = 1_000
_EMPTY_S = 15.0


class CpuShares(Protocol):
    """A way to hold processes to a share of a core.

    Attributes:
        how: How it is done, for the record.
        follows_children: Whether processes that a member starts later share its quota.
    """

    how: str
    follows_children: bool

    def hold(self, name: str, pids: Sequence[int], share: float) -> None:
        """Holds processes, together, to a share of one core until `close`."""

    def close(self) -> None:
        """Lets all processes run, or frees what held them if they have ended."""


class QuotaShares:
    """Quotas of the kernel, for cgroup v1 and v2.

    Raises OSError if groups cannot be made here.
    """

    follows_children = True

    def __init__(self) -> None:
        parent, self._is_unified = parent_group()
        self.how = f"the kernel's CPU quota (cgroup v{2 if self._is_unified else 1})"
        self._root = parent / f"backhaul-experiment-{os.getpid()}"
        self._groups: list[Path] = []
        self._root.mkdir(exist_ok=True)
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            if self._is_unified:
                (self._root / "cgroup.subtree_control").write_text("+cpu")
            self._quota(self._group("probe"), 0.5)
        except OSError:
            self.close()
            raise
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-S", __file__, str(self._root)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def hold(self, name: str, pids: Sequence[int], share: float) -> None:
        """Holds processes, together, to a share of one core until `close`."""
        group = self._group(name)
        self._quota(group, share)
        for pid in pids:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Frees the groups. Their processes must have ended; those that have not run without a quota."""
        for group in self._groups:
            with suppress(OSError):
                self._quota(group, None)
        remove(self._root, 2.0)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()

    def _group(self, name: str) -> Path:
        group = self._root / name
        group.mkdir(exist_ok=True)
        self._groups.append(group)
        return group

    def _quota(self, group: Path, share: float | None) -> None:
        """Sets the quota of a group; None for no quota."""
        period_us = PERIOD_US if share is None else max(PERIOD_US, int(_LEAST_QUOTA_US / share))
        quota_us = None if share is None else round(period_us * share)
        if self._is_unified:
            (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))


class StoppedShares:
    """Processes are stopped and continued in turns, each group by a process of its own."""

    follows_children = False

    def __init__(self) -> None:
        self.how = "stopping and continuing processes every 20 ms (SIGSTOP)"
        self._throttles = ExitStack()

    def hold(self, name: str, pids: Sequence[int], share: float) -> None:
        """Holds processes to a share of a core until `close`. The name is not used."""
        if share < 1:
            self._throttles.enter_context(throttle.to(share, pids, min(os.sched_getaffinity(0))))

    def close(self) -> None:
        """Lets all processes run."""
        self._throttles.close()


def cpu_shares() -> CpuShares:
    """Returns the best way of this machine."""
    try:
        return QuotaShares()
    except OSError:
        return StoppedShares()


def obstacle() -> str:
    """Returns why no process can be throttled here; empty if processes can be."""
    return "" if hasattr(os, "sched_getaffinity") else "processes are throttled on Linux only"


def parent_group() -> tuple[Path, bool]:
    """Returns this process' group in which groups can be made, and whether it is of cgroup v2. Raises OSError."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            controllers = next((names for names in own if "cpu" in names.split(",")), "cpu")
            return Path(folder + own.get(controllers, "/")), False
    for _, folder, kind, *_ in mounts:
        if kind == "cgroup2":
            return Path(folder + own.get("", "/")), True
    raise OSError("no cgroup filesystem is mounted")


def remove(root: Path, timeout_s: float) -> None:
    """Removes a group and those inside once they are empty, or gives up after some seconds."""
    until_s = monotonic() + timeout_s
    while root.exists():
        for group in [*filter(Path.is_dir, root.glob("*")), root]:
            with suppress(OSError):
                group.rmdir()
        if monotonic() > until_s:
            return
        if root.exists():
            sleep(0.05)


if __name__ == "__main__":
    sys.stdin.read()
    remove(Path(sys.argv[1]), _EMPTY_S)
