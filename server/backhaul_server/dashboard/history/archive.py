"""Where runs are kept beyond this process."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic.dataclasses import dataclass as validated_dataclass

from backhaul_proto.v1 import telemetry_pb2


@validated_dataclass(frozen=True, slots=True)
class RunRecord:
    """A stored run, with the attributes of a run as the API shows it.

    Raises ValueError for values of other types: other programs may have written to the file that they come from.
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
    """The steps of a run in points, oldest first, with the attributes of a series as the API shows it."""

    run: str
    step: list[int]
    step_ms: list[float]
    peak_bytes: list[int]
    moved_bytes: list[int]
    loss: list[float | None]


class Archive(Protocol):
    """What the dashboard needs of it.

    Attributes:
        error: Why nothing is kept, empty where it is.
    """

    error: str

    def start(self) -> None:
        """Begins."""

    def stop(self) -> None:
        """Ends, with all that was put."""

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Keeps a report. Never blocks; a report may be put twice."""

    async def runs(self, limit: int) -> list[RunRecord]:
        """The last runs, newest first."""
        ...

    async def series(self, run: str, points: int) -> StepSeries | None:
        """A run's steps, None where the run is not known."""
        ...


class NoArchive:
    """Keeps nothing."""

    error = "nothing is kept over a restart"

    def start(self) -> None:
        """See Archive."""

    def stop(self) -> None:
        """See Archive."""

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """See Archive."""

    async def runs(self, limit: int) -> list[RunRecord]:
        """See Archive."""
        return []

    async def series(self, run: str, points: int) -> StepSeries | None:
        """See Archive."""
        return None
