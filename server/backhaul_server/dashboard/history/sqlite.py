"""The SQLite file in which runs and steps outlive the dashboard.

Several dashboards may write the same file: a run is identified by its id, a step by its number in the run, and rows
that exist are left as they are. A trigger updates the sums of a run in the transaction that adds its steps.
"""

import errno
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.history.archive import RunRecord
from backhaul_server.dashboard.history.options import MEMORY

SCHEMA = 1
BUSY_S = 0.3
"""The longest time for which another process may lock the file. It fits into the second that stopping may take."""
FORGOTTEN_AT_ONCE = 10_000
RECENT_STEPS = 50
SILENT_S = 30.0

_APPLICATION = 0x4248_4C31  # "BHL1": identifies the owner of the file
_MOST = 2**53 - 1  # larger numbers are not exact in JSON
_TABLES = (
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        trainer TEXT NOT NULL,
        client_version TEXT NOT NULL,
        workers TEXT NOT NULL,
        settings TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        started_at_s REAL NOT NULL,
        heard_at_s REAL NOT NULL,
        is_closed INTEGER NOT NULL,
        steps INTEGER NOT NULL DEFAULT 0,
        last_step INTEGER NOT NULL DEFAULT 0,
        last_loss REAL,
        peak_bytes INTEGER NOT NULL DEFAULT 0,
        up_bytes INTEGER NOT NULL DEFAULT 0,
        down_bytes INTEGER NOT NULL DEFAULT 0,
        fallbacks INTEGER NOT NULL DEFAULT 0
    )
    """,
    "CREATE INDEX runs_by_start ON runs (started_at_s)",
    """
    CREATE TABLE steps (
        run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        started_at_s REAL NOT NULL,
        duration_s REAL NOT NULL,
        loss REAL,
        peak_bytes INTEGER NOT NULL,
        up_bytes INTEGER NOT NULL,
        down_bytes INTEGER NOT NULL,
        fallbacks INTEGER NOT NULL,
        PRIMARY KEY (run, number)
    ) WITHOUT ROWID
    """,
    """
    CREATE TRIGGER sums AFTER INSERT ON steps BEGIN
        UPDATE runs SET
            steps = steps + 1,
            last_loss = CASE WHEN new.number >= last_step THEN coalesce(new.loss, last_loss) ELSE last_loss END,
            last_step = max(last_step, new.number),
            heard_at_s = max(heard_at_s, new.started_at_s + new.duration_s),
            peak_bytes = max(peak_bytes, new.peak_bytes),
            up_bytes = up_bytes + new.up_bytes,
            down_bytes = down_bytes + new.down_bytes,
            fallbacks = fallbacks + new.fallbacks
        WHERE id = new.run;
    END
    """,
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
_ADD_RUN = """
INSERT INTO runs (name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, is_closed)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8)
ON CONFLICT (name) DO UPDATE SET
    workers = excluded.workers,
    settings = excluded.settings,
    fingerprint = excluded.fingerprint,
    is_closed = max(is_closed, excluded.is_closed)
"""
_ADD_STEP = """
INSERT OR IGNORE INTO steps
SELECT id, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9 FROM runs WHERE name = ?1
"""
_RUNS = """
SELECT id, name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, is_closed,
    steps, last_step, last_loss, peak_bytes, up_bytes, down_bytes, fallbacks
FROM runs ORDER BY started_at_s DESC, id DESC LIMIT ?
"""
_FORGET_STEPS = """
DELETE FROM steps WHERE run = ?1 AND started_at_s < ?2
AND number IN (SELECT number FROM steps WHERE run = ?1 ORDER BY number LIMIT ?3)
"""

Value = str | float | int | None


class HistoryRefusedError(Exception):
    """The file holds something else, or a newer version wrote it. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ReportRows:
    """The rows to keep of a report: one for the run, and one for each step."""

    run: tuple[Value, ...]
    steps: tuple[tuple[Value, ...], ...]

    def __len__(self) -> int:
        return 1 + len(self.steps)


