"""Which runs and events are wanted of the history, and what it returns of them."""

from dataclasses import dataclass
from math import inf

from backhaul_server.dashboard.schemas.events import WORDS, EventEntry, Kind, Severity, kinds_from
from backhaul_server.dashboard.schemas.runs import RunSummary


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

    runs: list[RunSummary]
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

    def wants(self, event: EventEntry, name: str) -> bool:
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

    events: list[EventEntry]
    total: int


def matches(wanted: str, *texts: str) -> bool:
    """Whether one of the texts contains a text that is given in folded case."""
    return any(wanted in text.casefold() for text in texts)
