"""The durations of a worker's calls, counted per second in little memory."""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from math import inf

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.wire.telemetry import BOUNDS_S

RETENTION_S = 900
METHODS = 32
"""The number of methods that are counted separately."""
ERRORS = len(BOUNDS_S) + 1
"""The index after the buckets under which failed calls are counted."""
_MOST = 2**32 - 1


@dataclass(slots=True)
class Counted:
    """Counts of the calls of one method over some time.

    Attributes:
        buckets: The number of calls by duration, see `backhaul_runtime.wire.telemetry`.
        errors: The number of calls that failed.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * ERRORS)
    errors: int = 0

    @property
    def calls(self) -> int:
        """The number of all successful calls."""
        return sum(self.buckets)

    def percentile(self, share: float) -> float | None:
        """Returns a percentile of the durations in seconds, accurate to 20 %; None without calls."""
        reached = list(accumulate(self.buckets))
        if reached[-1] == 0:
            return None
        wanted = share * reached[-1]
        bucket = next(index for index, count in enumerate(reached) if count >= wanted and count > 0)
        if bucket == len(BOUNDS_S):
            return BOUNDS_S[-1]
        below = BOUNDS_S[bucket - 1] if bucket else 0.0
        inside = (wanted - reached[bucket] + self.buckets[bucket]) / self.buckets[bucket]
        return below + (BOUNDS_S[bucket] - below) * inside


class Tally:
    """Counts calls of the last 15 minutes per second. A second takes 8 bytes for each bucket that was counted in it."""

    def __init__(self) -> None:
        self._methods: dict[str, int] = {}
        self._packed: deque[tuple[int, bytes]] = deque(maxlen=RETENTION_S)
        self._second = 0
        self._now: Counter[int] = Counter()

    def add(self, at_s: float, method: str, bucket: int, count: int) -> None:
        """Counts calls of a method in a bucket, or its failed calls.

        Methods beyond the first `METHODS` are not counted.
        """
        if int(at_s) > self._second:
            if self._now:
                self._packed.append((self._second, array("I", chain.from_iterable(self._now.items())).tobytes()))
            self._second, self._now = int(at_s), Counter()
        number = self._methods.get(method)
        if number is None:
            if len(self._methods) >= METHODS:
                return
            number = self._methods[method] = len(self._methods)
        key = number << 8 | bucket
        self._now[key] = min(self._now[key] + count, _MOST)

    def counted(self, since_s: float, until_s: float = inf) -> dict[str, Counted]:
        """Returns the counts of each method between two times, which belong to it, in seconds since 1970."""
        counts = {name: Counted() for name in self._methods}
        by_number = list(counts.values())
        for at_s, second in self._seconds(since_s):
            if at_s > until_s:
                continue
            for key, count in second:
                method, bucket = by_number[key >> 8], key & 0xFF
                if bucket == ERRORS:
                    method.errors += count
                else:
                    method.buckets[bucket] += count
        return counts

    def fill(
        self,
        columns: Sequence[list[int]],
        column_of: Callable[[int], int],
        row_of: Sequence[int],
        since_s: float,
        until_s: float,
        wants: Callable[[str], bool],
    ) -> None:
        """Adds calls to a heat map.

        Args:
            columns: Counts by column, then by row.
            column_of: The column of a second.
            row_of: The row of each bucket.
            since_s: The earliest second, since 1970, to add.
            until_s: The latest second, since 1970, to add.
            wants: Takes the name of a method and returns whether to add it.
        """
        wanted = [wants(name) for name in self._methods]
        for at_s, second in self._seconds(since_s):
            if at_s > until_s:
                continue
            column = columns[column_of(at_s)]
            for key, count in second:
                if wanted[key >> 8] and key & 0xFF != ERRORS:
                    column[row_of[key & 0xFF]] += count

    def _seconds(self, since_s: float) -> Iterator[tuple[int, Iterable[tuple[int, int]]]]:
        """Yields each second with its counts, which are keyed by the number of the method and the bucket."""
        if self._second >= since_s:
            yield self._second, self._now.items()
        for second, packed in reversed(self._packed):
            if second < since_s:
                return
            numbers = memoryview(packed).cast("I").tolist()
            yield second, zip(numbers[::2], numbers[1::2], strict=True)


class Durations:
    """Converts what a worker has counted since it started into what it has counted since its last answer.

    Args:
        of_all: A tally that counts the calls of all workers together.

    Attributes:
        tally: The tally of this worker's calls.
    """

    def __init__(self, of_all: Tally) -> None:
        self.tally = Tally()
        self._of_all = of_all
        self._totals: dict[str, list[int]] = {}
        self._is_first = True

    def restarted(self) -> None:
        """Notes that the worker was restarted and counts from 0 again."""
        self._totals.clear()

    def take(self, at_s: float, rpcs: Iterable[telemetry_pb2.RpcTelemetry]) -> None:
        """Counts the new calls of an answer, which has the totals since the start.

        The first answer only sets the baseline.
        """
        for rpc in rpcs:
            buckets = rpc.buckets[:ERRORS]
            totals = [*buckets, *[0] * (ERRORS - len(buckets)), rpc.errors]
            before = self._totals.get(rpc.method)
            if totals == before:
                continue
            self._totals[rpc.method] = totals
            if self._is_first:
                continue
            for bucket, (new, old) in enumerate(zip(totals, before or repeat(0))):  # noqa: B905  the zeros never end
                if new > old:
                    for tally in (self.tally, self._of_all):
                        tally.add(at_s, rpc.method, bucket, min(new - old, _MOST))
        self._is_first = False
