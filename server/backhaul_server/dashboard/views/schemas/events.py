"""Entries of the event log."""

from pydantic import Field

from backhaul_server.dashboard.collect.event_log import Kind, Severity
from backhaul_server.dashboard.views.schemas.base import Schema


class EventEntry(Schema):
    """Something that happened to a run or a worker."""

    id: str = Field(
        description="A name that stays the same, also over restarts of the dashboard", examples=["9f86d081884c7d65-3"]
    )
    at_s: float = Field(description="When it happened", examples=[1763769540.0])
    kind: Kind = Field(
        description="What kind of event it is. worker_lost, worker_joined, worker_draining, worker_back, fell_back and "
        "refused"
        "are a trainer's view of its workers; all others are what the dashboard saw itself",
        examples=["worker_lost"],
    )
    severity: Severity = Field(
        description="How much it matters. critical: segments are not recomputed remotely because of it",
        examples=["warning"],
    )
    run: str = Field(description="Id of the run that it concerns; empty for none", examples=["9f86d081884c7d65"])
    worker: str = Field(
        description="Address of the worker that it concerns; empty for none", examples=["127.0.0.1:50051"]
    )
    segment: str = Field(description="Name of the segment that it concerns; empty for none", examples=[""])
    text: str = Field(
        description="What happened and why, in words",
        examples=["Worker 127.0.0.1:50051 was lost: the worker is gone. Its segments run on the trainer"],
    )
    count: int = Field(description="How often it happened", examples=[1])
