"""An HTTP server that ends within a second, whoever still listens."""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from backhaul_server.dashboard.feed import Feed

_GRACE_S = 0.4


class Server(uvicorn.Server):
    """Runs an application until SIGTERM or SIGINT.

    Uvicorn waits for open answers to end, and an event stream never does: so this closes the feed first. Who has not
    taken its answer a moment later never will; its connection is cut.
    """

    def __init__(self, app: ASGIApp, feed: Feed) -> None:
        # No log_config: what uvicorn logs goes where all else does.
        super().__init__(
            uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, ws="none", lifespan="on")
        )
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it was told to end."""
        await self._feed.close()
        cut = asyncio.get_running_loop().call_later(_GRACE_S, self._cut)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
