"""Shows which cell runs and how much time is left: a bar on a terminal, lines elsewhere."""

import sys
from time import monotonic
from types import TracebackType
from typing import Protocol, Self


class Progress(Protocol):
    """Shows the visits of a run to the user. A context manager."""

    def begin(self, visit: str) -> None:
        """A visit begins."""

    def end(self, outcome: str) -> None:
        """A visit has ended. `outcome` says how, in a few words."""

    def say(self, text: str) -> None:
        """Shows a line that stays."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def time_left_s(done: int, total: int, took_s: float) -> float | None:
    """Returns the seconds that the remaining visits take if they take as long as those done; None if none is done."""
    return took_s / done * (total - done) if done else None


def show_seconds(seconds: float) -> str:
    """Returns a duration such as "45 s" or "3 min 05 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02} s"  # noqa: PLR2004


class LineProgress:
    """Writes a line to stderr for each visit: a `Progress`.

    Args:
        total: Number of visits of this run.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began_s = monotonic()
        self._visit = ""

    def begin(self, visit: str) -> None:
        """Remembers the visit."""
        self._visit = visit

    def end(self, outcome: str) -> None:
        """Writes a line with the outcome and the time left."""
        self._done += 1
        left_s = time_left_s(self._done, self._total, monotonic() - self._began_s)
        left = f"about {show_seconds(left_s)} left" if left_s else "done"
        self.say(f"[{self._done}/{self._total}] {self._visit}: {outcome} ({left})")

    def say(self, text: str) -> None:
        """Writes a line."""
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class BarProgress:
    """Draws a bar on a terminal: a `Progress`.

    Args:
        total: Number of visits of this run.
    """

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._began_s, self._total, self._done = monotonic(), total, 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("starting", total=total)
        self._visit = ""

    def begin(self, visit: str) -> None:
        """Shows the visit beside the bar."""
        self._visit = visit
        self._describe()

    def end(self, outcome: str) -> None:
        """Advances the bar, and writes the outcome above it."""
        self._done += 1
        self.say(f"{self._visit}: {outcome}")
        self._bar.advance(self._task)
        self._describe()

    def say(self, text: str) -> None:
        """Writes a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def _describe(self) -> None:
        left_s = time_left_s(self._done, self._total, monotonic() - self._began_s)
        left = "" if left_s is None else f", about {show_seconds(left_s)} left"
        self._bar.update(self._task, description=f"{self._visit}{left}".replace("[", r"\["))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


def progress(total: int) -> Progress:
    """Returns what suits standard error."""
    return BarProgress(total) if sys.stderr.isatty() else LineProgress(total)
