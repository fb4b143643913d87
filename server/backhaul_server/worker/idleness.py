"""Whether the machine's GPU or CPU is otherwise idle, for `backhaul worker --when-idle`. Does not import torch.

NOTE [Idleness]
1. A worker on a GPU looks at that GPU only, any other worker at the CPU only.
2. What the worker itself uses does not count. It runs at the lowest priority, so others get the CPU when they want it.
3. The machine is busy when others have used more than the limit on average over `BUSY_S`, so that a short command does
   not end the worker. It is idle when no second of the quiet time was above the limit.
"""

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from time import monotonic

QUIET_S = 60.0
"""Seconds for which the machine must have been idle before a worker starts, unless the option says otherwise."""

BUSY_S = 5
"""Number of one-second samples whose mean decides that the machine is in use again."""

CPU_LIMIT, GPU_LIMIT = 0.5, 10.0
"""What others may use while the machine counts as idle: cores of the CPU, and percent of the GPU's multiprocessors."""

_SMI = "nvidia-smi"
_SMI_S = 5.0

Usage = Callable[[int], float]
"""Returns what other processes use now, given the session id of the worker's processes; 0 for no worker."""


class Idleness:
    """Follows whether others use the machine. Call `look` once a second.

    Args:
        quiet_s: Seconds for which the machine must have been idle.
        usage: Reads what others use.
        limit: What others may use while the machine counts as idle.
        what: What is measured, for logs.
    """

    def __init__(self, quiet_s: float, usage: Usage, limit: float, what: str) -> None:
        self.quiet_s, self.what = quiet_s, what
        self._usage, self._limit = usage, limit
        self._samples: deque[float] = deque(maxlen=BUSY_S)
        self._session = 0
        self._quiet_since_s = monotonic()

    @classmethod
    def of(cls, device: str, quiet_s: float) -> "Idleness":
        """Returns the idleness of a worker's device, "auto", "cpu", "cuda" or "cuda:N" (Rule 1)."""
        if device != "cpu" and (device != "auto" or _has_gpu()):
            number = device.partition(":")[2]
            gpu = _gpu_name(int(number) if number.isdigit() else 0)  # the worker itself refuses what is no device
            return cls(quiet_s, lambda own: gpu_usage(gpu, own), GPU_LIMIT, f"GPU {gpu}")
        return cls(quiet_s, CpuUsage(), CPU_LIMIT, "CPU")

    def look(self, session: int) -> None:
        """Takes a sample.

        Args:
            session: The session id of the worker's processes; 0 if no worker runs.
        """
        used = self._usage(session)
        if session != self._session:  # what was used before this worker started must not end it
            self._session = session
            self._samples.clear()
        self._samples.append(used)
        if used > self._limit:
            self._quiet_since_s = monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether a worker may start."""
        return monotonic() - self._quiet_since_s >= self.quiet_s

    @property
    def is_busy(self) -> bool:
        """Whether a worker that runs must end."""
        return len(self._samples) == BUSY_S and fmean(self._samples) > self._limit


class CpuUsage:
    """Reads the cores of the CPU that other processes have used since the last call, from /proc."""

    def __init__(self) -> None:
        self._last = 0.0, 0.0
        self._last_of: tuple[int, float] = 0, 0.0

    def __call__(self, session: int) -> float:
        """See `Usage`."""
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        now_s, busy = monotonic(), (user + nice + system + irq + softirq) / tick
        own = sum(_ticks_of(session)) / tick
        (last_s, last_busy), (last_session, last_own) = self._last, self._last_of
        self._last, self._last_of = (now_s, busy), (session, own)
        if not last_s:
            return 0.0
        grown = own - last_own if session == last_session else own
        return max(0.0, busy - last_busy - max(0.0, grown)) / max(1e-3, now_s - last_s)


def _ticks_of(session: int) -> Iterator[int]:
    """Yields the clock ticks that each process of a session has used, with those of its ended children."""
    for stat in Path("/proc").glob("[0-9]*/stat") if session else ():
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield sum(map(int, fields[11:15]))


def _gpu_name(index: int) -> str:
    """Returns the number or UUID by which nvidia-smi knows a GPU of this process, whose CUDA may see only some."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return visible[index] if index < len(visible) and visible[index] else str(index)


def gpu_usage(gpu: str, session: int) -> float:
    """Returns the percent of a GPU's multiprocessors that processes outside of a session use, as nvidia-smi counts.

    0 if nvidia-smi does not answer: then nothing shows that somebody uses the GPU.
    """
    try:
        printed = subprocess.run(
            [_SMI, "pmon", "-i", gpu, "-c", "1", "-s", "u"],
            capture_output=True,
            text=True,
            timeout=_SMI_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0.0
    used = 0.0
    for line in printed.splitlines():
        match line.split():
            case [gpu, pid, _, percent, *_] if gpu.isdigit() and pid.isdigit() and percent.isdigit():
                if not session or _session_of(int(pid)) != session:
                    used += float(percent)
    return used


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _has_gpu() -> bool:
    """Whether "auto" is a GPU for a worker of this process's environment."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip() in {"", "-1"}:
        return False  # CUDA sees none of the GPUs that nvidia-smi shows
    if shutil.which(_SMI) is None:
        return False
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run([_SMI, "-L"], capture_output=True, timeout=_SMI_S, check=False).returncode == 0
    return False