def report_rows(report: telemetry_pb2.TrainerReport, now_s: float) -> ReportRows:
    """Returns the rows of a report. A trainer's clock may be wrong, so no time in them is later than `now_s`."""
    run = report.run
    name = run.id
    return ReportRows(
        (
            name,
            run.trainer,
            run.client_version,
            json.dumps(list(run.workers)),
            json.dumps(dict(run.settings), sort_keys=True),
            json.dumps(dict(run.fingerprint), sort_keys=True),
            _seconds(run.started_at_s, now_s),
            run.is_closed,
        ),
        tuple(
            (
                name,
                min(step.number, _MOST),
                _seconds(step.started_at_s, now_s - _seconds(step.duration_s, now_s)),
                _seconds(step.duration_s, now_s),
                step.loss if step.HasField("loss") and isfinite(step.loss) else None,
                min(step.peak_bytes, _MOST),
                min(step.up_bytes, _MOST),
                min(step.down_bytes, _MOST),
                step.fallbacks,
            )
            for step in report.steps
        ),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """Consecutive steps: the number of the last one, the medians of duration and loss, and the largest bytes."""

    step: int
    step_ms: float
    peak_bytes: int
    moved_bytes: int
    loss: float | None


class HistoryFile:
    """An open history file, used by one thread. Every method may raise sqlite3.Error, for example for a full disk."""

    def __init__(self, path: str) -> None:
        """Opens the file; creates it and its directory if missing.

        Raises OSError, sqlite3.Error or HistoryRefusedError.
        """
        self._path = path
        if path != MEMORY:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite alone would make a new file readable for everyone. An existing file must not be opened here:
            # closing it would drop the locks that this process holds.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            # SQLite would create a log beside a read-only file, also read-only, which would later prevent writing.
            if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            self._prepare()
            self._file = self._identity()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect only before the first table exists
        with self._transaction():  # two dashboards may start at the same time
            (tables,) = run("SELECT count(*) FROM sqlite_schema").fetchone()
            (application,) = run("PRAGMA application_id").fetchone()
            (version,) = run("PRAGMA user_version").fetchone()
            if tables and application != _APPLICATION:
                raise HistoryRefusedError(
                    f'"{self._path}" is the database of another program: use another file with --store'
                )
            if version > SCHEMA:
                raise HistoryRefusedError(
                    f'"{self._path}" was written by a newer Backhaul (schema {version}, this one knows {SCHEMA}): '
                    "upgrade, or use another file with --store"
                )
            if not tables:
                for statement in _TABLES:
                    run(statement)
        # The mode is stored in the file, so it is set only once the file is known to be ours.
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")  # a power failure may lose the last steps, but never the file

    def close(self) -> None:
        """Closes the file. The last process to close it merges the write-ahead log into the file."""
        with suppress(sqlite3.Error):  # everything that could be written has been
            self._connection.close()

    @property
    def is_in_place(self) -> bool:
        """Returns whether the path still leads to the open file, which may have been moved away."""
        return self._file == self._identity()

    def _identity(self) -> tuple[int, int] | None:
        if self._path == MEMORY:
            return None
        try:
            status = Path(self._path).stat()
        except OSError:
            return (0, 0)
        return status.st_dev, status.st_ino

    def write(self, reports: Iterable[ReportRows]) -> None:
        """Adds the new rows of reports in one transaction."""
        kept = list(reports)
        with self._transaction():
            self._connection.executemany(_ADD_RUN, [report.run for report in kept])
            self._connection.executemany(_ADD_STEP, [step for report in kept for step in report.steps])

    def forget(self, before_s: float) -> Iterator[None]:
        """Deletes steps before a time, and runs without activity since then. Yields after each transaction."""
        runs = self._connection.execute("SELECT id, heard_at_s FROM runs").fetchall()
        for run, heard_at_s in runs:
            is_over = heard_at_s < before_s
            deleted = FORGOTTEN_AT_ONCE
            while deleted == FORGOTTEN_AT_ONCE:
                bounds = (run, float("inf") if is_over else before_s, FORGOTTEN_AT_ONCE)
                with self._transaction():
                    deleted = self._connection.execute(_FORGET_STEPS, bounds).rowcount
                yield
            if is_over:
                self._connection.execute("DELETE FROM runs WHERE id = ? AND heard_at_s < ?", (run, before_s))
        self._connection.execute(f"PRAGMA incremental_vacuum({FORGOTTEN_AT_ONCE})").fetchall()

    def runs(self, limit: int, now_s: float) -> list[RunRecord]:
        """Returns the last runs, newest first."""
        return [self._run(row, now_s) for row in self._connection.execute(_RUNS, (limit,)).fetchall()]

    def _run(self, row: tuple[Any, ...], now_s: float) -> RunRecord:
        identity, name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, *rest = row
        is_closed, steps, last_step, last_loss, peak_bytes, up_bytes, down_bytes, fallbacks = rest
        durations = self._connection.execute(
            "SELECT duration_s FROM steps WHERE run = ? ORDER BY number DESC LIMIT ?", (identity, RECENT_STEPS)
        ).fetchall()
        return RunRecord(
            run=name,
            trainer=trainer,
            client_version=client_version,
            workers=json.loads(workers),
            started_at_s=started_at_s,
            heard_at_s=heard_at_s,
            state="ended" if is_closed else "silent" if heard_at_s < now_s - SILENT_S else "running",
            settings=json.loads(settings),
            fingerprint=json.loads(fingerprint),
            steps=steps,
            last_step=last_step,
            last_loss=last_loss,
            median_step_ms=1e3 * median(value for (value,) in durations) if durations else None,
            peak_bytes=peak_bytes,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            fallbacks=fallbacks,
        )

    def series(self, run: str, points: int) -> Iterator[Point] | None:
        """Returns the steps of a run in at most `points` points, oldest first; None for an unknown run.

        All points cover equally many step numbers, and each is read by a query of its own, so that no query takes long
        however many steps a run has.
        """
        row = self._connection.execute(
            "SELECT id, min(number), max(number) FROM runs LEFT JOIN steps ON run = id WHERE name = ? GROUP BY id",
            (run,),
        ).fetchone()
        if row is None:
            return None
        identity, first, last = row
        return iter(()) if first is None else self._points(identity, first, -(-(last - first + 1) // points))

    def _points(self, identity: int, first: int, width: int) -> Iterator[Point]:
        begin: int | None = first
        while begin is not None:
            rows = self._connection.execute(
                "SELECT number, duration_s, loss, peak_bytes, up_bytes + down_bytes FROM steps "
                "WHERE run = ? AND number >= ? AND number < ?",
                (identity, begin, begin + width),
            ).fetchall()
            if rows:  # without rows, the steps were deleted meanwhile
                yield _point(rows)
            # If steps are missing, the next point starts at the next step that exists.
            (following,) = self._connection.execute(
                "SELECT min(number) FROM steps WHERE run = ? AND number >= ?", (identity, begin + width)
            ).fetchone()
            begin = None if following is None else begin + (following - begin) // width * width

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # some errors have rolled back already
                self._connection.execute("ROLLBACK")
            raise


def _point(rows: Sequence[tuple[int, float, float | None, int, int]]) -> Point:
    numbers, durations, losses, peaks, moved = zip(*rows, strict=True)
    told_losses = [loss for loss in losses if loss is not None]
    return Point(
        numbers[-1], 1e3 * median(durations), max(peaks), max(moved), median(told_losses) if told_losses else None
    )


def _seconds(value: float, most_s: float) -> float:
    """Returns a time or duration that is finite, and between 0 and `most_s`."""
    return min(max(value, 0.0), most_s) if isfinite(value) else 0.0
