"""The table of segments: one row for each name and position in a run, with the costs and decisions of its calls."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median
from sys import intern
from typing import NamedTuple

from backhaul_proto.v1 import telemetry_pb2

ROWS = 10_000
"""The largest number of rows of one run."""
REASONS = 8
"""The largest number of reasons that one row keeps. The least recent ones are dropped first."""
PROGRAMS = 100
"""The most programs of one row that are counted."""
REASONS_IN_ALL = 50
"""The largest number of reasons that an answer lists for all rows together."""
_SAMPLES = 9  # the number of recent calls that medians are computed from

_NOTABLE_DECISIONS = frozenset({"activations", "trainer", "kept"})


@dataclass(slots=True)
class ReasonCount:
    """The calls of one row with the same reason.

    Attributes:
        reason: The reason, as the trainer reported it.
        decision: Who recomputed the last of these calls, for example "trainer".
        is_fallback: Whether the last of these calls was meant for a worker.
        calls: Number of these calls.
        last_at_s: When the last of them ended, in seconds since 1970.
    """

    reason: str
    decision: str
    is_fallback: bool
    calls: int = 0
    last_at_s: float = 0.0


class TextCount(NamedTuple):
    """How often something was said."""

    text: str
    times: int


@dataclass(slots=True)
class Row:
    """One segment of a run. The attributes are sums over its calls; medians are those of the last calls.

    Attributes:
        why: Calls that got no gradients from a worker, by reason. Later calls that do get them remove nothing.
        known: Number of calls whose program was known, so that they were not recorded.
        recorded_because: Calls that were recorded although they were compiled, or should have been, by reason.
        compilations: How often torch.compile has captured a graph, or made kernels for one.
        compile_s: Seconds that it took for these.
        failed_guards: Compilations by the guard that no longer held.
    """

    run: str
    name: str
    position: int
    calls: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    decision: str = ""
    reason: str = ""
    worker: str = ""
    fallbacks: int = 0
    mismatches: int = 0
    drift: float = 0.0
    retries: int = 0
    samples: "array[float]" = field(default_factory=lambda: array("f"))
    why: dict[str, ReasonCount] = field(default_factory=dict)
    known: int = 0
    recorded_because: dict[str, int] = field(default_factory=dict)
    compilations: int = 0
    compile_s: float = 0.0
    failed_guards: dict[str, int] = field(default_factory=dict)
    _programs: set[int] = field(default_factory=set)

    @property
    def programs(self) -> int:
        """Number of different programs that workers got, at most PROGRAMS."""
        return len(self._programs)

    @property
    def recorded(self) -> list[TextCount]:
        """The reasons in `recorded_because`, the most recent last."""
        return [TextCount(*entry) for entry in self.recorded_because.items()]

    @property
    def recompiled(self) -> list[TextCount]:
        """The guards in `failed_guards`, the most recent last."""
        return [TextCount(*entry) for entry in self.failed_guards.items()]

    @property
    def segment(self) -> str:
        """The name and position as people see them, such as "Block #3"."""
        return f"{self.name} #{self.position}"

    @property
    def local_ms(self) -> float:
        """Median forward time on the trainer, in milliseconds."""
        return self._median_ms(0)

    @property
    def remote_ms(self) -> float:
        """Median time of recomputation and backward on a worker, in milliseconds."""
        return self._median_ms(1)

    @property
    def wait_ms(self) -> float:
        """Median time for which the segment blocked backward, in milliseconds."""
        return self._median_ms(2)

    @property
    def overhead_ms(self) -> float:
        """Median time of recording, digests and sending, in milliseconds."""
        return self._median_ms(3)

    def _median_ms(self, kind: int) -> float:
        return round(1e3 * median(self.samples[kind::4]), 3)

    @property
    def reasons(self) -> list[ReasonCount]:
        """The reasons in `why`, the most recent first."""
        return sorted(self.why.values(), key=lambda count: count.last_at_s, reverse=True)

    def take(self, call: telemetry_pb2.SegmentCall, lanes_s: Sequence[float], at_s: float) -> None:
        """Adds a call to the row.

        Args:
            call: The call as it was reported.
            lanes_s: The seconds of its spans by lane.
            at_s: When it ended, in seconds since 1970.
        """
        self.calls += 1
        self.up_bytes += call.up_bytes
        self.down_bytes += call.down_bytes
        # Rows share equal strings: there are few different ones, but each message brings strings of its own.
        self.decision, self.reason, self.worker = intern(call.decision), intern(call.reason), intern(call.worker)
        self.fallbacks += call.is_fallback
        self.mismatches += call.mismatches
        self.drift = max(self.drift, call.drift)
        self.retries += call.retries
        if self.reason and (call.is_fallback or self.decision in _NOTABLE_DECISIONS):
            self._count_reason(self.reason, call, at_s)
        self._take_capture(call.capture)
        if len(self.samples) == 4 * _SAMPLES:
            del self.samples[:4]
        remote_s = lanes_s[telemetry_pb2.LANE_RECOMPUTE] + lanes_s[telemetry_pb2.LANE_BACKWARD]
        self.samples.extend(
            (lanes_s[telemetry_pb2.LANE_FORWARD], remote_s, lanes_s[telemetry_pb2.LANE_WAIT], call.overhead_s)
        )

    def _take_capture(self, capture: telemetry_pb2.Capture) -> None:
        self.known += capture.is_known
        if capture.program and len(self._programs) < PROGRAMS:
            self._programs.add(capture.program)
        if capture.reason:
            _count(self.recorded_because, capture.reason)
        for compilation in capture.compilations:
            self.compilations += 1
            self.compile_s += compilation.took_s
            if compilation.guard:
                _count(self.failed_guards, compilation.guard)

    def _count_reason(self, reason: str, call: telemetry_pb2.SegmentCall, at_s: float) -> None:
        why = self.why.pop(reason, None) or ReasonCount(reason, self.decision, call.is_fallback)
        why.decision, why.is_fallback = self.decision, call.is_fallback
        why.calls += 1
        why.last_at_s = max(why.last_at_s, at_s)
        self.why[reason] = why  # moved to the end, so that the first one is the least recent
        if len(self.why) > REASONS:
            del self.why[next(iter(self.why))]


def _count(counts: dict[str, int], text: str) -> None:
    """Counts a text. At most REASONS texts are kept, the most recent ones."""
    counts[text] = counts.pop(text, 0) + 1
    if len(counts) > REASONS:
        del counts[next(iter(counts))]


class SegmentTable:
    """The rows of one run.

    Args:
        run: The id of the run.
        has_room: Returns whether one more row may be created.
    """

    def __init__(self, run: str, has_room: Callable[[], bool]) -> None:
        self.run = run
        self._has_room = has_room
        self._rows: dict[tuple[str, int], Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def take(self, call: telemetry_pb2.SegmentCall, lanes_s: Sequence[float], at_s: float) -> None:
        """Adds a call to its row, if the row exists or can be created. See `Row.take`."""
        row = self._rows.get((call.name, call.position))
        if row is None:
            if len(self._rows) >= ROWS or not self._has_room():
                return
            row = Row(self.run, intern(call.name), call.position)
            self._rows[row.name, row.position] = row
        row.take(call, lanes_s, at_s)


def select(tables: Iterable[SegmentTable], text: str, sort: str, *, descending: bool, reason: str = "") -> list[Row]:
    """Returns rows sorted by a column, then by segment.

    Args:
        tables: The tables of the runs that are shown.
        text: Text to find in the segment, decision, reasons or worker, ignoring case; "" for all rows.
        sort: The column to sort by, a field of `SegmentStatus` other than `reasons`.
        descending: Whether the largest value comes first.
        reason: An exact reason that a call of the row had; "" for all rows.
    """
    wanted = text.casefold()
    rows = [
        row
        for table in tables
        for row in table
        if (not reason or reason in row.why or reason == row.reason) and (not wanted or _contains(row, wanted))
    ]
    rows.sort(key=lambda row: (row.run, row.name, row.position), reverse=descending and sort == "segment")
    if sort != "segment":
        rows.sort(key=attrgetter(sort), reverse=descending)
    return rows


def _contains(row: Row, wanted: str) -> bool:
    return any(wanted in text.casefold() for text in (row.segment, row.decision, row.reason, row.worker, *row.why))


def reasons_of(tables: Iterable[SegmentTable]) -> list[ReasonCount]:
    """Returns the reasons of all rows with their calls added up: at most REASONS_IN_ALL, the most frequent first."""
    totals: dict[str, ReasonCount] = {}
    for table in tables:
        for row in table:
            for count in row.reasons:
                total = totals.setdefault(count.reason, replace(count, calls=0))
                total.calls += count.calls
                if count.last_at_s >= total.last_at_s:
                    total.last_at_s, total.decision, total.is_fallback = (
                        count.last_at_s,
                        count.decision,
                        count.is_fallback,
                    )
    return sorted(totals.values(), key=lambda total: (-total.calls, total.reason))[:REASONS_IN_ALL]
