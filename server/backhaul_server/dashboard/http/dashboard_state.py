"""What the routes read: what the dashboard has collected, and the history."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import HTTPException

from backhaul_server.dashboard.collect.segments import SegmentTable
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.history.selection import EventList, EventSelection, RunSelection
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.metrics.alerts import Alerts
from backhaul_server.dashboard.schemas.live import Live
from backhaul_server.dashboard.schemas.now import Overview, SessionStatus, WorkerStatus
from backhaul_server.dashboard.schemas.runs import RunSeries, RunSummary
from backhaul_server.dashboard.views.events import selected_events
from backhaul_server.dashboard.views.missing_details import why_missing
from backhaul_server.dashboard.views.overview import overview
from backhaul_server.dashboard.views.ranges import TimeRange
from backhaul_server.dashboard.views.runs import is_wanted, merged, run_series, run_summary
from backhaul_server.dashboard.views.workers import session_statuses, worker_status

_TOLD_LATELY_S = 60.0


@dataclass(frozen=True)
class DashboardState:
    """The objects that routes read from."""

    watch: Watch
    alerts: Alerts
    history: History

    def overview(self) -> Overview:
        """Returns the headline numbers."""
        return overview(self.watch, time.time(), self.history.error)

    def workers(self) -> list[WorkerStatus]:
        """Returns all workers, in the order of the command line."""
        return [worker_status(worker) for worker in self.watch.workers]

    def sessions(self) -> list[SessionStatus]:
        """Returns the sessions of all workers that answer."""
        return [session for worker in self.watch.workers for session in session_statuses(worker)]

    def live(self) -> Live:
        """Returns the data of one live event."""
        now_s, newest = time.time(), self.watch.trainers.newest()
        recent = [run for run in self.watch.trainers if run is newest or now_s - run.heard_at_s <= _TOLD_LATELY_S]
        return Live(
            overview=self.overview(),
            workers=self.workers(),
            sessions=self.sessions(),
            alerts=self.alerts.evaluate(now_s),
            runs=[run_summary(run, now_s) for run in recent],
        )

    def run(self, name: str) -> TrainerRun:
        """Returns a run by id. Raises HTTPException 404 if it is unknown."""
        known = self.watch.trainers.find(name)
        if known is None:
            raise HTTPException(
                404, f'no run "{name}" has reported since the dashboard started: /api/v1/runs lists the runs'
            )
        return known

    def run_or_newest(self, name: str) -> TrainerRun | None:
        """Returns a run by id, or the run that began last if the id is empty."""
        return self.run(name) if name else self.watch.trainers.newest()

    async def asked(self, names: Iterable[str]) -> list[TrainerRun | None]:
        """Returns runs by their ids, each once: None for a run of which only the history knows.

        Raises HTTPException 404 if a run is unknown.
        """
        runs: list[TrainerRun | None] = []
        for name in dict.fromkeys(names):
            run = self.watch.trainers.find(name)
            if run is None:
                await self.run_by_id(name)
            runs.append(run)
        return runs

    async def tables(self, names: Iterable[str]) -> tuple[list[SegmentTable], str]:
        """Returns the tables of these runs, or of all runs if no id is given, and why those of some are missing."""
        runs = await self.asked(names) or list(self.watch.trainers)
        tables = [run.detail.segments for run in runs if run is not None and run.detail is not None]
        return tables, why_missing("Segments", runs)

    def worker(self, address: str) -> Watched:
        """Returns a worker by address. Raises HTTPException 404 if it is not watched."""
        for worker in self.watch.workers:
            if worker.address.text == address:
                return worker
        raise HTTPException(404, f'worker "{address}" is not watched: /api/v1/workers lists the workers')

    async def events(self, wanted: EventSelection) -> EventList:
        """Returns a page of events: those of the history, or those in memory while there is none."""
        past = None if self.history.error else await self.history.events(wanted)
        return selected_events(self.watch.events, wanted, self._name_of) if past is None else past

    def _name_of(self, run: str) -> str:
        """Returns the name and rank of a run that reports now; empty for any other."""
        known = self.watch.trainers.find(run)
        return f"{known.about.name} rank {known.about.rank}" if known is not None else ""

    async def runs(self, wanted: RunSelection) -> tuple[list[RunSummary], int]:
        """Returns a page of the runs of the history and of those in memory, and the number of both on all pages."""
        now_s = time.time()
        current = {run.id: run for run in self.watch.trainers if is_wanted(run, wanted)}
        past = await self.history.runs(wanted, list(current))
        summaries = {}
        for stored in past.runs:
            run = self.watch.trainers.find(stored.run)
            summaries[stored.run] = stored if run is None else merged(stored, run, now_s)
        new = [run_summary(run, now_s) for name, run in current.items() if name not in past.stored]
        summaries |= {run.run: run for run in new if (run.started_at_s, run.run) < wanted.before}
        page = sorted(summaries.values(), key=lambda run: (run.started_at_s, run.run), reverse=True)
        return page[: wanted.limit], past.total + len(new)

    async def run_by_id(self, name: str) -> RunSummary:
        """Returns a run of the history or in memory. Raises HTTPException 404 if neither knows it."""
        past = await self.history.runs(RunSelection(1, id=name))
        run = self.watch.trainers.find(name)
        if past.runs:
            return past.runs[0] if run is None else merged(past.runs[0], run, time.time())
        return run_summary(self.run(name), time.time())

    async def series(self, name: str, points: int, within: TimeRange) -> RunSeries:
        """Returns the steps of a run. Raises HTTPException 404 if it is unknown."""
        past = None
        if not self.history.error:
            past = await self.history.series(name, points, within.since_s, within.until_s)
        if past is not None:
            return past
        run = self.run(name)
        return run_series(run, points, within, self.watch.shift_s(run))
