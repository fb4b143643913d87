"""The answers of /api/v1. Times are in seconds since 1970. The lists of a series have equal lengths, oldest first."""

from backhaul_server.dashboard.views.schemas.base import ErrorDetail, Schema, example_of
from backhaul_server.dashboard.views.schemas.events import EventEntry
from backhaul_server.dashboard.views.schemas.latency import Heat, Latency, Phases, Rpc
from backhaul_server.dashboard.views.schemas.live import Live
from backhaul_server.dashboard.views.schemas.memory import HeldHistory, MemoryEvent, MemoryHistory, TierHistory
from backhaul_server.dashboard.views.schemas.network import (
    Fleet,
    FleetMember,
    LinkState,
    NodeState,
    Topology,
    TopologyLink,
    TopologyNode,
)
from backhaul_server.dashboard.views.schemas.now import (
    AcceleratorStatus,
    Alert,
    Memory,
    Overview,
    SessionStatus,
    WorkerStatus,
)
from backhaul_server.dashboard.views.schemas.pages import AlertPage, EventPage, Page, RunPage, SessionPage, WorkerPage
from backhaul_server.dashboard.views.schemas.runs import RunSeries, RunSummary, RunVerdict
from backhaul_server.dashboard.views.schemas.segments import Decision, SegmentList, SegmentReason, SegmentStatus
from backhaul_server.dashboard.views.schemas.timeline import (
    BlockShare,
    BlockStatus,
    Call,
    Lane,
    Span,
    Timeline,
    TimelineClock,
    TimelineRun,
    TimelineStep,
)

__all__ = [
    "AcceleratorStatus",
    "Alert",
    "AlertPage",
    "BlockShare",
    "BlockStatus",
    "Call",
    "Decision",
    "ErrorDetail",
    "EventEntry",
    "EventPage",
    "Fleet",
    "FleetMember",
    "Heat",
    "HeldHistory",
    "Lane",
    "Latency",
    "LinkState",
    "Live",
    "Memory",
    "MemoryEvent",
    "MemoryHistory",
    "NodeState",
    "Overview",
    "Page",
    "Phases",
    "Rpc",
    "RunPage",
    "RunSeries",
    "RunSummary",
    "RunVerdict",
    "Schema",
    "SegmentList",
    "SegmentReason",
    "SegmentStatus",
    "SessionPage",
    "SessionStatus",
    "Span",
    "TierHistory",
    "Timeline",
    "TimelineClock",
    "TimelineRun",
    "TimelineStep",
    "Topology",
    "TopologyLink",
    "TopologyNode",
    "WorkerPage",
    "WorkerStatus",
    "example_of",
]
