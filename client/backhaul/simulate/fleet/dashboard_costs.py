"""What a dashboard costs for each worker and session that it watches. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DashboardCosts:
    """Costs of a dashboard, as lines through measurements of several sizes (`fit`).

    Attributes:
        date: Day of the measurement, as YYYY-MM-DD.
        cpu_share: Part of a core that a dashboard uses without workers.
        cpu_share_per_worker: Part of a core for each worker.
        cpu_share_per_session: Part of a core for each session.
        event_bytes: Bytes that each open page receives in a second without workers.
        event_bytes_per_worker: Bytes that each open page receives in a second for each worker.
        event_bytes_per_session: Bytes that each open page receives in a second for each session.
    """

    date: str
    cpu_share: float
    cpu_share_per_worker: float
    cpu_share_per_session: float
    event_bytes: float
    event_bytes_per_worker: float
    event_bytes_per_session: float

    def cores(self, workers: int, sessions: int) -> float:
        """Returns the cores that a dashboard needs. It has one event loop, so above 1 it no longer keeps up."""
        return self.cpu_share + workers * self.cpu_share_per_worker + sessions * self.cpu_share_per_session

    def page_bytes_per_s(self, workers: int, sessions: int) -> float:
        """Returns the bytes that each open page receives in a second."""
        return self.event_bytes + workers * self.event_bytes_per_worker + sessions * self.event_bytes_per_session

    def most_workers(self, sessions_per_worker: float) -> float:
        """Returns the number of workers at which one core is busy; infinity if workers cost nothing."""
        worker_share = self.cpu_share_per_worker + sessions_per_worker * self.cpu_share_per_session
        return (1 - self.cpu_share) / worker_share if worker_share > 0 else math.inf


def read_dashboard_costs(content: Mapping[str, Any]) -> DashboardCosts | None:
    """Returns the costs in a file that holds the costs of segments; None if it has none of a dashboard.

    Raises:
        KeyError, TypeError, ValueError: The file holds other values than those of `DashboardCosts`.
    """
    stored = content.get("dashboard")
    if stored is None:
        return None
    costs = {name: float(value) for name, value in dict(stored["costs"]).items()}
    return DashboardCosts(**costs, date=str(stored["date"]))
