"""Resources of this process as the kernel reports them. Does not import torch."""

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_memory() -> float:
    """Returns the part of the machine's memory that is available, from 0 to 1; 1 if the kernel does not report it."""
    try:
        fields = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) / int(fields["MemTotal"].split()[0])
    except (OSError, ValueError, KeyError, ZeroDivisionError):
        return 1.0


def resident_bytes(key: str = "VmRSS") -> int:
    """Returns a memory field of this process, such as "VmRSS", in bytes; 0 if the kernel does not report it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


def usable_cores() -> int:
    """Returns the number of cores that this process may use, at least 1.

    That is its CPU affinity, or the quota of its container (cgroup v2) if that is lower: further threads would only
    compete for the same time.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # the file is missing, or says "max": there is no quota
        return allowed
