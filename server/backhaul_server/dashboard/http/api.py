"""The routes of /api/v1. All of them only read."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from backhaul_server.dashboard.collect.durations import KEPT_S as KEPT_DURATIONS_S
from backhaul_server.dashboard.collect.runs import TrainerRun
from backhaul_server.dashboard.collect.segments import Column, Row, SegmentTable, reasons_of, select
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import KEPT_S, Watched
from backhaul_server.dashboard.history.archive import Archive, RunRecord
from backhaul_server.dashboard.http.feed import MOST_LISTENERS, Feed
from backhaul_server.dashboard.metrics.alerts import Alerts
from backhaul_server.dashboard.views import schemas
from backhaul_server.dashboard.views.latency import latency
from backhaul_server.dashboard.views.memory import memory_history
from backhaul_server.dashboard.views.overview import overview
from backhaul_server.dashboard.views.runs import run_series, run_summary
from backhaul_server.dashboard.views.segments import as_csv, segment_list
from backhaul_server.dashboard.views.timeline import last_steps, timeline
from backhaul_server.dashboard.views.trace import chrome_trace, file_name
from backhaul_server.dashboard.views.workers import session_statuses, worker_status

_TOLD_LATELY_S = 60.0
_RETRY_FULL_S = 10
_RUN = "9f86d081884c7d65"
_CSV = "run,segment,calls,up_bytes,…\r\n9f86d081884c7d65,Block #3,1043,5577572352,…\r\n"
_EVENT = f"event: live\ndata: {json.dumps(schemas.example_of(schemas.Live))}\nretry: 1000\n\n"
_TRACE = {
    "baseTimeNanoseconds": 1_759_300_074_000_000_000,
    "displayTimeUnit": "ms",
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 5_000_001, "tid": 500_000, "args": {"name": "backward"}},
        {
            "ph": "X",
            "cat": "backhaul",
            "name": "Block #3",
            "pid": 5_000_001,
            "tid": 500_000,
            "ts": 4_469_523_712_250,
            "dur": 62_500,
            "args": {"step": 1_043, "decision": "gradients", "worker": "127.0.0.1:50051"},
        },
    ],
}

OneRun = Annotated[
    str,
    Query(
        alias="run",
        max_length=64,
        description="A run's id; the one that began last where none is given",
        examples=[_RUN],
    ),
]
AnyRun = Annotated[
    str, Query(alias="run", max_length=64, description="A run's id; all runs where none is given", examples=[_RUN])
]
Steps = Annotated[int, Query(ge=1, le=20, description="How many of the last ones", examples=[3])]
Filter = Annotated[
    str,
    Query(
        alias="filter",
        max_length=200,
        description="Text in the segment, decision, any of the reasons or worker",
        examples=["Block"],
    ),
]
Reason = Annotated[
    str,
    Query(
        max_length=300,
        description="A reason that calls of the segment had, word for word",
        examples=["the worker is gone"],
    ),
]
Sort = Annotated[Column, Query(description="The column to sort by", examples=["wait_ms"])]
Descending = Annotated[bool, Query(description="Largest first", examples=[True])]


class CsvResponse(StreamingResponse):
    """Streams CSV line by line."""

    media_type = "text/csv"


@dataclass(frozen=True)
class Sources:
    """The objects that routes read from."""

    watch: Watch
    alerts: Alerts
    history: Archive

    def overview(self) -> schemas.Overview:
        """Returns the headline numbers."""
        return overview(self.watch, time.time(), self.history.error)

    def workers(self) -> list[schemas.WorkerStatus]:
        """Returns all workers, in the order of the command line."""
        return [worker_status(worker) for worker in self.watch.workers]

    def sessions(self) -> list[schemas.SessionStatus]:
        """Returns the sessions of all workers that answer."""
        return [session for worker in self.watch.workers for session in session_statuses(worker)]

    def firing_alerts(self, now_s: float) -> list[schemas.Alert]:
        """Returns the alerts that fire now, critical ones first."""
        return [schemas.Alert.model_validate(alert, from_attributes=True) for alert in self.alerts.evaluate(now_s)]

    def live(self) -> schemas.Live:
        """Returns the data of one live event."""
        now_s, newest = time.time(), self.watch.trainers.newest()
        recent = [run for run in self.watch.trainers if run is newest or now_s - run.heard_at_s <= _TOLD_LATELY_S]
        return schemas.Live(
            overview=self.overview(),
            workers=self.workers(),
            sessions=self.sessions(),
            alerts=self.firing_alerts(now_s),
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

    def tables(self, name: str) -> list[SegmentTable]:
        """Returns the table of a run, or of all runs if the id is empty."""
        runs = [self.run(name)] if name else list(self.watch.trainers)
        return [run.detail.segments for run in runs if run.detail is not None]

    def worker(self, address: str) -> Watched:
        """Returns a worker by address. Raises HTTPException 404 if it is not watched."""
        for worker in self.watch.workers:
            if worker.address.text == address:
                return worker
        raise HTTPException(404, f'worker "{address}" is not watched: /api/v1/workers lists the workers')


def add_routes(app: FastAPI, sources: Sources, feed: Feed) -> None:
    """Adds all routes of /api/v1 to the application."""

    async def seat() -> AsyncIterator[None]:
        if feed.is_full:
            detail = f"{MOST_LISTENERS} pages follow this stream already: close some, or ask /api/v1/overview"
            raise HTTPException(503, detail, {"Retry-After": str(_RETRY_FULL_S)})
        with feed.joined():
            yield

    @app.get(
        "/api/v1/live",
        response_class=EventSourceResponse,
        tags=["now"],
        dependencies=[Depends(seat)],
        responses={**_shows_text(_EVENT, "text/event-stream"), **_FULL},
    )
    async def live() -> AsyncIterator[ServerSentEvent]:
        """Streams the state once a second, starting at once. Events are named "live" and contain a Live object."""
        async for event in feed.listen():
            yield event

    @app.get("/api/v1/overview", tags=["now"], responses=_shows(schemas.Overview))
    async def headline() -> schemas.Overview:
        """Headline numbers: workers, sessions, steps, bytes saved, time added, fallbacks."""
        return sources.overview()

    @app.get("/api/v1/workers", tags=["now"], responses=_shows_many(schemas.WorkerStatus))
    async def workers() -> list[schemas.WorkerStatus]:
        """Every worker, as of its last answer."""
        return sources.workers()

    @app.get("/api/v1/sessions", tags=["now"], responses=_shows_many(schemas.SessionStatus))
    async def sessions() -> list[schemas.SessionStatus]:
        """Every session of every worker that answers."""
        return sources.sessions()

    @app.get("/api/v1/alerts", tags=["now"], responses=_shows_many(schemas.Alert))
    async def alerts() -> list[schemas.Alert]:
        """The alerts that fire now, critical ones first."""
        return sources.firing_alerts(time.time())

    @app.get("/api/v1/memory", tags=["memory and latency"], responses=_shows(schemas.MemoryHistory))
    async def memory(
        seconds: Annotated[int, Query(ge=10, le=KEPT_S, description="How far back", examples=[600])] = 600,
        points: Annotated[int, Query(ge=10, le=1_000, description="At most, of each series", examples=[300])] = 300,
    ) -> schemas.MemoryHistory:
        """Bytes by tier of every worker, and bytes held by run, over time."""
        return memory_history(sources.watch, time.time(), seconds, points)

    @app.get("/api/v1/latency", tags=["memory and latency"], responses={**_shows(schemas.Latency), **_MISSING})
    async def latencies(
        run: AnyRun = "",
        seconds: Annotated[int, Query(ge=10, le=KEPT_DURATIONS_S, description="How far back", examples=[300])] = 300,
        worker: Annotated[
            str, Query(description="Address of the worker; empty for all workers", examples=["127.0.0.1:50051"])
        ] = "",
        method: Annotated[
            str, Query(description="RPC that the heat map shows; empty for all RPCs", examples=["Backward"])
        ] = "",
    ) -> schemas.Latency:
        """Percentiles by RPC, a heat map of durations, and the phases of segments by step."""
        calls = sources.worker(worker).durations.tally if worker else sources.watch.calls
        runs = [sources.run(run)] if run else [known for known in sources.watch.trainers if known.detail is not None]
        return latency(calls, runs, time.time(), seconds, method)

    @app.get("/api/v1/timeline", tags=["steps and segments"], responses={**_shows(schemas.Timeline), **_MISSING})
    async def last(run: OneRun = "", steps: Steps = 3) -> schemas.Timeline:
        """The last steps of a run as lanes of bars. Bars of one row never overlap."""
        return timeline(sources.run_or_newest(run), steps)

    @app.get("/api/v1/timeline/trace", tags=["steps and segments"], responses={**_shows_json(_TRACE), **_MISSING})
    async def trace(
        run: OneRun = "",
        steps: Steps = 3,
        base_ns: Annotated[
            int | None,
            Query(
                ge=0,
                lt=2**63,
                description="baseTimeNanoseconds of the torch.profiler trace to merge with, where it is not the same",
                examples=[1_759_300_074_000_000_000],
            ),
        ] = None,
    ) -> Response:
        """The timeline as a file for Perfetto or chrome://tracing.

        Its traceEvents can be merged with torch.profiler's.
        """
        known = sources.run_or_newest(run)
        if known is None:
            raise HTTPException(404, "no trainer has reported a step yet: train with a session on one of the workers")
        shown = last_steps(known, steps)
        return Response(
            json.dumps(chrome_trace(shown, base_ns)),
            media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{file_name(shown)}"'},
        )

    @app.get("/api/v1/segments", tags=["steps and segments"], responses={**_shows(schemas.SegmentList), **_MISSING})
    async def segments(
        run: AnyRun = "",
        text: Filter = "",
        reason: Reason = "",
        sort: Sort = "segment",
        descending: Descending = False,
        offset: Annotated[int, Query(ge=0, lt=2**31, description="Rows to leave out", examples=[0])] = 0,
        limit: Annotated[int, Query(ge=1, le=1_000, description="Rows at most", examples=[100])] = 100,
    ) -> schemas.SegmentList:
        """The cost of each segment, the place of its recomputation, and the reason for it."""
        tables = sources.tables(run)
        rows = select(tables, text, sort, descending=descending, reason=reason)
        return segment_list(rows[offset : offset + limit], len(rows), reasons_of(tables))

    @app.get(
        "/api/v1/segments.csv",
        response_class=CsvResponse,
        tags=["steps and segments"],
        responses={**_shows_text(_CSV, "text/csv"), **_MISSING},
    )
    async def segments_csv(
        run: AnyRun = "",
        text: Filter = "",
        reason: Reason = "",
        sort: Sort = "segment",
        descending: Descending = False,
    ) -> CsvResponse:
        """All rows of the table of segments, for spreadsheets."""
        rows = select(sources.tables(run), text, sort, descending=descending, reason=reason)
        name = f"backhaul-segments-{run}.csv" if run else "backhaul-segments.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return CsvResponse(_lines(rows), headers=headers)

    @app.get("/api/v1/runs", tags=["runs"], responses=_shows_many(schemas.RunSummary))
    async def runs(
        limit: Annotated[int, Query(ge=1, le=1_000, description="Runs at most", examples=[100])] = 100,
    ) -> list[schemas.RunSummary]:
        """Runs reported since the dashboard started and runs kept in the history, newest first."""
        return _merged(await sources.history.runs(limit), sources.watch.trainers)[:limit]

    @app.get("/api/v1/runs/{run}/steps", tags=["runs"], responses={**_shows(schemas.RunSeries), **_MISSING})
    async def steps(
        run: Annotated[str, Path(max_length=64, description="A run's id", examples=[_RUN])],
        points: Annotated[int, Query(ge=1, le=10_000, description="At most", examples=[400])] = 400,
    ) -> schemas.RunSeries:
        """The steps of a run over time: duration, the trainer's peak memory, moved bytes and loss."""
        kept = None if sources.history.error else await sources.history.series(run, points)
        stored = kept and schemas.RunSeries.model_validate(kept, from_attributes=True)
        return stored or run_series(sources.run(run), points)


