"""Who has logged in. Kept in memory: a restart of the dashboard logs everybody out."""

import secrets
from collections.abc import Callable
from time import monotonic

LASTS_S = 12 * 3600
MOST = 1000
"""Beyond this number the oldest login ends. Only a holder of the token can create one."""


class Logins:
    """Random names of logins, each with its end.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._ends_at_s: dict[str, float] = {}  # oldest first, for all last equally long

    def open(self) -> str:
        """A new one. It is never one that a browser brought along."""
        while self._ends_at_s:
            oldest, end_s = next(iter(self._ends_at_s.items()))
            if end_s > self._clock() and len(self._ends_at_s) < MOST:
                break
            del self._ends_at_s[oldest]
        name = secrets.token_urlsafe(32)
        self._ends_at_s[name] = self._clock() + LASTS_S
        return name

    def __contains__(self, name: object) -> bool:
        """Whether there is one of this name that has not ended."""
        return isinstance(name, str) and self._ends_at_s.get(name, 0.0) > self._clock()

    def __len__(self) -> int:
        return len(self._ends_at_s)

    def close(self, name: str) -> None:
        """Ends one, if there is one."""
        self._ends_at_s.pop(name, None)
