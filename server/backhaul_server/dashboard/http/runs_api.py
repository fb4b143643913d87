"""The routes of /api/v1 about runs: their steps, timelines and segments. All of them only read."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Response
from fastapi.responses import StreamingResponse

from backhaul_server.dashboard.collect.segments import Row, SegmentTable, reasons_of, select
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.history.selection import RunSelection
from backhaul_server.dashboard.http.dashboard_state import DashboardState
from backhaul_server.dashboard.http.error_answers import MISSING
from backhaul_server.dashboard.http.paging import cursor_of, read_cursor
from backhaul_server.dashboard.http.parameters import (
    RUN,
    ChosenRuns,
    Cursor,
    Descending,
    Filter,
    GivenRange,
    Limit,
    OneRun,
    Reason,
    SomeRuns,
    Sort,
    Steps,
)
from backhaul_server.dashboard.schemas.pages import RunPage
from backhaul_server.dashboard.schemas.runs import RunSeries, RunSummary
from backhaul_server.dashboard.schemas.segments import SegmentList
from backhaul_server.dashboard.schemas.timeline import Timeline
from backhaul_server.dashboard.views.segments import as_csv, segment_list
from backhaul_server.dashboard.views.timeline import last_steps, timeline
from backhaul_server.dashboard.views.trace import chrome_trace, file_name

RunOfPath = Annotated[str, Path(max_length=64, description="A run's id", examples=[RUN])]


class CsvResponse(StreamingResponse):
    """Streams CSV line by line."""

    media_type = "text/csv"


@dataclass
class SegmentSelection:
    """Which segments a request wants, and in which order."""

    runs: ChosenRuns
    text: Filter = ""
    reason: Reason = ""
    sort: Sort = "segment"
    descending: Descending = False

    def of(self, tables: Iterable[SegmentTable]) -> list[Row]:
        """Returns the wanted rows of these tables."""
        return select(tables, self.text, self.sort, descending=self.descending, reason=self.reason)


ShownSegments = Annotated[SegmentSelection, Depends()]


def add_run_routes(app: FastAPI, state: DashboardState) -> None:
    """Adds the routes to the application."""

    @app.get("/api/v1/timeline", tags=["steps and segments"], responses=MISSING)
    async def last(
        within: GivenRange,
        run: OneRun = "",
        runs: SomeRuns = [],  # noqa: B006  FastAPI copies it
        steps: Steps = 3,
    ) -> Timeline:
        """The last steps of one run, or of several on one axis, as lanes of bars. Bars of one row never overlap.

        Times of trainers whose clocks can be compared with the dashboard's are converted to it. `runs` and `workers`
        have the largest error of each.
        """
        newest = state.watch.trainers.newest()
        asked: list[TrainerRun | None] = await state.asked(runs or filter(None, [run]))
        if not asked and newest is not None:
            asked = [newest]
        aligned = [(known, state.watch.alignment(known)) for known in asked if known is not None]
        return timeline(aligned, steps, within, asked.count(None))

    @app.get("/api/v1/timeline/trace", tags=["steps and segments"], responses=MISSING)
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
        known = state.run_or_newest(run)
        if known is None:
            raise HTTPException(404, "no trainer has reported a step yet: train with a session on one of the workers")
        shown = last_steps(known, steps)
        return Response(
            json.dumps(chrome_trace(shown, base_ns)),
            media_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{file_name(shown)}"'},
        )

    @app.get("/api/v1/segments", tags=["steps and segments"], responses=MISSING)
    async def segments(
        shown: ShownSegments,
        offset: Annotated[int, Query(ge=0, lt=2**31, description="Rows to leave out", examples=[0])] = 0,
        limit: Annotated[int, Query(ge=1, le=1_000, description="Rows at most", examples=[100])] = 100,
    ) -> SegmentList:
        """The cost of each segment, the place of its recomputation, and the reason for it."""
        tables, note = await state.tables(shown.runs)
        rows = shown.of(tables)
        return segment_list(rows[offset : offset + limit], len(rows), reasons_of(tables), offset, limit, note)

    @app.get(
        "/api/v1/segments.csv",
        response_class=CsvResponse,
        tags=["steps and segments"],
        responses=MISSING,
    )
    async def segments_csv(shown: ShownSegments) -> CsvResponse:
        """All rows of the table of segments, for spreadsheets."""
        tables, _ = await state.tables(shown.runs)
        name = f"backhaul-segments-{shown.runs[0]}.csv" if shown.runs else "backhaul-segments.csv"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return CsvResponse(_lines(shown.of(tables)), headers=headers)

    @app.get("/api/v1/runs", tags=["runs"])
    async def runs(
        query: Annotated[
            str,
            Query(max_length=200, description="Text in the name, id, trainer or a tag of a run", examples=["lora"]),
        ] = "",
        tag: Annotated[
            str, Query(max_length=40, description="A tag that the run has, word for word", examples=["32k"])
        ] = "",
        limit: Limit = 100,
        cursor: Cursor = "",
    ) -> RunPage:
        """Runs reported since the dashboard started and runs kept in the history, newest first."""
        wanted = RunSelection(limit + 1, query, tag)
        if cursor:
            wanted = replace(wanted, before=read_cursor(cursor))
        listed, total = await state.runs(wanted)
        items = listed[:limit]
        following = cursor_of(items[-1].started_at_s, items[-1].run) if len(listed) > limit else None
        return RunPage(items=items, total=total, next=following)

    @app.get("/api/v1/runs/{run}", tags=["runs"], responses=MISSING)
    async def one_run(run: RunOfPath) -> RunSummary:
        """One run, as the list of runs has it."""
        return await state.run_by_id(run)

    @app.get("/api/v1/runs/{run}/steps", tags=["runs"], responses=MISSING)
    async def steps(
        run: RunOfPath,
        within: GivenRange,
        points: Annotated[int, Query(ge=1, le=10_000, description="At most", examples=[400])] = 400,
    ) -> RunSeries:
        """The steps of a run over time: duration, the trainer's peak memory, moved bytes and loss."""
        return await state.series(run, points, within)


async def _lines(rows: Iterable[Row]) -> AsyncIterator[str]:
    for part in as_csv(rows):
        yield part
        await asyncio.sleep(0)  # lets other tasks run
