"""The interface of the history: runs and steps that outlive the dashboard's process."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic.dataclasses import dataclass as validated_dataclass

from backhaul_proto.v1 import telemetry_pb2


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
    steps: int
    last_step: int
    last_loss: float | None
    median_step_ms: float | None
    peak_bytes: int
    up_bytes: int
    down_bytes: int
    fallbacks: int


@dataclass(slots=True)
class StepSeries:
    """The steps of a run in points, oldest first. Its fields have the meaning of `RunSeries` in the API."""

    run: str
    step: list[int]
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

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Queues a report. Never blocks. A report may be put twice."""

    async def runs(self, limit: int) -> list[RunRecord]:
        """Returns the last runs, newest first."""
        ...

    async def series(self, run: str, points: int) -> StepSeries | None:
        """Returns the steps of a run in at most `points` points, None if the run is unknown."""
        ...


class NoArchive:
    """A history that keeps nothing."""

    error = "nothing is kept over a restart"

    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Drops the report."""

    async def runs(self, limit: int) -> list[RunRecord]:
        """Returns no run."""
        return []

    async def series(self, run: str, points: int) -> StepSeries | None:
        """Returns None: no run is known."""
        return None
