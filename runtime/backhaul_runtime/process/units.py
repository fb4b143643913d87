"""Sizes, durations and counts in the options of commands, and as text. Does not import torch."""

import math
import re
from argparse import ArgumentTypeError

_MOST_BYTES = 1 << 50
_KIB = 1 << 10
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>b|[kmgt](i?b)?)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as "4GiB", "4g" or "4096B". Units are powers of 1024.

    Raises:
        ArgumentTypeError: The text is no size above 0, has no unit, as "64" may mean bytes or gigabytes, or has one of
            which people have two ideas, such as "GB".
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError(f'"{text}" is not a size: write a number with B, K, M, G or T, as in 8GiB')
    number, unit = float(match["number"]), match["unit"]
    if number == 0:
        raise ArgumentTypeError(f'"{text}" leaves no room: omit it to take half of the memory')
    if unit is None:
        raise ArgumentTypeError(f'"{text}" has no unit: write {match["number"]}GiB, {match["number"]}MiB or another')
    if len(unit) == len("GB"):
        raise ArgumentTypeError(
            f'"{text}" may mean powers of 1000 or of 1024: write {match["number"]}{unit[0].upper()}iB'
        )
    size_bytes = number * _UNITS[unit[0].lower()]
    if size_bytes > _MOST_BYTES:
        raise ArgumentTypeError(f'"{text}" is more memory than any machine has')
    return max(1, int(size_bytes))


def size_text(size_bytes: float) -> str:
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


def parse_count(text: str) -> int:
    """Returns a whole number above 0. Raises ArgumentTypeError for any other text."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ArgumentTypeError(f'"{text}" is not a number of at least 1')
    return count


def parse_amount(text: str) -> float:
    """Returns a finite number that is not negative. Raises ArgumentTypeError for any other text."""
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < math.inf:
        raise ArgumentTypeError(f'"{text}" is not a number of at least 0')
    return amount
