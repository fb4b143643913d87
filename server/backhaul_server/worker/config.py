"""A worker's settings. Free of torch: `backhaul worker --help` must be quick."""

import math
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path

from backhaul_runtime.process.addresses import Address
from backhaul_runtime.wire.protocol import LEASE_S

RUN_LIMIT_S = 120.0
"""No run may take longer. Trainers wait for one at most four times as long as they think it takes, and 5 s at least."""

_MOST_BYTES = 1 << 50
_KIB = 1 << 10
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>b|[kmgt](i?b)?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker runs."""

    address: Address
    """Where it listens. Port 0 takes any free one."""

    device: str = "auto"
    """"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""

    memory_bytes: int = 0
    """Budget for everything it holds, 0 for half of the device's memory."""

    lease_s: float = LEASE_S
    """What a silent trainer held is freed after so long."""

    run_limit_s: float = RUN_LIMIT_S
    """No run of a program may take longer."""

    token: str = field(default="", repr=False)
    """What a request must show, empty where whoever reaches the address may use the worker."""

    shared_memory: bool = True
    """Take tensors of trainers on this machine through memory shared with them."""

    unix_socket: bool = True
    """Beside a TCP address, serve a Unix socket that trainers on this machine go on over."""

    parent: int = 0
    """Trainer that started the worker for itself, and with which it ends; 0 for none."""

    supervisor: int = 0
    """Process that starts the worker again if it dies, and with which it ends; 0 for none."""


def parse_size(text: str) -> int:
    """Bytes, more than 0, from "4GiB", "4g", "512 MB" or "4096B", units being powers of 1024.

    Raises:
        ArgumentTypeError: The text is not a size, or has no unit: "64" may mean bytes or gigabytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f'"{text}" is not a size: write a number with B, K, M, G or T, as in 8GiB')
    number, unit = float(match["number"]), match["unit"]
    if number == 0:
        raise ArgumentTypeError(f'"{text}" leaves no room: leave it out to take half of the memory')
    if unit is None:
        raise ArgumentTypeError(f'"{text}" has no unit: write {match["number"]}GiB, {match["number"]}MiB or another')
    size = int(number * _UNITS[unit[0].lower()])
    if size > _MOST_BYTES:
        raise ArgumentTypeError(f'"{text}" is more memory than any machine has')
    return max(1, size)


def size_text(size_bytes: int) -> str:
    """A size as people write it: "1.5 GiB"."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < _KIB:
            break
        value, unit = value / _KIB, larger
    return f"{value:.4g} {unit}"


def parse_seconds(text: str) -> float:
    """Seconds, more than 0. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f'"{text}" is not a number of seconds above 0')
    return seconds


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container around this process if that is less."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))
