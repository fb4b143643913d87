"""Shows which cell runs and how much time is left."""

import sys
from time import monotonic

_CLEAR = "\r\x1b[K"
"""Moves a terminal's cursor to the beginning of its line, which is emptied."""


def time_left_s(done: int, total: int, took_s: float) -> float | None:
    """Returns the seconds that the remaining visits take if they take as long as those done; None if none is done."""
    return took_s / done * (total - done) if done else None


def show_seconds(seconds: float) -> str:
    """Returns a duration such as "45 s" or "3 min 05 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"  # noqa: PLR2004


class Progress:
    """Writes a line to stderr for each finished visit, and on a terminal one for the visit that runs.

    Args:
        total: Number of visits of this run.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began_s = monotonic()
        self._visit = ""
        self._clear = _CLEAR if sys.stderr.isatty() else ""

    def begin(self, visit: str) -> None:
        """A visit begins."""
        self._visit = visit
        if self._clear:
            running = f"{self._clear}[{self._done + 1}/{self._total}] {visit}: running{self._left()}"
            print(running, end="", file=sys.stderr, flush=True)

    def end(self, outcome: str) -> None:
        """A visit has ended. `outcome` says how, in a few words."""
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {self._visit}: {outcome}{self._left() or ' (done)'}")

    def say(self, text: str) -> None:
        """Shows a line that stays."""
        print(f"{self._clear}{text}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        left_s = time_left_s(self._done, self._total, monotonic() - self._began_s)
        return f" (about {show_seconds(left_s)} left)" if left_s else ""
