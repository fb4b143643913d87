"""The event log: what trainers report and what the dashboard sees itself, as entries that charts can mark."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from backhaul_proto.v1 import telemetry_pb2

MOST = 5_000
"""The most events in memory. The history keeps older ones."""
BURST_S = 60.0
"""Seconds for which refusals and evictions of a worker are counted together."""

Severity = Literal["info", "warning", "critical"]
TrainersKind = Literal["worker_lost", "worker_joined", "worker_draining", "worker_back", "fell_back", "refused"]
Kind = Literal[
    TrainersKind,
    "worker_unreachable",
    "worker_reachable",
    "worker_restarted",
    "run_began",
    "run_ended",
    "evictions",
    "refusals",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
TRAINERS_KINDS = frozenset(get_args(TrainersKind))
SEVERITIES: dict[Kind, Severity] = {
    "worker_lost": "warning",
    "worker_joined": "info",
    "worker_draining": "info",
    "worker_back": "info",
    "fell_back": "warning",
    "refused": "warning",
    "worker_unreachable": "critical",
    "worker_reachable": "info",
    "worker_restarted": "warning",
    "run_began": "info",
    "run_ended": "info",
    "evictions": "info",
    "refusals": "warning",
}
LEVELS: tuple[Severity, ...] = get_args(Severity)
"""All severities, the least one first."""
WORDS: dict[Kind, str] = {
    "worker_lost": "worker lost",
    "worker_joined": "worker joined",
    "worker_draining": "worker drains",
    "worker_back": "worker back",
    "fell_back": "fallback",
    "refused": "request refused",
    "worker_unreachable": "worker stopped answering",
    "worker_reachable": "worker answers again",
    "worker_restarted": "worker restarted",
    "run_began": "run began",
    "run_ended": "run ended",
    "evictions": "evictions",
    "refusals": "refusals",
}
"""What people call a kind of event. The page uses the same words, and finds events by them."""


def kinds_from(least: Severity) -> tuple[Kind, ...]:
    """Returns the kinds of events that have at least a severity."""
    return tuple(kind for kind in KINDS if LEVELS.index(SEVERITIES[kind]) >= LEVELS.index(least))


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An entry of the event log.

    Attributes:
        id: A name that stays the same, also over restarts of the dashboard.
        at_s: When it happened by the dashboard's clock, in seconds since 1970.
        kind: What kind of event it is, one of `KINDS`.
        run: Id of the run that it concerns; empty for none.
        worker: Address of the worker that it concerns; empty for none.
        segment: Name of the segment that it concerns; empty for none.
        text: What happened and why, as one sentence without its period.
        count: How often it happened; 1 for a single event.
    """

    id: str
    at_s: float
    kind: Kind
    run: str = ""
    worker: str = ""
    segment: str = ""
    text: str = ""
    count: int = 1

    @property
    def severity(self) -> Severity:
        """How much the event matters: "critical" if segments are not recomputed remotely because of it."""
        return SEVERITIES[self.kind]


class EventLog:
    """The last events, each once. Used by one thread.

    Args:
        keep: Called with every new event. Must not block.

    Attributes:
        counts: The number of events since this process began, by kind. Repeated events count as often as they happened.
    """

    def __init__(self, keep: Callable[[LogEvent], None] | None = None) -> None:
        self._keep = keep
        self._events: deque[LogEvent] = deque()
        self._ids: set[str] = set()
        self.counts: Counter[Kind] = Counter()

    def __iter__(self) -> Iterator[LogEvent]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: LogEvent) -> None:
        """Adds an event, unless one with its id is there. The oldest event makes room if there are too many."""
        if event.id in self._ids:
            return
        self._events.append(event)
        self._ids.add(event.id)
        self.counts[event.kind] += event.count
        if len(self._events) > MOST:
            self._ids.discard(self._events.popleft().id)
        if self._keep is not None:
            self._keep(event)


def of_trainer(run: str, event: telemetry_pb2.Event, at_s: float) -> LogEvent | None:
    """Returns the event that a trainer has reported; None if its kind is unknown, as from a newer trainer.

    Args:
        run: The id of the trainer's run.
        event: The event as it was reported, sanitized.
        at_s: When it happened by the dashboard's clock, in seconds since 1970.
    """
    if event.kind not in TRAINERS_KINDS:
        return None
    kind: Kind = next(known for known in KINDS if known == event.kind)
    return LogEvent(f"{run}-{event.number}", at_s, kind, run, event.worker, event.segment, event.text, event.count or 1)


class Burst:
    """Merges increases of a counter into events: the first at once, then one a minute as long as it grows."""

    def __init__(self) -> None:
        self._pending = 0
        self._quiet_until_s = 0.0

    def grew(self, now_s: float, count: int) -> int:
        """Adds an increase, which may be 0. Returns the count to report now; 0 to report nothing."""
        self._pending += count
        # A clock that was set back must not make the pause longer.
        is_quiet = self._quiet_until_s - BURST_S <= now_s < self._quiet_until_s
        if not self._pending or is_quiet:
            return 0
        due, self._pending = self._pending, 0
        self._quiet_until_s = now_s + BURST_S
        return due
