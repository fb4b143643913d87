"""The HTTP application of the dashboard: the page, /api/v1, /metrics, /healthz and /readyz. It is read-only."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from backhaul_runtime.process.discovery import Resolver
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.version import version
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.history.retention import MEMORY, RETENTION_DAYS
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.http.access import TokenMiddleware
from backhaul_server.dashboard.http.api import add_routes
from backhaul_server.dashboard.http.dashboard_state import DashboardState
from backhaul_server.dashboard.http.feed import Feed
from backhaul_server.dashboard.http.openapi import described, operation_id
from backhaul_server.dashboard.http.serving import Server
from backhaul_server.dashboard.metrics.alerts import Alerts
from backhaul_server.dashboard.metrics.exposition import MetricsSnapshot, exposition

logger = logging.getLogger("backhaul.dashboard")

STATIC = Path(__file__).parents[1] / "static"
_FRESH = {"Cache-Control": "no-cache"}
_READING = ["GET", "HEAD"]
_ALERTS_S = 1.0
_GZIP_BYTES = 1_000
_GZIP_LEVEL = 4  # compresses JSON to a sixth, as the slowest level does, in a third of the time


class FreshFiles(StaticFiles):
    """Static files that browsers must revalidate, because the script of another version does not fit the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Returns a file with a header that makes browsers revalidate it."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_FRESH)
        return response


def create_app(
    workers: Sequence[Resolver],
    tokens: Sequence[str | None] = (None,),
    token: str | None = None,
    host: str = "",
    history: History | None = None,
    tls: TlsFiles | None = None,
) -> FastAPI:
    """Returns the application, which watches the workers while it runs.

    Args:
        workers: The resolvers that name the workers.
        tokens: Tokens of the workers, None for no token: one for all workers, or one each in the order of resolvers.
        token: The token that visitors must show, None for no token.
        host: The host that the server listens on.
        history: The history that keeps reports; None to keep them in memory only.
        tls: The files with which it speaks TLS with workers; None: without TLS.

    Returns:
        The application, with the feed of /api/v1/live as `state.feed`. Streams end when the feed is closed.
    """
    history = history or History(MEMORY, RETENTION_DAYS)
    watch = Watch(workers, tokens, history.put, tls, history.put_event)
    alerts = Alerts(watch)
    state = DashboardState(watch, alerts, history)
    feed = Feed(state.live)

    async def look() -> None:
        while True:
            try:
                alerts.evaluate(time.time())
            except Exception:  # the next evaluation may succeed
                logger.exception("The alerts could not be evaluated.")
            await asyncio.sleep(_ALERTS_S)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        history.start()
        tasks = [asyncio.create_task(coroutine) for coroutine in (watch.run(), look(), feed.run())]
        yield
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(history.stop)

    app = FastAPI(
        title="Backhaul",
        version=version(),
        description="Where memory and time of Backhaul's workers and trainers go. Nothing here changes anything.",
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # the default pages load scripts from a CDN: /api shows the same viewer from here
        redoc_url=None,
        generate_unique_id_function=operation_id,
    )
    app.state.feed = feed
    # FastAPI documents this way to change the description; to mypy it is an assignment to a method.
    app.openapi = lambda: described(app, has_token=token is not None)  # type: ignore[method-assign]
    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_BYTES, compresslevel=_GZIP_LEVEL)

    def access(inner: ASGIApp) -> TokenMiddleware:
        return TokenMiddleware(inner, token, host)

    app.add_middleware(access)  # a function, because the application shows the arguments of its middleware
    add_routes(app, state, feed)

    @app.api_route("/metrics", methods=_READING, include_in_schema=False)
    async def metrics() -> Response:
        text = await asyncio.to_thread(exposition, MetricsSnapshot(watch))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/healthz", methods=_READING, include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.api_route("/readyz", methods=_READING, include_in_schema=False)
    async def readyz() -> PlainTextResponse:
        waiting = [worker.address.text for worker in watch.workers if not worker.was_asked]
        if waiting:
            return PlainTextResponse(f"no answer yet of {', '.join(waiting)}\n", 503)
        return PlainTextResponse("ok\n")

    @app.api_route("/", methods=_READING, include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=_FRESH)

    @app.api_route("/api", methods=_READING, include_in_schema=False)
    async def api_page() -> FileResponse:
        return FileResponse(STATIC / "api.html", headers=_FRESH)

    app.mount("/static", FreshFiles(directory=STATIC))
    return app


def serve(app: FastAPI, listener: socket.socket, root_path: str = "") -> None:
    """Serves an application of `create_app` on a bound socket. Returns within a second of SIGTERM or SIGINT.

    Args:
        app: The application that `create_app` returned.
        listener: The bound socket, which must listen.
        root_path: The path prefix that a proxy strips from requests, such as "/ml/backhaul"; empty for none.
    """
    # asyncio sets this only on sockets that it creates itself. Without it each answer would wait 40 ms for the
    # acknowledgement of its header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Server(app, app.state.feed, root_path).run(sockets=[listener])
