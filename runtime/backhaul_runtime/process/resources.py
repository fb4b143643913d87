"""What the kernel knows of this process. Free of torch."""

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def resident_bytes(key: str = "VmRSS") -> int:
    """A memory field of this process ("VmRSS", "VmHWM", "VmData"), 0 where the kernel does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1.

    Those it may run on, or fewer where the container around it (cgroup v2) has less time than that: threads beyond the
    quota only take it from each other.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # not there, or "max": no quota
        return allowed
