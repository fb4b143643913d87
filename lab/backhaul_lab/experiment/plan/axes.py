"""The axes of a matrix: what can vary between cells, and how a value is written in a file. Pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = int | float | str
"""A value of an axis. Bandwidths are bytes per second (0 for unlimited), latencies seconds in one direction."""

_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMG])bit(?:/s)?")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_BITS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
UNLIMITED = "unlimited"
_MOST = 1_000_000
"""The largest number on an axis of whole numbers."""
_BANDWIDTHS = (1e3 / 8, 1e12 / 8)
"""The smallest and the largest bandwidth, in bytes per second."""
_LONGEST_S = 60.0


def parse_bandwidth(value: Any) -> float:
    """Returns bytes per second, 0 for "unlimited". Raises ValueError for an absurd one, or one without a unit."""
    if value == UNLIMITED:
        return 0.0
    match = _BANDWIDTH.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a bandwidth: write it as "100Mbit", or "{UNLIMITED}"')
    bytes_per_s = float(match[1]) * _BITS[match[2]] / 8
    if not _BANDWIDTHS[0] <= bytes_per_s <= _BANDWIDTHS[1]:
        raise ValueError(f"{value[:40]!r} is not a bandwidth between 1 kbit/s and 1000 Gbit/s")
    return bytes_per_s


def parse_latency(value: Any) -> float:
    """Returns seconds. Raises ValueError for a latency above a minute, or one without a unit."""
    match = _LATENCY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a latency: write it as "5ms"')
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST_S:
        raise ValueError(f"{value[:40]!r} is longer than the longest latency, {_LONGEST_S:g} s")
    return seconds


def show_bandwidth(bytes_per_s: Value) -> str:
    """Returns a bandwidth as it is written in a file."""
    bits = float(bytes_per_s) * 8
    if not bits:
        return UNLIMITED
    unit = next((unit for unit in ("G", "M") if bits >= _BITS[unit]), "k")
    return f"{bits / _BITS[unit]:g} {unit}bit/s"


def show_latency(seconds: Value) -> str:
    """Returns a latency in milliseconds."""
    return f"{float(seconds) * 1e3:g} ms"


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a whole number above 0")
    if value > _MOST:
        raise ValueError(f"a number above {_MOST:,} is too large")
    return value


def _speed(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.01 <= value <= 100:  # noqa: PLR2004
        raise ValueError(f"{value!r} is not a speed between 0.01 and 100")
    return float(value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
        return str(value)

    return parse


def _plain(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that can vary between cells.

    Attributes:
        name: Its key in the table `matrix` of a file.
        label: What a chart writes below the axis, with the unit.
        phrase: What a sentence calls a value, as in "{} worker{s}", with the plural's ending at {s}.
        default: The value of a cell whose file does not set the axis.
        parse: Checks a value of a file and converts it. Raises ValueError.
        show: Writes a converted value for people.
        scale: How a chart spaces the values: "log", "linear", or "names" for values without an order.
        unlimited_last: Whether the value 0 stands for unlimited, so that a chart puts it last.
    """

    name: str
    label: str
    phrase: str
    default: Value
    parse: Callable[[Any], Value]
    show: Callable[[Value], str] = _plain
    scale: str = "log"
    unlimited_last: bool = False

    def said(self, value: Value) -> str:
        """Returns what a sentence calls a value, as in "4 workers"."""
        return self.phrase.format(self.show(value), s="" if value == 1 else "s")


_ALL = (
    Axis("trainers", "number of trainers", "{} trainer{s}", 1, _count),
    Axis("workers", "number of workers", "{} worker{s}", 1, _count),
    Axis("worker_speed", "speed of a worker (the trainer's is 1)", "worker speed {}", 1.0, _speed),
    Axis(
        "returns",
        "what workers return",
        "returned {}",
        "gradients",
        _one_of("gradients", "activations", "auto"),
        scale="names",
    ),
    Axis("micro_batches", "micro-batches in a step; above 1 their backward is deferred", "micro-batches {}", 1, _count),
    Axis(
        "boundaries",
        "how boundaries reach a worker",
        "boundaries {}",
        "auto",
        _one_of("auto", "send", "derive"),
        scale="names",
    ),
    Axis("segment_layers", "layers in a segment", "{} layer{s} in a segment", 1, _count),
    Axis(
        "bandwidth",
        "bandwidth of a worker's link, in each direction",
        "bandwidth {}",
        0.0,
        parse_bandwidth,
        show_bandwidth,
        unlimited_last=True,
    ),
    Axis(
        "latency",
        "latency of a worker's link, in one direction (ms)",
        "latency {}",
        0.0,
        parse_latency,
        show_latency,
        "linear",
    ),
    Axis("batch", "rows in a step", "{} row{s} in a step", 4, _count),
    Axis("dtype", "data type", "{}", "float32", _one_of("float32", "bfloat16"), scale="names"),
)

AXES: Mapping[str, Axis] = {axis.name: axis for axis in _ALL}
"""All axes by name."""
