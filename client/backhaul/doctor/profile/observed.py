"""A session whose reports are read here instead of on a dashboard."""

from backhaul._config import Config
from backhaul._session import Session
from backhaul_proto.v1 import telemetry_pb2


class ObservedSession(Session):
    """A session whose reports stay in this process. Its calls are complete once it is closed.

    Args:
        config: The resolved settings of the session.

    Attributes:
        calls: The calls of all steps so far.
    """

    def __init__(self, config: Config) -> None:
        self.calls: list[telemetry_pb2.SegmentCall] = []
        self.steps = 0
        super().__init__(config)

    def _deliver(self, report: telemetry_pb2.TrainerReport) -> bool:
        self.calls.extend(report.calls)
        return True

    def end_step(self) -> int:
        """Ends a step and returns its number, from 0."""
        self.step()
        self.steps += 1
        return self.steps - 1
