"""The bytes of all messages of one connection, for the dashboard's picture of the network."""

import threading


class LinkTraffic:
    """Counts bytes since the connection was made, over interruptions too. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both counts, which several threads add to
        self._up_bytes = self._down_bytes = 0

    def add(self, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Counts bytes that were sent or received."""
        with self._lock:
            self._up_bytes += up_bytes
            self._down_bytes += down_bytes

    @property
    def totals(self) -> tuple[int, int]:
        """The bytes that were sent and received so far."""
        with self._lock:
            return self._up_bytes, self._down_bytes

    def forked(self) -> None:
        """Resets the lock in the child of a fork, where the thread that holds it may not exist."""
        self._lock = threading.Lock()
