"""Where runs are kept beyond this process."""

from typing import Protocol

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.views import schemas


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

    async def runs(self, limit: int) -> list[schemas.RunSummary]:
        """The last runs, newest first."""
        ...

    async def series(self, run: str, points: int) -> schemas.RunSeries | None:
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

    async def runs(self, limit: int) -> list[schemas.RunSummary]:
        """See Archive."""
        return []

    async def series(self, run: str, points: int) -> schemas.RunSeries | None:
        """See Archive."""
        return None
