"""The routes of /api/v1. All of them only read."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from backhaul_server.dashboard.collect.durations import RETENTION_S as DURATIONS_RETENTION_S
from backhaul_server.dashboard.collect.watched import RETENTION_S
from backhaul_server.dashboard.history.selection import EventSelection
from backhaul_server.dashboard.http.dashboard_state import DashboardState
from backhaul_server.dashboard.http.error_answers import FULL, MISSING
from backhaul_server.dashboard.http.feed import MOST_LISTENERS, Feed
from backhaul_server.dashboard.http.paging import cursor_of, page_of, read_cursor
from backhaul_server.dashboard.http.parameters import (
    AnyRun,
    ChosenRuns,
    Cursor,
    GivenRange,
    Limit,
    Since,
    Until,
    last_seconds,
)
from backhaul_server.dashboard.http.runs_api import add_run_routes
from backhaul_server.dashboard.schemas.events import Severity
from backhaul_server.dashboard.schemas.latency import Latency
from backhaul_server.dashboard.schemas.memory import MemoryHistory
from backhaul_server.dashboard.schemas.network import Fleet, Topology
from backhaul_server.dashboard.schemas.now import Overview
from backhaul_server.dashboard.schemas.pages import AlertPage, EventPage, SessionPage, WorkerPage
from backhaul_server.dashboard.views.fleet import fleet
from backhaul_server.dashboard.views.latency import latency
from backhaul_server.dashboard.views.memory import memory_history
from backhaul_server.dashboard.views.topology import topology

_RETRY_FULL_S = 10


def add_routes(app: FastAPI, state: DashboardState, feed: Feed) -> None:
    """Adds all routes of /api/v1 to the application."""
    _add_present(app, state, feed)
    _add_network(app, state)
    _add_past(app, state)
    add_run_routes(app, state)


def _add_present(app: FastAPI, state: DashboardState, feed: Feed) -> None:
    """Adds the routes that show the state at this moment."""

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
        responses=FULL,
    )
    async def live() -> AsyncIterator[ServerSentEvent]:
        """Streams the state once a second, starting at once. Events are named "live" and contain a Live object."""
        async for event in feed.listen():
            yield event

    @app.get("/api/v1/overview", tags=["now"])
    async def headline() -> Overview:
        """Headline numbers: workers, sessions, steps, bytes saved, time added, fallbacks."""
        return state.overview()

    @app.get("/api/v1/workers", tags=["now"])
    async def workers(limit: Limit = 100, cursor: Cursor = "") -> WorkerPage:
        """Every worker, as of its last answer, in the order of the command line."""
        return page_of(WorkerPage, state.workers(), limit, cursor)

    @app.get("/api/v1/sessions", tags=["now"])
    async def sessions(limit: Limit = 100, cursor: Cursor = "") -> SessionPage:
        """Every session of every worker that answers."""
        return page_of(SessionPage, state.sessions(), limit, cursor)

    @app.get("/api/v1/alerts", tags=["now"])
    async def alerts(limit: Limit = 100, cursor: Cursor = "") -> AlertPage:
        """The alerts that fire now, critical ones first."""
        return page_of(AlertPage, state.alerts.evaluate(time.time()), limit, cursor)


def _add_network(app: FastAPI, state: DashboardState) -> None:
    """Adds the routes that show trainers and workers together."""

    @app.get("/api/v1/topology", tags=["network"])
    async def network() -> Topology:
        """Trainers, workers and the links between them: traffic, round trips and clocks."""
        return topology(state.watch, time.time())

    @app.get("/api/v1/fleet", tags=["network"])
    async def all_workers(
        seconds: Annotated[int, Query(ge=10, le=RETENTION_S, description="How far back", examples=[600])] = 600,
        points: Annotated[int, Query(ge=1, le=600, description="Intervals at most", examples=[60])] = 60,
        since_s: Since = None,
        until_s: Until = None,
    ) -> Fleet:
        """The memory and load of all workers over time, in one answer."""
        return fleet(state.watch.workers, last_seconds(seconds, since_s, until_s), points)


def _add_past(app: FastAPI, state: DashboardState) -> None:
    """Adds the routes that show what happened, and memory and latency over time."""

    @app.get("/api/v1/events", tags=["events"])
    async def events(
        runs: ChosenRuns,
        within: GivenRange,
        severity: Annotated[Severity, Query(description="The least severity", examples=["warning"])] = "info",
        text: Annotated[
            str,
            Query(
                alias="filter",
                max_length=200,
                description="Text in what happened, the kind of event in words, worker, segment, or id and name of the "
                "run",
                examples=["worker lost"],
            ),
        ] = "",
        limit: Limit = 100,
        cursor: Cursor = "",
    ) -> EventPage:
        """What happened to workers and runs, the newest first.

        With `run` or `runs`, events of these runs and those that concern no run in particular.
        """
        wanted = EventSelection(limit + 1, tuple(runs), within.since_s, within.until_s, severity, text)
        if cursor:
            wanted = replace(wanted, before=read_cursor(cursor))
        listed = await state.events(wanted)
        items = listed.events[:limit]
        following = cursor_of(items[-1].at_s, items[-1].id) if len(listed.events) > limit else None
        return EventPage(items=items, total=listed.total, next=following)

    @app.get("/api/v1/memory", tags=["memory and latency"])
    async def memory(
        seconds: Annotated[int, Query(ge=10, le=RETENTION_S, description="How far back", examples=[600])] = 600,
        points: Annotated[int, Query(ge=10, le=1_000, description="At most, of each series", examples=[300])] = 300,
        since_s: Since = None,
        until_s: Until = None,
    ) -> MemoryHistory:
        """Bytes by tier of every worker, and bytes held by run, over time."""
        return memory_history(state.watch, last_seconds(seconds, since_s, until_s), points)

    @app.get("/api/v1/latency", tags=["memory and latency"], responses=MISSING)
    async def latencies(
        of_steps: GivenRange,
        run: AnyRun = "",
        seconds: Annotated[
            int, Query(ge=10, le=DURATIONS_RETENTION_S, description="How far back", examples=[300])
        ] = 300,
        worker: Annotated[
            str, Query(description="Address of the worker; empty for all workers", examples=["127.0.0.1:50051"])
        ] = "",
        method: Annotated[
            str, Query(description="RPC that the heat map shows; empty for all RPCs", examples=["Backward"])
        ] = "",
        since_s: Since = None,
        until_s: Until = None,
    ) -> Latency:
        """Percentiles by RPC, a heat map of durations, and the phases of segments by step."""
        calls = state.worker(worker).durations.tally if worker else state.watch.calls
        asked = await state.asked([run]) if run else [one for one in state.watch.trainers if one.detail is not None]
        aligned = [(known, state.watch.shift_s(known)) for known in asked if known is not None]
        return latency(calls, aligned, last_seconds(seconds, since_s, until_s), method, of_steps)
