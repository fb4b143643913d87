"""The SQLite file in which runs and steps outlive the dashboard.

Several dashboards may write the same file: a run is identified by its id, a step by its number in the run, and rows
that exist are left as they are. A trigger updates the sums of a run in the transaction that adds its steps.
"""

import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, takewhile
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.step_points import StepRow, series_of
from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.collect.training_runs import state_of
from backhaul_server.dashboard.collect.verdict import verdict
from backhaul_server.dashboard.history.retention import MEMORY
from backhaul_server.dashboard.history.schema import EVENT, RUN, STEP, SUMS, prepare
from backhaul_server.dashboard.history.selection import EventList, EventSelection, RunList, RunSelection, matches
from backhaul_server.dashboard.schemas.events import WORDS, EventEntry
from backhaul_server.dashboard.schemas.network import run_id
from backhaul_server.dashboard.schemas.runs import RunSeries, RunSummary

BUSY_S = 0.3
"""The longest time for which another process may lock the file. It fits into the second that stopping may take."""
FORGOTTEN_AT_ONCE = 10_000
RECENT_STEPS = 50
JSON = ("workers", "settings", "fingerprint", "tags")
"""Columns of runs that hold JSON."""


def _insert(table: str, columns: Iterable[str]) -> str:
    names = list(columns)
    return f"INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"


_ADD_RUN = f"""
INSERT {_insert("runs", RUN)} ON CONFLICT (name) DO UPDATE SET is_closed = max(is_closed, excluded.is_closed),
{", ".join(f"{name} = excluded.{name}" for name in (*JSON, "label", "notes", "rank", "world_size"))}
"""
_ADD_STEP = f"""
INSERT OR IGNORE INTO steps (run, loss, {", ".join(STEP)})
SELECT id, :loss, {", ".join(f":{name}" for name in STEP)} FROM runs WHERE name = :run
"""
_ADD_EVENT = f"INSERT OR IGNORE {_insert('events', EVENT)}"
_WANTED_RUNS = """
FROM runs WHERE (?1 = '' OR matches(?1, name, label, trainer, tags)) AND (?2 = '' OR has_tag(?2, tags))
AND (?3 = '' OR name = ?3)
"""
_RUNS = f"""
SELECT * {_WANTED_RUNS} AND (started_at_s, name) < (?4, ?5)
ORDER BY started_at_s DESC, name DESC LIMIT ?6
"""
_NAME_OF_RUN = "(SELECT label || ' rank ' || rank FROM runs WHERE name = run)"
_HAS_TEXT = f"matches(?, text, words(kind), worker, segment, run, coalesce({_NAME_OF_RUN}, ''))"
_FORGET_EVENTS = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at_s < ? ORDER BY at_s LIMIT ?)"
_FORGET_STEPS = """
DELETE FROM steps WHERE run = ?1 AND started_at_s < ?2
AND number IN (SELECT number FROM steps WHERE run = ?1 ORDER BY number LIMIT ?3)
"""

Value = str | float | int | None
Row = tuple[str, Mapping[str, Value]]
"""A statement that adds a row, with its values by their names in the statement."""


def event_row(event: EventEntry) -> Row:
    """Returns the row of an event."""
    return _ADD_EVENT, event.model_dump(include=set(EVENT))


def report_rows(report: telemetry_pb2.TrainerReport, now_s: float, shift_s: float = 0.0) -> list[Row]:
    """Returns the row of a report's run, then those of its steps.

    A trainer's clock may be wrong, so no time in them is later than `now_s`.

    Args:
        report: The report of a trainer, sanitized.
        now_s: The time of this process's clock, in seconds since 1970.
        shift_s: Seconds to add to times of the trainer's clock for this process's.
    """
    run = report.run
    started_at_s = min(max(0.0, run.started_at_s + shift_s), now_s)
    about: dict[str, Value] = {name: getattr(run, name) for name in RUN if hasattr(run, name)}
    about |= {"name": run.id, "label": run.name, "started_at_s": started_at_s, "heard_at_s": started_at_s}
    for name in JSON:
        value = getattr(run, name)
        about[name] = json.dumps(dict(sorted(value.items())) if isinstance(value, Mapping) else list(value))
    return [(_ADD_RUN, about), *((_ADD_STEP, _of_step(run.id, step, now_s, shift_s)) for step in report.steps)]


