"""The event of the live stream."""

from pydantic import Field

from backhaul_server.dashboard.schemas.base import Schema
from backhaul_server.dashboard.schemas.now import Alert, Overview, SessionStatus, WorkerStatus
from backhaul_server.dashboard.schemas.runs import RunSummary


class Live(Schema):
    """An event of /api/v1/live, once a second."""

    overview: Overview = Field(description="The headline numbers")
    workers: list[WorkerStatus] = Field(description="Every watched worker, as of its last answer")
    sessions: list[SessionStatus] = Field(description="Every session of every worker that answers")
    alerts: list[Alert] = Field(description="The alerts that fire now, critical ones first")
    runs: list[RunSummary] = Field(description="Runs that reported in the last minute, and the newest run")
