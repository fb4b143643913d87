"""The dashboard's HTTP side: a page, /api/v1, /metrics, /healthz. Read-only."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from backhaul_runtime.addresses import Address
from backhaul_runtime.version import version
from backhaul_server.dashboard import metrics, schemas
from backhaul_server.dashboard.access import Access
from backhaul_server.dashboard.watch import KEPT_SAMPLES, Watch

STATIC = Path(__file__).parent / "static"


def create_app(
    addresses: Sequence[Address],
    tokens: Sequence[str | None] = (None,),
    token: str | None = None,
    host: str = "",
) -> FastAPI:
    """The application; it watches the workers while it runs.

    Args:
        addresses: Of the workers.
        tokens: What to show them, None for nothing.
        token: What visitors must show, None for nothing.
        host: Where it listens.
    """
    watch = Watch(addresses, tokens)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(
        title="Backhaul",
        version=version(),
        description="Memory and latency of Backhaul workers.",
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # these load from a CDN
        redoc_url=None,
    )

    def access(app: ASGIApp) -> Access:
        return Access(app, token, host)

    app.add_middleware(access)  # by a function: the application shows arguments of its middleware

    @app.get("/api/v1/workers", tags=["workers"])
    async def workers() -> list[schemas.Worker]:
        """Every worker: state, memory, sessions, latency per RPC."""
        return [schemas.worker(worker) for worker in watch.workers]

    @app.get("/api/v1/memory", tags=["workers"])
    async def memory(
        samples: Annotated[int, Query(ge=1, le=KEPT_SAMPLES, description="One a second, the last ones")] = 120,
    ) -> list[schemas.MemoryHistory]:
        """Memory of every worker over time."""
        return [schemas.memory_history(worker, samples) for worker in watch.workers]

    @app.get("/metrics", include_in_schema=False)
    async def exposition() -> Response:
        return Response(metrics.exposition(watch), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    return app


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serves on a bound socket until SIGTERM or SIGINT."""
    # No log_config: what uvicorn logs goes where all else does.
    config = uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
