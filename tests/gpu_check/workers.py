"""A worker on the device under test, and sessions on it."""

from typing import Any

import backhaul
from gpu_check.results import DEVICE, IS_REAL
from support.processes import WorkerProcess

QUIET = backhaul.Settings(silence_s=30.0)


def worker(*options: str, device: str = DEVICE, memory: str = "") -> WorkerProcess:
    """Starts a worker. It is forked from no process that has used a GPU."""
    size = memory or ("24GiB" if IS_REAL else "1GiB")
    return WorkerProcess("--device", device, "--memory", size, *options, environment={"GPU_CHECK_WORKER": "1"})


def connect(process: WorkerProcess, *, returns: Any = "auto", strict: bool = False) -> backhaul.Session:
    """Connects to it."""
    return backhaul.connect(process.address, returns=returns, strict=strict, settings=QUIET)
