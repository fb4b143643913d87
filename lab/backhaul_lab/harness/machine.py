"""Describes the machine that results were measured on. Imports no torch."""

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

PACKAGES = ("backhaul", "torch", "grpcio", "protobuf", "numpy", "xxhash", "zstandard")
HIVEMIND = "BACKHAUL_BENCH_HIVEMIND"
"""Environment variable with the Python of an environment that has hivemind."""
_CORES = 2


def usable_cores() -> list[int]:
    """Returns the numbers of the cores that this process may use, in order; empty if the kernel does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def two_cores() -> list[int]:
    """Returns the numbers of the trainer's core and of the worker's. Raises ValueError if this machine has no two."""
    usable = usable_cores()
    if len(usable) < _CORES:
        raise ValueError(f"measuring needs Linux and {_CORES} cores, one for the trainer and one for the worker")
    return usable[:_CORES]


def describe(cores: Sequence[int] = (), device: str = "cpu") -> dict[str, Any]:
    """Returns hardware, versions and date as JSON.

    Args:
        cores: Numbers of the trainer's core and of the worker's, if each has one.
        device: The device that is measured, "cpu" or "cuda".
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {
            "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
            "cores": os.cpu_count() or 0,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "usable_cores": len(usable_cores()) or os.cpu_count() or 1,
            **dict(zip(("trainer_core", "worker_core"), cores, strict=False)),
            "tcp_congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
            "load_average": os.getloadavg()[0],
            "device": _device_name(device),
        },
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            **{name: number for name in PACKAGES if (number := _version(name))},
        },
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return device
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _field(path: str, key: str) -> str:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version_of(name)
    return ""
