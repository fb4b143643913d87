"""The event log as /api/v1 shows it."""

from collections.abc import Callable, Iterable

from backhaul_server.dashboard.collect.event_log import LogEvent
from backhaul_server.dashboard.history.archive import EventList, EventSelection
from backhaul_server.dashboard.views import schemas


def event_entry(event: LogEvent) -> schemas.EventEntry:
    """Returns an entry of the log."""
    return schemas.EventEntry.model_validate(event, from_attributes=True)


def selected_events(
    events: Iterable[LogEvent], wanted: EventSelection, name_of: Callable[[str], str] = lambda _: ""
) -> EventList:
    """Returns a page of the events in memory, as a history would return it.

    Args:
        events: All events in memory.
        wanted: Which events are wanted.
        name_of: Returns what people call a run, given its id.
    """
    all_wanted = sorted(
        (event for event in events if wanted.wants(event, name_of(event.run))),
        key=lambda event: (event.at_s, event.id),
        reverse=True,
    )
    page = [event for event in all_wanted if (event.at_s, event.id) < wanted.before]
    return EventList(page[: wanted.limit], len(all_wanted))
