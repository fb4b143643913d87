"""What trainers told, kept over restarts: by a thread of its own, so that no disk holds up the dashboard.

Whatever happens to the file, the dashboard goes on without history and says why. It tries again once a second, so
history goes on when the cause is gone: room on the disk, a lock that was given up, a damaged file moved away. Nothing
that is there already is ever renamed or deleted but runs and steps older than the retention.
"""

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.history.archive import RunRecord, StepSeries
from backhaul_server.dashboard.history.sqlite import HistoryFile, HistoryRefusedError, ReportRows, report_rows

T = TypeVar("T")

WRITE_S = 1.0
"""Between two transactions, and between two attempts while the file can't be used."""
FORGET_S = 3600.0
QUEUED_ROWS = 20_000
"""About 10 MB; at a hundred steps a second, what comes in three minutes without a file."""
STOP_S = 1.0

_DAY_S = 86_400.0
_CAUSES = {
    sqlite3.SQLITE_BUSY: "is held by another process",
    sqlite3.SQLITE_LOCKED: "is held by another process",
    sqlite3.SQLITE_FULL: "can't grow, for the disk is full: make room",
    sqlite3.SQLITE_READONLY: "can't be written: allow it, or name another with --store",
    sqlite3.SQLITE_CANTOPEN: "can't be opened: allow it, or name another with --store",
    sqlite3.SQLITE_IOERR: "can't be read or written: look at the disk",
    sqlite3.SQLITE_CORRUPT: "is damaged: move it away, or name another with --store",
    sqlite3.SQLITE_NOTADB: "is damaged or no SQLite file: move it away, or name another with --store",
}
_USABLE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL}
"""After these what is there can still be read."""


class History:
    """Runs and steps of all trainers.

    Attributes:
        error: Why no history is kept, empty while it is. Read from any thread.
        dropped_steps: Steps that were dropped because the queue was full while the file could not be used.
    """

    def __init__(self, path: str, retention_days: float) -> None:
        """For a file, made at `start` if there is none, or ":memory:"."""
        self.error = ""
        self.dropped_steps = 0
        self._path = path
        self._retention_s = retention_days * _DAY_S
        self._queued: deque[ReportRows] = deque()
        self._queued_rows = 0
        self._questions: deque[Callable[[HistoryFile | None], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._serve, name="backhaul-history", daemon=True)

    def trouble(self) -> str:
        """Why the file can't be written now; empty if it can be. Called before `start`."""
        try:
            HistoryFile(self._path).close()
        except (OSError, sqlite3.Error, HistoryRefusedError) as error:
            return self._reason(error)
        return ""

    def start(self) -> None:
        """Begins to write. What was put before is written too."""
        self._thread.start()

    def stop(self) -> None:
        """Writes what was put, and ends the thread: within a second, or leaves it to the process's end."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(STOP_S)

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Takes a report, written within a second and before the next answer. Never waits: without room it drops."""
        if not report.run.id:
            return
        kept = report_rows(report, time.time())
        with self._wake:
            if self._queued_rows + len(kept) > QUEUED_ROWS:
                self.dropped_steps += len(kept.steps)
                return
            self._queued.append(kept)
            self._queued_rows += len(kept)

    async def runs(self, limit: int) -> list[RunRecord]:
        """The newest runs first; none while there is no history."""
        none: list[RunRecord] = []
        return await self._ask(lambda file: file.runs(limit, time.time()), none)

    async def series(self, run: str, points: int) -> StepSeries | None:
        """A run's steps in at most so many points, or None for a run that history does not know."""
        return await self._ask(lambda file: self._series(file, run, points), None)

    def _series(self, file: HistoryFile, run: str, points: int) -> StepSeries | None:
        stored = file.series(run, points)
        if stored is None:
            return None
        series = StepSeries(run=run, step=[], step_ms=[], peak_bytes=[], moved_bytes=[], loss=[])
        for point in stored:
            series.step.append(point.step)
            series.step_ms.append(point.step_ms)
            series.peak_bytes.append(point.peak_bytes)
            series.moved_bytes.append(point.moved_bytes)
            series.loss.append(point.loss)
            if self._is_stopping:
                break
        return series

    async def _ask(self, question: Callable[[HistoryFile], T], otherwise: T) -> T:
        """Has the thread answer a question: otherwise, while there is no file or if it can't be read."""
        answer: Future[T] = Future()

        def reply(file: HistoryFile | None) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(otherwise if file is None else question(file))
            except (sqlite3.Error, ValueError) as error:  # ValueError: no JSON where there was some
                self.error = self._reason(error)
                answer.set_result(otherwise)

        with self._wake:
            if self._is_stopping or not self._thread.is_alive():
                return otherwise
            self._questions.append(reply)
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    def _serve(self) -> None:
        file: HistoryFile | None = None
        forget_at_s = write_at_s = time.monotonic()
        is_ending = False
        while not is_ending:
            questions, is_ending = self._wait(write_at_s)
            # Who asks gets what was put before, unless that would only fail again.
            if is_ending or time.monotonic() >= write_at_s or (questions and not self.error):
                file = self._write(file)
                write_at_s = time.monotonic() + WRITE_S
            for reply in questions:
                reply(file)
            if file is not None and time.monotonic() >= forget_at_s and self._forget(file):
                forget_at_s = time.monotonic() + FORGET_S
        if file is not None:
            file.close()

    def _wait(self, until_s: float) -> tuple[list[Callable[[HistoryFile | None], None]], bool]:
        """Returns with questions, at a time, or when asked to stop, and whether it was: then no question follows."""
        with self._wake:
            self._wake.wait_for(lambda: self._questions or self._is_stopping, max(0.0, until_s - time.monotonic()))
            questions = list(self._questions)
            self._questions.clear()
            return questions, self._is_stopping

    def _write(self, file: HistoryFile | None) -> HistoryFile | None:
        """Writes what is queued; what can't be written stays queued. Returns the file that can be read from now on."""
        with self._wake:
            queued = list(self._queued)
        if file is not None and not file.is_in_place:
            file.close()
            file = None
        try:
            if queued or file is None:
                file = file or HistoryFile(self._path)
                file.write(queued)
                self.error = ""
        except (OSError, sqlite3.Error, HistoryRefusedError) as error:
            self.error = self._reason(error)
            if file is not None and _code(error) not in _USABLE:
                file.close()
                file = None
            return file
        with self._wake:
            for written in queued:
                self._queued.popleft()
                self._queued_rows -= len(written)
        return file

    def _forget(self, file: HistoryFile) -> bool:
        """Applies the retention. Returns whether it is done."""
        try:
            for _ in file.forget(time.time() - self._retention_s):
                if self._is_stopping:
                    return False
        except sqlite3.Error as error:
            self.error = self._reason(error)
            return False
        return True

    def _reason(self, error: Exception) -> str:
        if isinstance(error, HistoryRefusedError):
            return str(error)
        if isinstance(error, OSError):
            return f'"{self._path}" can\'t be written ({error.strerror}): allow it, or name another with --store'
        cause = _CAUSES.get(_code(error), "can't be used: move it away, or name another with --store")
        return f'"{self._path}" {cause} ({error})'


def _code(error: Exception) -> int:
    """SQLite's primary code of an error, 0 for what is none of SQLite's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