async def _lines(rows: list[Row]) -> AsyncIterator[str]:
    for part in as_csv(rows):
        yield part
        await asyncio.sleep(0)  # lets other tasks run


def _merged(records: Iterable[RunRecord], current: Iterable[TrainerRun]) -> list[schemas.RunSummary]:
    """Merges stored and current runs, newest first. Of a run that is older than this process, history has all sums."""
    now_s, sums = time.time(), ("steps", "last_step", "peak_bytes", "up_bytes", "down_bytes", "fallbacks")
    runs = {record.run: schemas.RunSummary.model_validate(record, from_attributes=True) for record in records}
    for run in current:
        summary, stored = run_summary(run, now_s), runs.get(run.id)
        if stored is not None:
            summary = summary.model_copy(
                update={name: max(getattr(summary, name), getattr(stored, name)) for name in sums}
            )
        runs[run.id] = summary
    return sorted(runs.values(), key=lambda run: run.started_at_s, reverse=True)


def _shows_json(example: object) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"application/json": {"example": example}}}}


def _shows_text(example: str, media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"example": example}}}}


def _shows(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return _shows_json(schemas.example_of(model))


def _shows_many(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return _shows_json([schemas.example_of(model)])


_MISSING: dict[int | str, dict[str, Any]] = {
    404: {
        "description": "The run or worker is unknown",
        "content": {"application/json": {"example": {"detail": 'no worker "a:1" is watched: see /api/v1/workers'}}},
    }
}
_FULL: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "There are too many listeners already",
        "content": {"application/json": {"example": {"detail": f"{MOST_LISTENERS} pages follow this stream already"}}},
    }
}
