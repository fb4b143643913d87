"""Keeps reports over restarts. A thread of its own writes them, so that no disk delays the dashboard.

If the file cannot be used, the dashboard continues without history, shows why, and logs it once. The thread tries again
once a second, so history continues when the cause is gone: the disk has room again, a lock was released, or a damaged
file was moved away. Nothing in an existing file is renamed or deleted, except runs and steps older than the retention.
"""

import asyncio
import errno
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import TypeVar

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.threads import only_in
from backhaul_server.dashboard.history.schema import HistoryRefusedError
from backhaul_server.dashboard.history.selection import EventList, EventSelection, RunList, RunSelection
from backhaul_server.dashboard.history.sqlite import HistoryFile, Row, event_row, report_rows
from backhaul_server.dashboard.schemas.events import EventEntry
from backhaul_server.dashboard.schemas.runs import RunSeries

logger = logging.getLogger("backhaul.dashboard")

T = TypeVar("T")

WRITE_S = 1.0
"""Seconds between two transactions, and between two attempts while the file cannot be used."""
FORGET_S = 3600.0
QUEUED_ROWS = 20_000
"""The most rows in the queue: about 10 MB, or three minutes without a file at a hundred steps a second."""
STOP_S = 1.0

_DAY_S = 86_400.0
_ADVICE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or "),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or "),
}
"""What to do about an error of the operating system besides taking another file, by its number."""
_CAUSES = {
    sqlite3.SQLITE_BUSY: "is locked by another process",
    sqlite3.SQLITE_LOCKED: "is locked by another process",
    sqlite3.SQLITE_FULL: "cannot grow because the disk is full: free some space",
    sqlite3.SQLITE_READONLY: "cannot be written: change its permissions, or use another file with --store",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: change its permissions, or use another file with --store",
    sqlite3.SQLITE_IOERR: "cannot be read or written: check the disk",
    sqlite3.SQLITE_CORRUPT: "is damaged: move it away, or use another file with --store",
    sqlite3.SQLITE_NOTADB: "is damaged or no SQLite file: move it away, or use another file with --store",
}
_USABLE = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL}
"""SQLite errors after which the existing rows can still be read."""


