"""An HTTP server that stops within a second, even if clients are still connected."""

import asyncio
import socket
import time

import uvicorn
from starlette.types import ASGIApp

from backhaul_server.dashboard.http.feed import Feed

STUCK_S = 10.0
"""Seconds after which a connection is closed if its client does not read what is waiting for it."""

_GRACE_S = 0.4
_TICKS_PER_S = 10


class Server(uvicorn.Server):
    """Runs an application until SIGTERM or SIGINT.

    Uvicorn waits for open answers to end, and an event stream never does. So this closes the feed first, and a moment
    later the connections of clients that have not read their answers. While the server runs it closes the connections
    of clients that stop reading, because what they do not read stays in memory.

    Args:
        app: The application to serve.
        feed: The event stream of the application.
        root_path: The path prefix that a proxy strips from requests, such as "/ml/backhaul"; empty for none.
    """

    def __init__(self, app: ASGIApp, feed: Feed, root_path: str = "") -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # uvicorn then logs through the handlers of this process
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="on",
                root_path=root_path,
            )
        )
        self._feed = feed
        self._waiting: dict[asyncio.Transport, tuple[int, float]] = {}

    async def on_tick(self, counter: int) -> bool:
        """Cuts stuck connections. uvicorn calls it ten times a second."""
        if counter % _TICKS_PER_S == 0:
            self._cut_stuck(time.monotonic())
        return await super().on_tick(counter)

    def _cut_stuck(self, now_s: float) -> None:
        """Closes connections whose clients do not read.

        An application adds nothing to a full buffer, so a buffer that shrinks is one that the client reads.
        """
        before, self._waiting = self._waiting, {}
        for connection in list(self.server_state.connections):
            transport = connection.transport
            if transport is None or not (waiting_bytes := transport.get_write_buffer_size()):
                continue
            had_bytes, since_s = before.get(transport, (0, now_s))
            if waiting_bytes < had_bytes:
                since_s = now_s
            if now_s - since_s >= STUCK_S:
                transport.abort()
            else:
                self._waiting[transport] = waiting_bytes, since_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the feed, then the connections. uvicorn calls it when it was asked to stop."""
        await self._feed.close()
        cut = asyncio.get_running_loop().call_later(_GRACE_S, self._cut)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
