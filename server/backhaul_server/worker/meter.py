"""Counts and durations of RPCs. Written and read in the event loop's thread."""

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

KEPT_DURATIONS = 4096
_PERCENTILES = 100


@dataclass(frozen=True, slots=True)
class RpcStatistics:
    """One method so far.

    Attributes:
        method: Its name.
        calls: Finished ones.
        errors: Those of them that failed.
        p50_s: Median of the last calls' durations; p90_s and p99_s likewise.
        total_s: Of all calls.
    """

    method: str
    calls: int
    errors: int
    p50_s: float
    p90_s: float
    p99_s: float
    total_s: float


@dataclass(slots=True)
class _Method:
    calls: int = 0
    errors: int = 0
    total_s: float = 0.0
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DURATIONS))


class Meter:
    """What the wire did so far."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}
        self.bytes: Counter[str] = Counter()

    def received(self, size_bytes: int) -> None:
        """Counts bytes of a message that came."""
        self.bytes["received"] += size_bytes

    def sent(self, size_bytes: int) -> None:
        """Counts bytes of a message that went."""
        self.bytes["sent"] += size_bytes

    def call(self, method: str, duration_s: float, *, failed: bool) -> None:
        """Counts a finished call."""
        found = self._methods.setdefault(method, _Method())
        found.calls += 1
        found.errors += failed
        found.total_s += duration_s
        found.durations.append(duration_s)

    def statistics(self) -> list[RpcStatistics]:
        """All methods that were called, by name."""
        return [_statistics(name, method) for name, method in sorted(self._methods.items())]


def _statistics(name: str, method: _Method) -> RpcStatistics:
    durations = list(method.durations)
    # Of one value there are no quantiles but itself.
    cuts = statistics.quantiles(durations * 2 if len(durations) == 1 else durations, n=_PERCENTILES, method="inclusive")
    return RpcStatistics(name, method.calls, method.errors, cuts[49], cuts[89], cuts[98], method.total_s)
