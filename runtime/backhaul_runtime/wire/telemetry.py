"""What both ends of telemetry must agree on. Free of torch."""

from bisect import bisect_left

BOUNDS_S = tuple(1e-4 * 2 ** (i / 4) for i in range(80))
"""Upper bounds of the buckets that durations are counted in: 0.1 ms to 88 s, each a fifth above the one before. One
more bucket takes what is longer."""


def bucket_of(duration_s: float) -> int:
    """The bucket that counts a duration."""
    return bisect_left(BOUNDS_S, duration_s)


MAX_SPANS = 64
"""Spans of a call that are told. One has about seven, more where its graph is run backward several times."""
