"""A worker's settings. The module does not import torch, so that `backhaul worker --help` is quick."""

import math
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path

from backhaul_runtime.process.addresses import Address
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.wire.protocol import LEASE_S

RUN_LIMIT_S = 120.0
"""Seconds that a run may take. A trainer waits at most four times its expected duration, and at least 5 s."""

_MOST_BYTES = 1 << 50
_KIB = 1 << 10
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>b|[kmgt](i?b)?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of a worker, from the options of `backhaul worker`."""

    address: Address
    """The address to listen on; port 0 takes any free port."""

    device: str = "auto"
    """The device that runs programs: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""

    memory_bytes: int = 0
    """Budget in bytes for everything that the worker holds, 0 for half of the device's memory."""

    lease_s: float = LEASE_S
    """Seconds without a request after which a trainer's session is closed."""

    run_limit_s: float = RUN_LIMIT_S
    """Seconds that a run of a program may take."""

    token: str = field(default="", repr=False)
    """The token that requests must carry; empty if everyone who reaches the address may use the worker."""

    tls: TlsFiles | None = None
    """The files with which the worker speaks TLS, and requires clients to show a certificate; None: without TLS."""

    shared_memory: bool = True
    """Whether trainers on this machine may send and receive tensors in shared memory."""

    unix_socket: bool = True
    """Whether a worker with a TCP address also offers trainers on this machine a Unix socket."""

    parent: int = 0
    """Process id of the trainer that started the worker, and with which the worker ends; 0 for none."""

    supervisor: int = 0
    """Process id of the supervisor that restarts the worker, and with which the worker ends; 0 for none."""


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as "4GiB", "4g", "512 MB" or "4096B". Units are powers of 1024.

    Raises:
        ArgumentTypeError: The text is no size above 0, or has no unit: "64" may mean bytes or gigabytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f'"{text}" is not a size: write a number with B, K, M, G or T, as in 8GiB')
    number, unit = float(match["number"]), match["unit"]
    if number == 0:
        raise ArgumentTypeError(f'"{text}" leaves no room: omit it to take half of the memory')
    if unit is None:
        raise ArgumentTypeError(f'"{text}" has no unit: write {match["number"]}GiB, {match["number"]}MiB or another')
    size = int(number * _UNITS[unit[0].lower()])
    if size > _MOST_BYTES:
        raise ArgumentTypeError(f'"{text}" is more memory than any machine has')
    return max(1, size)


def size_text(size_bytes: int) -> str:
    """Formats a number of bytes, as in "1.5 GiB"."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < _KIB:
            break
        value, unit = value / _KIB, larger
    return f"{value:.4g} {unit}"


def parse_seconds(text: str) -> float:
    """Returns a number of seconds above 0. Raises ArgumentTypeError for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f'"{text}" is not a number of seconds above 0')
    return seconds


def host_memory_bytes() -> int:
    """Returns the bytes of this machine's memory, or the limit of this process's container if that is lower."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))