class History:
    """The history of all trainers' runs and steps.

    Attributes:
        error: Why no history is kept; empty while it is kept. Any thread may read it.
        dropped_steps: Steps that were dropped because the queue was full while the file could not be used.
    """

    def __init__(self, path: str, retention_days: float) -> None:
        """Creates a history for a file, which `start` creates if it is missing, or for ":memory:"."""
        self.error = ""
        self.dropped_steps = 0
        self._path = path
        self._retention_s = retention_days * _DAY_S
        self._queued: deque[Row] = deque()
        self._questions: deque[Callable[[HistoryFile | None], None]] = deque()
        self._wake = threading.Condition()  # guards the queues; notified for a question and for the stop
        self._is_stopping = False
        self._began_s, self._began_at_s = time.monotonic(), time.time()
        self._thread = threading.Thread(target=self._serve, name="backhaul-history", daemon=True)

    def trouble(self) -> str:
        """Returns why the file cannot be written now; empty if it can be. Call before `start`."""
        try:
            HistoryFile(self._path).close()
        except (OSError, sqlite3.Error, HistoryRefusedError) as error:
            return self._reason(error)
        return ""

    def start(self) -> None:
        """Starts the thread. It also writes what was put before."""
        self._thread.start()

    def stop(self) -> None:
        """Writes everything that was put, and ends the thread. Waits for at most a second."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(STOP_S)

    def put(self, report: telemetry_pb2.TrainerReport, shift_s: float = 0.0) -> None:
        """Queues a report, which is written within a second and before the next answer. Never blocks.

        Drops it if the queue is full. A report may be put twice.

        Args:
            report: The report of a trainer, sanitized.
            shift_s: Seconds to add to times of the trainer's clock for the dashboard's.
        """
        if not self._enqueue(report_rows(report, time.time(), shift_s)):
            self.dropped_steps += len(report.steps)

    def put_event(self, event: EventEntry) -> None:
        """Queues an event, as `put` does a report. An event with a known id is not stored again."""
        self._enqueue([event_row(event)])

    def _enqueue(self, rows: list[Row]) -> bool:
        with self._wake:
            has_room = len(self._queued) + len(rows) <= QUEUED_ROWS
            if has_room:
                self._queued.extend(rows)
            return has_room

    async def runs(self, wanted: RunSelection, current: Sequence[str] = ()) -> RunList:
        """Returns a page of the stored runs; none while there is no history.

        Args:
            wanted: The runs to return.
            current: Ids of runs of which the answer says whether they are stored.
        """
        return await self._ask(lambda file: file.runs(wanted, current, time.time()), RunList([], 0, set()))

    async def events(self, wanted: EventSelection) -> EventList | None:
        """Returns a page of the stored events; None while there is no history."""
        return await self._ask(lambda file: file.events(wanted), None)

    async def series(self, run: str, points: int, since_s: float = -inf, until_s: float = inf) -> RunSeries | None:
        """Returns the steps of a run that began in a range in at most `points` points; None for an unknown run."""
        return await self._ask(lambda file: file.series(run, points, since_s, until_s, lambda: self._is_stopping), None)

    async def _ask(self, question: Callable[[HistoryFile], T], otherwise: T) -> T:
        """Lets the thread answer a question. Returns `otherwise` if there is no file or it cannot be read."""
        answer: Future[T] = Future()

        def reply(file: HistoryFile | None) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(otherwise if file is None else question(file))
            except (
                sqlite3.Error,
                ValueError,
                TypeError,
            ) as error:  # the last two: a field holds another type or no JSON
                self._note(self._reason(error))
                answer.set_result(otherwise)

        with self._wake:
            if self._is_stopping or not self._thread.is_alive():
                return otherwise
            self._questions.append(reply)
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    @only_in("backhaul-history")
    def _serve(self) -> None:
        file: HistoryFile | None = None
        forget_at_s = write_at_s = time.monotonic()
        is_ending = False
        while not is_ending:
            questions, is_ending = self._wait(write_at_s)
            # Reports that were put before a question are written first, unless writing would only fail again.
            if is_ending or time.monotonic() >= write_at_s or (questions and not self.error):
                file = self._write(file)
                write_at_s = time.monotonic() + WRITE_S
            for reply in questions:
                reply(file)
            if file is not None and time.monotonic() >= forget_at_s and self._forget(file):
                forget_at_s = time.monotonic() + FORGET_S
        if file is not None:
            file.close()

    @only_in("backhaul-history")
    def _wait(self, until_s: float) -> tuple[list[Callable[[HistoryFile | None], None]], bool]:
        """Waits for questions, until a time or `stop`. Returns the questions, and whether to stop after them."""
        with self._wake:
            self._wake.wait_for(lambda: self._questions or self._is_stopping, max(0.0, until_s - time.monotonic()))
            questions = list(self._questions)
            self._questions.clear()
            return questions, self._is_stopping

    @only_in("backhaul-history")
    def _write(self, file: HistoryFile | None) -> HistoryFile | None:
        """Writes the queued rows; rows that cannot be written stay queued. Returns the file if it can be read now."""
        with self._wake:
            queued = list(self._queued)
        if file is not None and not file.is_in_place:
            file.close()
            file = None
        try:
            if queued or file is None:
                file = file or HistoryFile(self._path)
                file.write(queued)
                self._note("")
        except (OSError, sqlite3.Error, HistoryRefusedError) as error:
            self._note(self._reason(error))
            if file is not None and _code(error) not in _USABLE:
                file.close()
                file = None
            return file
        with self._wake:
            for _ in queued:
                self._queued.popleft()
        return file

    @only_in("backhaul-history")
    def _forget(self, file: HistoryFile) -> bool:
        """Applies the retention. Returns whether everything was applied.

        A clock that jumps ahead must not make the whole history look old, so it counts at most as much time as has
        passed since this process began.
        """
        now_s = min(time.time(), self._began_at_s + time.monotonic() - self._began_s)
        try:
            for _ in file.forget(now_s - self._retention_s):
                if self._is_stopping:
                    return False
        except sqlite3.Error as error:
            self._note(self._reason(error))
            return False
        return True

    @only_in("backhaul-history")
    def _note(self, error: str) -> None:
        """Sets `error`, and logs a line when the history stops, when it continues, and when the reason changes."""
        if error and error != self.error:
            logger.warning("The history of runs is not kept: %s", error)
        elif self.error and not error:
            logger.info("The history of runs is kept again in %s.", self._path)
        self.error = error

    def _reason(self, error: Exception) -> str:
        if isinstance(error, HistoryRefusedError):
            return str(error)
        if isinstance(error, OSError):
            advice = _ADVICE.get(error.errno or 0, "")
            return f'"{self._path}" cannot be written ({error.strerror}): {advice}use another file with --store'
        cause = _CAUSES.get(_code(error), "cannot be used: move it away, or use another file with --store")
        return f'"{self._path}" {cause} ({error})'


def _code(error: Exception) -> int:
    """Returns the primary SQLite code of an error, 0 for any other error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
