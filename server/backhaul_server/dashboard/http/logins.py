"""The logins of browsers. They are kept in memory, so a restart of the dashboard ends all of them."""

import secrets
from collections.abc import Callable
from time import monotonic

LASTS_S = 12 * 3600
MOST = 1000
"""Beyond this number the oldest login ends. Only a holder of the token can create one."""


class Logins:
    """Random names of logins, each with the time of its end.

    Args:
        clock: Returns a monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._ends_at_s: dict[str, float] = {}  # oldest first, because all logins last equally long

    def open(self) -> str:
        """Opens a login and returns its new random name. A name that a browser sends is never adopted."""
        while self._ends_at_s:
            oldest, end_s = next(iter(self._ends_at_s.items()))
            if end_s > self._clock() and len(self._ends_at_s) < MOST:
                break
            del self._ends_at_s[oldest]
        name = secrets.token_urlsafe(32)
        self._ends_at_s[name] = self._clock() + LASTS_S
        return name

    def __contains__(self, name: object) -> bool:
        """Whether a login with this name exists and has not ended."""
        return isinstance(name, str) and self._ends_at_s.get(name, 0.0) > self._clock()

    def __len__(self) -> int:
        return len(self._ends_at_s)

    def close(self, name: str) -> None:
        """Ends a login, if it exists."""
        self._ends_at_s.pop(name, None)
