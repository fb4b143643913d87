"""Counts and durations of RPCs. Written and read in the event loop's thread."""

from collections import Counter
from dataclasses import dataclass, field

from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of


@dataclass(slots=True)
class Method:
    """One method so far.

    Attributes:
        calls: Finished ones.
        errors: Those of them that failed.
        total_s: Of all calls.
        buckets: Calls by duration, see `BOUNDS_S`.
    """

    calls: int = 0
    errors: int = 0
    total_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))


class RpcMeter:
    """What the wire did so far.

    Attributes:
        methods: Those that were called, by name.
        bytes: Of messages, "received" and "sent".
    """

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.bytes: Counter[str] = Counter()

    def received(self, size_bytes: int) -> None:
        """Counts bytes of a message that came."""
        self.bytes["received"] += size_bytes

    def sent(self, size_bytes: int) -> None:
        """Counts bytes of a message that went."""
        self.bytes["sent"] += size_bytes

    def call(self, method: str, duration_s: float, *, failed: bool) -> None:
        """Counts a finished call."""
        found = self.methods.setdefault(method, Method())
        found.calls += 1
        found.errors += failed
        found.total_s += duration_s
        found.buckets[bucket_of(duration_s)] += 1
