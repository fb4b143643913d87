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
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.event_log import WORDS, LogEvent
from backhaul_server.dashboard.history.archive import (
    EventList,
    EventSelection,
    RunList,
    RunRecord,
    RunSelection,
    matches,
)
from backhaul_server.dashboard.history.retention import MEMORY
from backhaul_server.dashboard.history.schema import prepare

BUSY_S = 0.3
"""The longest time for which another process may lock the file. It fits into the second that stopping may take."""
FORGOTTEN_AT_ONCE = 10_000
RECENT_STEPS = 50
SILENT_S = 30.0

_MOST = 2**53 - 1  # larger numbers are not exact in JSON
_ADD_RUN = """
INSERT INTO runs (
    name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, is_closed, label, tags,
    notes, rank, world_size
)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, ?10, ?11, ?12, ?13)
ON CONFLICT (name) DO UPDATE SET
    workers = excluded.workers,
    settings = excluded.settings,
    fingerprint = excluded.fingerprint,
    is_closed = max(is_closed, excluded.is_closed),
    label = excluded.label,
    tags = excluded.tags,
    notes = excluded.notes,
    rank = excluded.rank,
    world_size = excluded.world_size
"""
_ADD_STEP = """
INSERT OR IGNORE INTO steps (
    run, number, started_at_s, duration_s, loss, peak_bytes, up_bytes, down_bytes, fallbacks, saved_bytes, wait_s,
    overhead_s, spared_s, remote, spared_bytes
)
SELECT id, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15 FROM runs WHERE name = ?1
"""
_ADD_EVENT = (
    "INSERT OR IGNORE INTO events (id, at_s, kind, run, worker, segment, text, count) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_SUMS = (
    "steps",
    "last_step",
    "last_loss",
    "peak_bytes",
    "up_bytes",
    "down_bytes",
    "fallbacks",
    "saved_bytes",
    "wait_s",
    "overhead_s",
    "spared_s",
    "remote",
    "spared_bytes",
)
"""The columns of a run that the trigger updates. The fields of RunRecord have the same names."""
_COLUMNS_OF_RUN = f"""
    id, name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, is_closed, label, tags,
    notes, rank, world_size, {", ".join(_SUMS)}
"""
_WANTED_RUNS = """
FROM runs WHERE (?1 = '' OR matches(?1, name, label, trainer, tags)) AND (?2 = '' OR has_tag(?2, tags))
AND (?3 = '' OR name = ?3)
"""
_RUNS = f"""
SELECT {_COLUMNS_OF_RUN} {_WANTED_RUNS} AND (started_at_s, name) < (?4, ?5)
ORDER BY started_at_s DESC, name DESC LIMIT ?6
"""
_NAME_OF_RUN = "(SELECT label || ' rank ' || rank FROM runs WHERE name = run)"
_HAS_TEXT = f"matches(?, text, words(kind), worker, segment, run, coalesce({_NAME_OF_RUN}, ''))"
_EVENTS = "SELECT id, at_s, kind, run, worker, segment, text, count"
_FORGET_EVENTS = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at_s < ? ORDER BY at_s LIMIT ?)"
_FORGET_STEPS = """
DELETE FROM steps WHERE run = ?1 AND started_at_s < ?2
AND number IN (SELECT number FROM steps WHERE run = ?1 ORDER BY number LIMIT ?3)
"""

Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class ReportRows:
    """The rows to keep of a report: one for the run, and one for each step."""

    run: tuple[Value, ...]
    steps: tuple[tuple[Value, ...], ...]

    def __len__(self) -> int:
        return 1 + len(self.steps)


@dataclass(frozen=True, slots=True)
class EventRow:
    """The row of an event."""

    values: tuple[Value, ...]

    def __len__(self) -> int:
        return 1


def event_row(event: LogEvent) -> EventRow:
    """Returns the row of an event."""
    return EventRow(
        (
            event.id,
            event.at_s,
            event.kind,
            event.run,
            event.worker,
            event.segment,
            event.text,
            event.count,
        )
    )


