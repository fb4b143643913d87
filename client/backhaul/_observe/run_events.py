"""What happens to a session and is worth a mark on the dashboard's charts: workers lost, segments that fell back."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, time
from typing import Literal

from backhaul_proto.v1 import telemetry_pb2

EventKind = Literal[
    "worker_lost", "worker_joined", "worker_draining", "worker_back", "worker_expelled", "fell_back", "refused"
]

QUIET_S = 60.0
"""Seconds after an event was taken in which equal ones are only counted: a lost worker may cost many segments."""
MAX_KINDS = 200
"""The most different events that are remembered. Beyond it the least recent one is reported again when it happens."""
EVENTS_PER_REPORT = 50

_Key = tuple[EventKind, str, str, str]


@dataclass(slots=True)
class _Counted:
    """Equal events that were not reported yet."""

    at_s: float = 0.0
    count: int = 0
    quiet_until_s: float = 0.0


class RunEvents:
    """The events of a session that were not reported yet, equal ones counted together. Thread-safe and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counted: dict[_Key, _Counted] = {}
        self._untold: list[telemetry_pb2.Event] = []
        self._number = 0

    def add(self, kind: EventKind, text: str, *, worker: str = "", segment: str = "") -> None:
        """Notes an event that has just happened.

        Args:
            kind: The kind of the event.
            text: What happened and why, as one sentence without its period.
            worker: Address of the worker that it is about; empty for none.
            segment: Name of the segment that it is about; empty for none.
        """
        key = (kind, worker, segment, text)
        with self._lock:
            counted = self._counted.pop(key, None) or _Counted()
            counted.at_s = counted.at_s if counted.count else time()
            counted.count += 1
            self._counted[key] = counted  # moved to the end, so that the first one is the least recent
            if len(self._counted) > MAX_KINDS:
                del self._counted[next(iter(self._counted))]

    def take(self, *, is_last: bool = False) -> list[telemetry_pb2.Event]:
        """Returns the events to report now, in the order of their times, at most `EVENTS_PER_REPORT`.

        Args:
            is_last: Whether this is the last report, which also has those that were reported lately.
        """
        now_s = monotonic()
        with self._lock:
            due = sorted(
                (counted.at_s, key)
                for key, counted in self._counted.items()
                if counted.count and (is_last or now_s >= counted.quiet_until_s)
            )
            again, self._untold = self._untold[:EVENTS_PER_REPORT], self._untold[EVENTS_PER_REPORT:]
            return [*again, *(self._message(at_s, key, now_s) for at_s, key in due[: EVENTS_PER_REPORT - len(again)])]

    def give_back(self, events: Iterable[telemetry_pb2.Event]) -> None:
        """Takes back events whose report did not arrive, as when the only worker is lost. They are reported again.

        They keep their numbers, so that one whose report arrived all the same is not counted twice.
        """
        with self._lock:
            self._untold = [*self._untold, *events][-MAX_KINDS:]

    def _message(self, at_s: float, key: _Key, now_s: float) -> telemetry_pb2.Event:
        kind, worker, segment, text = key
        counted = self._counted[key]
        count, counted.count, counted.quiet_until_s = counted.count, 0, now_s + QUIET_S
        number, self._number = self._number, self._number + 1
        return telemetry_pb2.Event(
            at_s=at_s, kind=kind, worker=worker, segment=segment, text=text, number=number, count=count
        )

    def forked(self) -> None:
        """Resets the lock in the child of a fork, where the thread that holds it may not exist."""
        self._lock = threading.Lock()
