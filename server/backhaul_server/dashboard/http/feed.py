"""The stream of /api/v1/live: the whole state once a second, encoded once for all listeners."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from fastapi.sse import ServerSentEvent

from backhaul_server.dashboard.schemas.live import Live

logger = logging.getLogger("backhaul.dashboard")

INTERVAL_S = 1.0
RETRY_MS = 1_000
MOST_LISTENERS = 100
"""The most listeners at once. For one that does not read, up to one event and 64 KiB wait in memory."""


class Feed:
    """Sends events to up to MOST_LISTENERS listeners. A slow listener misses events, because none are queued for it.

    Args:
        build: Builds the state. It is called once a second while there are listeners.
    """

    def __init__(self, build: Callable[[], Live]) -> None:
        self._build = build
        self._event = ServerSentEvent()
        self._built_s = float("-inf")
        self._listeners = 0
        self._news = asyncio.Condition()  # notified when the state is renewed or the feed is closed
        self._is_closed = False

    async def run(self) -> None:
        """Renews the state once a second while there are listeners. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not self._listeners:
                continue
            try:
                self._renew()
            except Exception:  # the next second may succeed
                logger.exception("The state of the dashboard could not be built.")
            async with self._news:
                self._news.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether no further listener may join."""
        return self._listeners >= MOST_LISTENERS

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Counts a listener, from before its stream begins until after it has ended."""
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1

    async def listen(self) -> AsyncIterator[ServerSentEvent]:
        """Yields events to a listener inside `joined`, the first at once, until the feed is closed."""
        if time.monotonic() - self._built_s >= INTERVAL_S:
            self._renew()
        while not self._is_closed:
            seen_s = self._built_s
            yield self._event
            async with self._news:
                await self._news.wait_for(lambda: self._is_closed or self._built_s > seen_s)  # noqa: B023

    async def close(self) -> None:
        """Ends all streams."""
        self._is_closed = True
        async with self._news:
            self._news.notify_all()

    def _renew(self) -> None:
        data = self._build().model_dump_json()
        self._event = ServerSentEvent(event="live", raw_data=data, retry=RETRY_MS)
        self._built_s = time.monotonic()
