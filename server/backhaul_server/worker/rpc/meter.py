"""Counts and durations of RPCs. Event loop only."""

from collections import Counter
from dataclasses import dataclass, field

from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of


@dataclass(slots=True)
class Method:
    """Counts of one RPC since the worker's start.

    Attributes:
        calls: Number of finished calls.
        errors: Number of finished calls that failed.
        total_s: Duration of all calls together, in seconds.
        buckets: Number of calls by duration; the bounds are in `BOUNDS_S`.
    """

    calls: int = 0
    errors: int = 0
    total_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))


class RpcMeter:
    """Counts of all RPCs since the worker's start.

    Attributes:
        methods: Counts by RPC name, of the RPCs that were called.
        bytes: Bytes of all messages and shared tensors, by "received" and "sent".
    """

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.bytes: Counter[str] = Counter()

    def received(self, size_bytes: int) -> None:
        """Counts bytes that a trainer has sent."""
        self.bytes["received"] += size_bytes

    def sent(self, size_bytes: int) -> None:
        """Counts bytes that the worker has sent."""
        self.bytes["sent"] += size_bytes

    def call(self, method: str, duration_s: float, *, failed: bool) -> None:
        """Counts a finished call of an RPC."""
        counts = self.methods.setdefault(method, Method())
        counts.calls += 1
        counts.errors += failed
        counts.total_s += duration_s
        counts.buckets[bucket_of(duration_s)] += 1