def report_rows(report: telemetry_pb2.TrainerReport, now_s: float, shift_s: float = 0.0) -> ReportRows:
    """Returns the rows of a report. A trainer's clock may be wrong, so no time in them is later than `now_s`.

    Args:
        report: The report of a trainer, sanitized.
        now_s: The time of this process's clock, in seconds since 1970.
        shift_s: Seconds to add to times of the trainer's clock for this process's.
    """
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
            _seconds(run.started_at_s + shift_s, now_s),
            run.is_closed,
            run.name,
            json.dumps(list(run.tags)),
            run.notes,
            run.rank,
            run.world_size,
        ),
        tuple(
            (
                name,
                min(step.number, _MOST),
                _seconds(step.started_at_s + shift_s, now_s - _seconds(step.duration_s, now_s)),
                _seconds(step.duration_s, now_s),
                step.loss if step.HasField("loss") and isfinite(step.loss) else None,
                min(step.peak_bytes, _MOST),
                min(step.up_bytes, _MOST),
                min(step.down_bytes, _MOST),
                step.fallbacks,
                min(max(step.saved_bytes, step.peak_saved_bytes), _MOST),
                _seconds(step.wait_s, now_s),
                _seconds(step.overhead_s, now_s),
                _seconds(step.spared_s, now_s),
                step.gradients + step.activations,
                min(step.spared_bytes, _MOST),
            )
            for step in report.steps
        ),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """Consecutive steps: number and end of the last one, the medians of duration and loss, and the largest bytes."""

    step: int
    step_ms: float
    peak_bytes: int
    moved_bytes: int
    loss: float | None
    ended_at_s: float


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
        self._connection.create_function("matches", -1, matches, deterministic=True)
        self._connection.create_function("has_tag", 2, _has_tag, deterministic=True)
        self._connection.create_function("words", 1, lambda kind: WORDS.get(kind, ""), deterministic=True)
        try:
            self._prepare()
            self._file = self._identity()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA foreign_keys = ON")
        (tables,) = run("SELECT count(*) FROM sqlite_schema").fetchone()
        if not tables:  # it takes effect only before the first table exists, and would write to a file that is refused
            run("PRAGMA auto_vacuum = INCREMENTAL")
        with self._transaction():  # two dashboards may start at the same time
            prepare(self._connection, self._path)
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

    def write(self, rows: Iterable[ReportRows | EventRow]) -> None:
        """Adds the new rows of reports and events in one transaction."""
        kept = list(rows)
        reports = [row for row in kept if isinstance(row, ReportRows)]
        with self._transaction():
            self._connection.executemany(_ADD_RUN, [report.run for report in reports])
            self._connection.executemany(_ADD_STEP, [step for report in reports for step in report.steps])
            self._connection.executemany(_ADD_EVENT, [row.values for row in kept if isinstance(row, EventRow)])

    def forget(self, before_s: float) -> Iterator[None]:
        """Deletes steps, events and runs that are older than a time. Yields after each transaction."""
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
        deleted = FORGOTTEN_AT_ONCE
        while deleted == FORGOTTEN_AT_ONCE:
            deleted = self._connection.execute(_FORGET_EVENTS, (before_s, FORGOTTEN_AT_ONCE)).rowcount
            yield
        self._connection.execute(f"PRAGMA incremental_vacuum({FORGOTTEN_AT_ONCE})").fetchall()

    def runs(self, wanted: RunSelection, current: Sequence[str], now_s: float) -> RunList:
        """Returns a page of the wanted runs, and which of the current ones are stored. See `Archive.runs`."""
        run = self._connection.execute
        filters = (wanted.query.casefold(), wanted.tag, wanted.id)
        rows = run(_RUNS, (*filters, *wanted.before, wanted.limit)).fetchall()
        (total,) = run(f"SELECT count(*) {_WANTED_RUNS}", filters).fetchone()
        stored = {name for name in current if run("SELECT 1 FROM runs WHERE name = ?", (name,)).fetchone()}
        return RunList([self._run(row, now_s) for row in rows], total, stored)

    def events(self, wanted: EventSelection) -> EventList:
        """Returns a page of the wanted events, without those of kinds that only a newer version knows."""
        # The kinds are a condition of the query, because a page must have as many events as were asked for: a shorter
        # one is the last.
        values: list[Value] = [wanted.since_s, wanted.until_s, *wanted.kinds]
        conditions = ["at_s BETWEEN ? AND ?"]
        conditions.append(f"kind IN ({_marks(len(wanted.kinds))})")
        if wanted.runs:
            conditions.append(f"run IN ('', {_marks(len(wanted.runs))})")
            values += wanted.runs
        if wanted.text:
            conditions.append(_HAS_TEXT)
            values.append(wanted.text.casefold())
        chosen = f"FROM events WHERE {' AND '.join(conditions)}"
        rows = self._connection.execute(
            f"{_EVENTS} {chosen} AND (at_s, id) < (?, ?) ORDER BY at_s DESC, id DESC LIMIT ?",
            (*values, *wanted.before, wanted.limit),
        ).fetchall()
        (total,) = self._connection.execute(f"SELECT count(*) {chosen}", values).fetchone()
        return EventList([LogEvent(*row) for row in rows], total)

    def _run(self, row: tuple[Any, ...], now_s: float) -> RunRecord:
        identity, name, trainer, client_version, workers, settings, fingerprint, started_at_s, heard_at_s, *rest = row
        is_closed, label, tags, notes, rank, world_size, *sums = rest
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
            median_step_ms=1e3 * median(value for (value,) in durations) if durations else None,
            name=label,
            tags=json.loads(tags),
            notes=notes,
            rank=rank,
            world_size=world_size,
            **dict(zip(_SUMS, sums, strict=True)),
        )

    def series(self, run: str, points: int, since_s: float = -inf, until_s: float = inf) -> Iterator[Point] | None:
        """Returns the steps of a run that began in a range, in at most `points` points, oldest first.

        All points cover equally many step numbers, and each is read by a query of its own, so that no query takes long
        however many steps a run has. Returns None for an unknown run.
        """
        row = self._connection.execute(
            "SELECT id, min(number), max(number) FROM runs LEFT JOIN steps ON run = id WHERE name = ? GROUP BY id",
            (run,),
        ).fetchone()
        if row is None:
            return None
        identity, first, last = row
        if first is None:
            return iter(())
        end = last + 1 if until_s == inf else self._first_after(identity, first, last, until_s)
        if since_s > -inf:
            first = self._first_after(identity, first, last, since_s)
        return iter(()) if first >= end else self._points(identity, first, end, -(-(end - first) // points))

    def _first_after(self, identity: int, first: int, last: int, at_s: float) -> int:
        """Returns the number of the first step that began after a time, or `last` + 1. Steps begin in their order."""
        low, high = first, last + 1
        while low < high:
            middle = (low + high) // 2
            (began_at_s,) = self._connection.execute(
                "SELECT started_at_s FROM steps WHERE run = ? AND number >= ? ORDER BY number LIMIT 1",
                (identity, middle),
            ).fetchone() or (inf,)
            if began_at_s > at_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _points(self, identity: int, first: int, end: int, width: int) -> Iterator[Point]:
        begin: int | None = first
        while begin is not None and begin < end:
            rows = self._connection.execute(
                "SELECT number, duration_s, loss, peak_bytes, up_bytes + down_bytes, started_at_s + duration_s "
                "FROM steps WHERE run = ? AND number >= ? AND number < ?",
                (identity, begin, min(end, begin + width)),
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


def _point(rows: Sequence[tuple[int, float, float | None, int, int, float]]) -> Point:
    numbers, durations, losses, peaks, moved, ends_s = zip(*rows, strict=True)
    told_losses = [loss for loss in losses if loss is not None]
    loss = median(told_losses) if told_losses else None
    return Point(numbers[-1], 1e3 * median(durations), max(peaks), max(moved), loss, ends_s[-1])


def _marks(count: int) -> str:
    """Returns the marks of as many values in a query."""
    return ", ".join("?" * count)


def _has_tag(tag: str, tags: str) -> bool:
    return tag in json.loads(tags)


def _seconds(value: float, most_s: float) -> float:
    """Returns a time or duration that is finite, and between 0 and `most_s`."""
    return min(max(value, 0.0), most_s) if isfinite(value) else 0.0
