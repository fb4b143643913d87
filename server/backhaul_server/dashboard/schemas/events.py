"""Entries of the event log, and the kinds that there are."""

from typing import Literal, get_args

from pydantic import ConfigDict, Field

from backhaul_server.dashboard.schemas.base import Schema

Severity = Literal["info", "warning", "critical"]
TrainersKind = Literal[
    "worker_lost", "worker_joined", "worker_draining", "worker_back", "worker_expelled", "fell_back", "refused"
]
Kind = Literal[
    TrainersKind,
    "worker_unreachable",
    "worker_reachable",
    "worker_restarted",
    "run_began",
    "run_ended",
    "evictions",
    "refusals",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
TRAINERS_KINDS = frozenset(get_args(TrainersKind))
LEVELS: tuple[Severity, ...] = get_args(Severity)
"""All severities, the least one first."""
_SEVERITIES: dict[Kind, Severity] = {
    "worker_lost": "warning",
    "fell_back": "warning",
    "refused": "warning",
    "worker_expelled": "critical",
    "worker_unreachable": "critical",
    "worker_restarted": "warning",
    "refusals": "warning",
}
"""The severities of the kinds that are not just informative."""
WORDS: dict[Kind, str] = {kind: kind.replace("_", " ") for kind in KINDS} | {
    "worker_draining": "worker drains",
    "worker_expelled": "worker was wrong",
    "fell_back": "fallback",
    "refused": "request refused",
    "worker_unreachable": "worker stopped answering",
    "worker_reachable": "worker answers again",
}
"""What people call a kind of event. Filters find events by these words too."""


def severity_of(kind: Kind) -> Severity:
    """Returns how much events of a kind matter: "critical" if segments are not recomputed remotely because of it."""
    return _SEVERITIES.get(kind, "info")


def kinds_from(least: Severity) -> tuple[Kind, ...]:
    """Returns the kinds of events that have at least a severity."""
    return tuple(kind for kind in KINDS if LEVELS.index(severity_of(kind)) >= LEVELS.index(least))


class EventEntry(Schema):
    """Something that happened to a run or a worker."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(
        description="A name that stays the same, also over restarts of the dashboard", examples=["9f86d081884c7d65-3"]
    )
    at_s: float = Field(description="When it happened, by the dashboard's clock", examples=[1763769540.0])
    kind: Kind = Field(
        description="What kind of event it is. worker_lost, worker_joined, worker_draining, worker_back, "
        "worker_expelled, fell_back and refused are a trainer's view of its workers; all others are what the "
        "dashboard saw itself",
        examples=["worker_lost"],
    )
    words: str = Field(
        default_factory=lambda known: WORDS[known["kind"]],
        description="The kind of event in words, as the page shows it",
        examples=["worker lost"],
    )
    severity: Severity = Field(
        default_factory=lambda known: severity_of(known["kind"]),
        description="How much it matters. critical: segments are not recomputed remotely because of it",
        examples=["warning"],
    )
    run: str = Field(
        default="", description="Id of the run that it concerns; empty for none", examples=["9f86d081884c7d65"]
    )
    worker: str = Field(
        default="", description="Address of the worker that it concerns; empty for none", examples=["127.0.0.1:50051"]
    )
    segment: str = Field(default="", description="Name of the segment that it concerns; empty for none", examples=[""])
    text: str = Field(
        default="",
        description="What happened and why, as one sentence without its period",
        examples=["Worker 127.0.0.1:50051 was lost: the worker is gone. Its segments run on the trainer"],
    )
    count: int = Field(default=1, description="How often it happened", examples=[1])