def _of_step(run: str, step: telemetry_pb2.Step, now_s: float, shift_s: float) -> dict[str, Value]:
    duration_s = min(step.duration_s, now_s)
    values: dict[str, Value] = {name: getattr(step, name) for name in STEP if hasattr(step, name)}
    return values | {
        "run": run,
        "started_at_s": min(max(0.0, step.started_at_s + shift_s), now_s - duration_s),
        "duration_s": duration_s,
        "loss": step.loss if step.HasField("loss") else None,
        "saved_bytes": max(step.saved_bytes, step.peak_saved_bytes),
        "remote": step.gradients + step.activations,
    }


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
        self._connection.row_factory = sqlite3.Row
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
        execute = self._connection.execute
        execute("PRAGMA foreign_keys = ON")
        (tables,) = execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if not tables:  # it takes effect only before the first table exists, and would write to a file that is refused
            execute("PRAGMA auto_vacuum = INCREMENTAL")
        with self._transaction():  # two dashboards may start at the same time
            prepare(self._connection, self._path)
        # The mode is stored in the file, so it is set only once the file is known to be ours.
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")  # a power failure may lose the last steps, but never the file

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

    def write(self, rows: Iterable[Row]) -> None:
        """Adds the new rows of reports and events in one transaction, in their order."""
        with self._transaction():
            for statement, group in groupby(rows, key=itemgetter(0)):
                self._connection.executemany(statement, map(itemgetter(1), group))

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
        execute = self._connection.execute
        filters = (wanted.query.casefold(), wanted.tag, wanted.id)
        rows = execute(_RUNS, (*filters, *wanted.before, wanted.limit)).fetchall()
        (total,) = execute(f"SELECT count(*) {_WANTED_RUNS}", filters).fetchone()
        stored = {name for name in current if execute("SELECT 1 FROM runs WHERE name = ?", (name,)).fetchone()}
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
            f"SELECT {', '.join(EVENT)} {chosen} AND (at_s, id) < (?, ?) ORDER BY at_s DESC, id DESC LIMIT ?",
            (*values, *wanted.before, wanted.limit),
        ).fetchall()
        (total,) = self._connection.execute(f"SELECT count(*) {chosen}", values).fetchone()
        return EventList([EventEntry(**dict(row)) for row in rows], total)

    def _run(self, row: sqlite3.Row, now_s: float) -> RunSummary:
        """Returns a stored run. Raises ValueError or TypeError for values of other types, as of another program."""
        stored = dict(row)
        durations = self._connection.execute(
            "SELECT duration_s FROM steps WHERE run = ? ORDER BY number DESC LIMIT ?", (stored["id"], RECENT_STEPS)
        ).fetchall()
        sums = {name: stored[name] for name in (*SUMS, "steps") if name in Totals._fields}
        about: dict[str, Any] = {
            **stored,
            **{name: json.loads(stored[name]) for name in JSON},
            "id": run_id(stored["name"]),
            "run": stored["name"],
            "name": stored["label"],
            "state": state_of(bool(stored["is_closed"]), now_s - stored["heard_at_s"]),
            "median_step_ms": 1e3 * median(value for (value,) in durations) if durations else None,
            "verdict": verdict(Totals(**sums, gradients=stored["remote"]), stored["peak_bytes"], stored["saved_bytes"]),
        }
        return RunSummary.model_validate(about)

    def series(
        self,
        run: str,
        points: int,
        since_s: float = -inf,
        until_s: float = inf,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> RunSeries | None:
        """Returns the steps of a run that began in a range, in at most `points` points; None for an unknown run.

        All points cover equally many step numbers, and each is read by a query of its own, so that no query takes long
        however many steps a run has. There are no further points once `is_stopping` returns True.
        """
        row = self._connection.execute(
            "SELECT id, min(number), max(number) FROM runs LEFT JOIN steps ON run = id WHERE name = ? GROUP BY id",
            (run,),
        ).fetchone()
        if row is None:
            return None
        identity, first, last = row
        if first is None:
            return series_of(run, ())
        end = last + 1 if until_s == inf else self._first_after(identity, first, last, until_s)
        if since_s > -inf:
            first = self._first_after(identity, first, last, since_s)
        groups = self._points(identity, first, end, max(1, -(-(end - first) // points)))
        return series_of(run, takewhile(lambda _: not is_stopping(), groups))

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

    def _points(self, identity: int, first: int, end: int, width: int) -> Iterator[list[StepRow]]:
        """Yields the rows of the steps of each point."""
        begin: int | None = first
        while begin is not None and begin < end:
            rows = self._connection.execute(
                "SELECT number, 1e3 * duration_s, peak_bytes, up_bytes + down_bytes, loss, started_at_s + duration_s "
                "FROM steps WHERE run = ? AND number >= ? AND number < ?",
                (identity, begin, min(end, begin + width)),
            ).fetchall()
            if rows:  # without rows, the steps were deleted meanwhile
                yield rows
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


def _marks(count: int) -> str:
    """Returns the marks of as many values in a query."""
    return ", ".join("?" * count)


def _has_tag(tag: str, tags: str) -> bool:
    return tag in json.loads(tags)
