"""How many pushed results a trainer may hold: a stream that it shares with answers is never blocked by pushes."""

import asyncio
from collections import deque

from backhaul_runtime.wire.protocol import MOST_PUSHED, PUSHED_BYTES


class PushCredit:
    """Counts the results that were pushed on one stream and are held by its trainer. Event loop only."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()  # of the results that the trainer holds
        self._taken = 0
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether another result may be pushed."""
        return len(self._sizes) < MOST_PUSHED and sum(self._sizes) < PUSHED_BYTES

    async def room(self) -> None:
        """Waits until another result may be pushed."""
        while not self.has_room:
            self._changed.clear()
            await self._changed.wait()

    def pushed(self, size_bytes: int) -> None:
        """Counts a result of so many bytes."""
        self._sizes.append(size_bytes)

    def taken(self, count: int) -> None:
        """Notes how many results the trainer no longer holds, counted since the stream began. The oldest go first."""
        while self._sizes and self._taken < count:
            self._sizes.popleft()
            self._taken += 1
        self._changed.set()
