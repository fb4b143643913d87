"""What the kernel knows of this process. Free of torch."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes(key: str = "VmRSS") -> int:
    """A memory field of this process ("VmRSS", "VmHWM", "VmData"), 0 where the kernel does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
