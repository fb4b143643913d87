"""The events in memory, as the history would return them."""

from collections.abc import Callable, Iterable

from backhaul_server.dashboard.history.selection import EventList, EventSelection
from backhaul_server.dashboard.schemas.events import EventEntry


def selected_events(
    events: Iterable[EventEntry], wanted: EventSelection, name_of: Callable[[str], str] = lambda _: ""
) -> EventList:
    """Returns a page of the events in memory.

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
