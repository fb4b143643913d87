"""All runs that trainers reported, within bounds: a trainer that reports nonsense loses only its own detail."""

import time
from collections.abc import Iterator

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.event_log import EventLog
from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.collect.training_runs import Detail, TrainerRun
from backhaul_server.dashboard.schemas.events import EventEntry

RUNS = 64
DETAILED_RUNS = 8
ROWS_IN_ALL = 30_000
"""The largest number of rows in the tables of segments of all runs."""
CALLS_BYTES = 24 << 20
"""The largest size of the calls kept for timelines, of all runs."""


class Trainers:
    """The runs by id. A trainer reports to one of its workers at a time; here all reports come together.

    Args:
        events: Gets the beginnings and ends of runs.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        self._events = events if events is not None else EventLog()
        self._runs: dict[str, TrainerRun] = {}
        self._gone = Totals()
        self._gone_dropped = 0
        self.refused_reports = 0

    def __iter__(self) -> Iterator[TrainerRun]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, run: str) -> TrainerRun | None:
        """Returns the run with this id, None if it is unknown."""
        return self._runs.get(run)

    def newest(self) -> TrainerRun | None:
        """Returns the run that began last, None if there is none. It stays the same while several runs report."""
        return max(self, key=lambda run: (run.began_at_s, run.id), default=None)

    @property
    def totals(self) -> Totals:
        """The sums of all runs since this process began, including runs that were forgotten since."""
        return Totals.of_all([self._gone, *(run.totals for run in self)])

    @property
    def dropped(self) -> int:
        """Number of steps, calls and reports that were not reported or not kept, including those of forgotten runs."""
        return min(LARGEST, self._gone_dropped + self.refused_reports + sum(run.dropped for run in self))

    @property
    def saved_bytes(self) -> int:
        """Bytes that running trainers save because workers recompute, as of the end of their last step."""
        return min(LARGEST, sum(run.last_step.saved_bytes for run in self._running()))

    @property
    def running(self) -> int:
        """The number of runs that report."""
        return len(self._running())

    def _running(self) -> list[TrainerRun]:
        now_s = time.time()
        return [run for run in self if run.state(now_s) == "running"]

    def take(self, report: telemetry_pb2.TrainerReport, now_s: float, since_s: float) -> None:
        """Adds a sanitized report to its run, see `TrainerRun.take`."""
        run = self._runs.get(report.run.id) or self._admit(report.run, now_s)
        if run is None:
            self.refused_reports += 1
            return
        if run.detail is None and self._has_detail_left(now_s):
            run.detail = Detail(run.id, self._has_rows_left)
        was_closed = run.about.is_closed
        run.take(report, now_s, since_s)
        if run.about.is_closed and not was_closed:
            # Steps are numbered from 0, and those before the dashboard started were not reported to it.
            steps = max(run.steps, run.last_step.number + 1) if run.steps else 0
            text = f"{named(run.about)} ended after {steps:,} step{'' if steps == 1 else 's'}"
            self._events.add(
                EventEntry(id=f"{run.id}-ended", at_s=run.heard_at_s, kind="run_ended", run=run.id, text=text)
            )
        while sum(run.calls_bytes for run in self) > CALLS_BYTES:
            max(self, key=lambda run: run.calls_bytes).forget_oldest_calls()

    def heard(self, run: str, at_s: float) -> None:
        """Notes that a worker saw a session of the run alive at this time."""
        if (known := self._runs.get(run)) is not None:
            known.heard_at_s = max(known.heard_at_s, at_s)

    def _admit(self, about: telemetry_pb2.Run, now_s: float) -> TrainerRun | None:
        """Admits a new run. If there are too many, drops the one that ended or fell silent the longest ago."""
        if len(self._runs) >= RUNS:
            over = self._over(now_s)
            if over is None:
                return None
            self._gone = Totals.of_all((self._gone, over.totals))
            self._gone_dropped += over.dropped
            del self._runs[over.id]
        run = self._runs[about.id] = TrainerRun(about, now_s)
        count = len(about.workers)
        text = f"{named(about)} began on {about.trainer} with {count} worker{'' if count == 1 else 's'}"
        self._events.add(EventEntry(id=f"{run.id}-began", at_s=run.began_at_s, kind="run_began", run=run.id, text=text))
        return run

    def _has_detail_left(self, now_s: float) -> bool:
        if sum(run.detail is not None for run in self) < DETAILED_RUNS:
            return True
        over = self._over(now_s, detailed=True)
        if over is not None:
            over.forget_detail()
        return over is not None

    def _over(self, now_s: float, *, detailed: bool = False) -> TrainerRun | None:
        """Returns the run that fell silent the longest ago, None if all runs report."""
        over = [run for run in self if run.state(now_s) != "running" and (run.detail is not None or not detailed)]
        return min(over, key=lambda run: run.heard_at_s, default=None)

    def _has_rows_left(self) -> bool:
        return sum(len(run.detail.segments) for run in self if run.detail is not None) < ROWS_IN_ALL


def named(about: telemetry_pb2.Run) -> str:
    """Returns what an event calls a run: its name if it has one, with its rank."""
    name = f'Run "{about.name}"' if about.name else f"Run {about.id}"
    return f"{name} (rank {about.rank} of {about.world_size})" if about.world_size else name
