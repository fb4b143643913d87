"""Pages of lists. `next` of one page is the `cursor` of the request for the next."""

from pydantic import Field

from backhaul_server.dashboard.schemas.base import Schema
from backhaul_server.dashboard.schemas.events import EventEntry
from backhaul_server.dashboard.schemas.now import Alert, SessionStatus, WorkerStatus
from backhaul_server.dashboard.schemas.runs import RunSummary


class Page(Schema):
    """A part of a list."""

    total: int = Field(description="Number of items on all pages together", examples=[1])
    next: str | None = Field(
        description="The `cursor` of the next page; null if this is the last one",
        examples=["WzAsICJ3b3JrZXI6MTI3LjAuMC4xOjUwMDUxIl0"],
    )


class WorkerPage(Page):
    """A page of the list of workers."""

    items: list[WorkerStatus] = Field(description="The workers of this page, in the order of the command line")


class SessionPage(Page):
    """A page of the list of sessions."""

    items: list[SessionStatus] = Field(description="The sessions of this page, by worker")


class AlertPage(Page):
    """A page of the list of alerts."""

    items: list[Alert] = Field(description="The alerts of this page, critical ones first")


class RunPage(Page):
    """A page of the list of runs."""

    items: list[RunSummary] = Field(description="The runs of this page, the newest first")


class EventPage(Page):
    """A page of the list of events."""

    items: list[EventEntry] = Field(description="The events of this page, the newest first")
