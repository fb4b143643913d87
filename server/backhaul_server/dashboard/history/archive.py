"""The interface of the history: runs and steps that outlive the dashboard's process."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from pydantic.dataclasses import dataclass as validated_dataclass

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.event_log import WORDS, Kind, LogEvent, Severity, kinds_from


@validated_dataclass(frozen=True, slots=True)
class RunRecord:
    """A stored run. Its fields have the meaning of `RunSummary` in the API.

    Raises ValueError for values of other types, because other programs may have written to the file.
    """

    run: str
    trainer: str
    client_version: str
    workers: list[str]
    started_at_s: float
    heard_at_s: float
    state: Literal["running", "silent", "ended"]
    settings: dict[str, str]
    fingerprint: dict[str, str]
    name: str
    tags: list[str]
    notes: str
    rank: int
    world_size: int
    median_step_ms: float | None
    steps: int
    last_step: int
    last_loss: float | None
    peak_bytes: int
    up_bytes: int
    down_bytes: int
    fallbacks: int
    saved_bytes: int
    wait_s: float
    overhead_s: float
    spared_s: float
    remote: int
    spared_bytes: int


@dataclass(frozen=True, slots=True)
class RunSelection:
    """Which runs are wanted, the newest first.

    Attributes:
        limit: The largest number of runs.
        query: Text to find in id, name, trainer or a tag, ignoring case; empty for all runs.
        tag: A tag that the runs have, word for word; empty for all runs.
        id: The id of the only wanted run; empty for all runs.
        before: Start and id of the last run of the page before; nothing is later than the default.
    """

    limit: int
    query: str = ""
    tag: str = ""
    id: str = ""
    before: tuple[float, str] = (inf, "")


@dataclass(frozen=True, slots=True)
class RunList:
    """A page of stored runs.

    Attributes:
        runs: The runs of the page, the newest first.
        total: The number of wanted runs on all pages.
        stored: Those of the asked ids that the history has.
    """

    runs: list[RunRecord]
    total: int
    stored: set[str]


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Which events are wanted, the newest first.

    Attributes:
        limit: The largest number of events.
        runs: Ids of runs, whose events and those of no run are wanted; empty for all events.
        since_s: The earliest time, in seconds since 1970.
        until_s: The latest time, in seconds since 1970.
        severity: The least severity of the wanted events.
        text: Text to find in what happened, the kind in words, worker, segment, or id and name of the run, ignoring
            case; empty for all events.
        before: Time and id of the last event of the page before; nothing is later than the default.
    """

    limit: int
    runs: tuple[str, ...] = ()
    since_s: float = -inf
    until_s: float = inf
    severity: Severity = "info"
    text: str = ""
    before: tuple[float, str] = (inf, "")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the wanted events."""
        return kinds_from(self.severity)

    def wants(self, event: LogEvent, name: str) -> bool:
        """Whether an event is wanted, on whatever page, if its run has a name."""
        return (
            self.since_s <= event.at_s <= self.until_s
            and (not self.runs or event.run in {"", *self.runs})
            and event.kind in self.kinds
            and matches(
                self.text.casefold(), event.text, WORDS[event.kind], event.worker, event.segment, event.run, name
            )
        )


@dataclass(frozen=True, slots=True)
class EventList:
    """A page of events.

    Attributes:
        events: The events of the page, the newest first.
        total: The number of wanted events on all pages.
    """

    events: list[LogEvent]
    total: int


def matches(wanted: str, *texts: str) -> bool:
    """Whether one of the texts contains a text that is given in folded case."""
    return any(wanted in text.casefold() for text in texts)


@dataclass(slots=True)
class StepSeries:
    """The steps of a run in points, oldest first. Its fields have the meaning of `RunSeries` in the API."""

    run: str
    step: list[int]
    at_s: list[float]
    step_ms: list[float]
    peak_bytes: list[int]
    moved_bytes: list[int]
    loss: list[float | None]


class Archive(Protocol):
    """What the dashboard needs of a history.

    Attributes:
        error: Why nothing is kept; empty while it is kept.
    """

    error: str

    def start(self) -> None:
        """Starts the history."""

    def stop(self) -> None:
        """Writes everything that was put, and stops."""

    def put(self, report: telemetry_pb2.TrainerReport, shift_s: float = 0.0) -> None:
        """Queues a report. Never blocks. A report may be put twice.

        Args:
            report: The report of a trainer, sanitized.
            shift_s: Seconds to add to times of the trainer's clock for the dashboard's.
        """

    def put_event(self, event: LogEvent) -> None:
        """Queues an event. Never blocks. An event with a known id is not stored again."""

    async def runs(self, wanted: RunSelection, current: Sequence[str] = ()) -> RunList:
        """Returns a page of stored runs.

        Args:
            wanted: The runs to return.
            current: Ids of runs of which the answer says whether they are stored.
        """
        ...

    async def events(self, wanted: EventSelection) -> EventList | None:
        """Returns a page of stored events; None if the history cannot be read."""
        ...

    async def series(self, run: str, points: int, since_s: float = -inf, until_s: float = inf) -> StepSeries | None:
        """Returns the steps of a run that began in a range, in at most `points` points; None for an unknown run."""
        ...


class NoArchive:
    """A history that keeps nothing."""

    error = "nothing is kept over a restart"

    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    def put(self, report: telemetry_pb2.TrainerReport, shift_s: float = 0.0) -> None:
        """Drops the report."""

    def put_event(self, event: LogEvent) -> None:
        """Drops the event."""

    async def runs(self, wanted: RunSelection, current: Sequence[str] = ()) -> RunList:
        """Returns no run."""
        return RunList([], 0, set())

    async def events(self, wanted: EventSelection) -> EventList | None:
        """Returns None: nothing is kept."""
        return None

    async def series(self, run: str, points: int, since_s: float = -inf, until_s: float = inf) -> StepSeries | None:
        """Returns None: no run is known."""
        return None
