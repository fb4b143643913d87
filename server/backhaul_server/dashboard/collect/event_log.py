"""The event log: what trainers report and what the dashboard sees itself, as entries that charts can mark."""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.schemas.events import TRAINERS_KINDS, EventEntry, Kind

MOST = 5_000
"""The most events in memory. The history keeps older ones."""
BURST_S = 60.0
"""Seconds for which refusals and evictions of a worker are counted together."""


class EventLog:
    """The last events, each once. Used by one thread.

    Args:
        keep: Called with every new event. Must not block.

    Attributes:
        counts: The number of events since this process began, by kind. Repeated events count as often as they happened.
    """

    def __init__(self, keep: Callable[[EventEntry], None] | None = None) -> None:
        self._keep = keep
        self._events: deque[EventEntry] = deque()
        self._ids: set[str] = set()
        self.counts: Counter[Kind] = Counter()

    def __iter__(self) -> Iterator[EventEntry]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: EventEntry) -> None:
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


def of_trainer(run: str, event: telemetry_pb2.Event, at_s: float) -> EventEntry | None:
    """Returns the event that a trainer has reported; None if its kind is unknown, as from a newer trainer.

    Args:
        run: The id of the trainer's run.
        event: The event as it was reported, sanitized.
        at_s: When it happened by the dashboard's clock, in seconds since 1970.
    """
    if event.kind not in TRAINERS_KINDS:
        return None
    return EventEntry.of(event, id=f"{run}-{event.number}", at_s=at_s, run=run, count=event.count or 1)


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
