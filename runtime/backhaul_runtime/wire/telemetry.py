"""Constants that both ends of telemetry must agree on. Does not import torch."""

from bisect import bisect_left

BOUNDS_S = tuple(1e-4 * 2 ** (i / 4) for i in range(80))
"""Upper bounds of the histogram's buckets in seconds: 0.1 ms to 88 s, each a fifth above the previous one. One more
bucket counts longer durations."""


def bucket_of(duration_s: float) -> int:
    """Returns the index of the bucket that counts a duration in seconds."""
    return bisect_left(BOUNDS_S, duration_s)


MAX_RUN_NAME = 100
MAX_TAGS = 16
MAX_TAG = 40
MAX_NOTES = 2_000
"""The most characters of a run's name, tags of a run, characters of a tag, and characters of a run's notes."""
MAX_SPANS = 64
"""Number of spans that are reported for a call. A call has about seven; each further backward of it adds some."""
