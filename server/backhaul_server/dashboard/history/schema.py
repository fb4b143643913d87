"""The tables of the history file, and how a file of an older version becomes one of this version.

NOTE [Migration]
1. A file of an older schema is migrated when it is opened, in one transaction. Whatever ends it before the commit,
   SQLite's journal leaves the file as it was, and the next dashboard that opens the file tries again.
2. Before its first change, the whole old file is copied to FILE.schema-N, where N is the old schema. The copy is
   written under another name and renamed when it is complete and on disk, so a file of that name is always whole.
3. The transaction is open while the copy is made, so no other dashboard can write to the file or migrate it meanwhile.
4. If that fails, for example because the disk is full, the dashboard says so and keeps no history until it succeeds.
5. A file of a newer schema is refused and left alone.
"""

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

SCHEMA = 2
APPLICATION = 0x4248_4C31
"""Identifies the owner of the file: "BHL1"."""
_ROOM = 2.5
"""Times its size that a migration may take on the disk: for the copy, and for the log of the transaction."""

_RUNS_SINCE_2 = """
        label TEXT NOT NULL DEFAULT '',
        tags TEXT NOT NULL DEFAULT '[]',
        notes TEXT NOT NULL DEFAULT '',
        rank INTEGER NOT NULL DEFAULT 0,
        world_size INTEGER NOT NULL DEFAULT 0,
        costed_steps INTEGER NOT NULL DEFAULT 0,
        saved_bytes INTEGER NOT NULL DEFAULT 0,
        wait_s REAL NOT NULL DEFAULT 0,
        overhead_s REAL NOT NULL DEFAULT 0,
        spared_s REAL NOT NULL DEFAULT 0,
        remote INTEGER NOT NULL DEFAULT 0,
        spared_bytes INTEGER NOT NULL DEFAULT 0
"""
_STEPS_SINCE_2 = """
        saved_bytes INTEGER,
        wait_s REAL,
        overhead_s REAL,
        spared_s REAL,
        remote INTEGER,
        spared_bytes INTEGER
"""
_SUMS = """
    CREATE TRIGGER sums AFTER INSERT ON steps BEGIN
        UPDATE runs SET
            steps = steps + 1,
            last_loss = CASE WHEN new.number >= last_step THEN coalesce(new.loss, last_loss) ELSE last_loss END,
            last_step = max(last_step, new.number),
            heard_at_s = max(heard_at_s, new.started_at_s + new.duration_s),
            peak_bytes = max(peak_bytes, new.peak_bytes),
            up_bytes = up_bytes + new.up_bytes,
            down_bytes = down_bytes + new.down_bytes,
            fallbacks = fallbacks + new.fallbacks,
            costed_steps = costed_steps + (new.wait_s IS NOT NULL),
            saved_bytes = max(saved_bytes, coalesce(new.saved_bytes, 0)),
            wait_s = wait_s + coalesce(new.wait_s, 0),
            overhead_s = overhead_s + coalesce(new.overhead_s, 0),
            spared_s = spared_s + coalesce(new.spared_s, 0),
            remote = remote + coalesce(new.remote, 0),
            spared_bytes = spared_bytes + coalesce(new.spared_bytes, 0)
        WHERE id = new.run;
    END
"""
_EVENTS = """
    CREATE TABLE events (
        id TEXT PRIMARY KEY,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        run TEXT NOT NULL,
        worker TEXT NOT NULL,
        segment TEXT NOT NULL,
        text TEXT NOT NULL,
        count INTEGER NOT NULL
    ) WITHOUT ROWID
"""
_EVENTS_BY_TIME = "CREATE INDEX events_by_time ON events (at_s, id)"
_VERSION = f"PRAGMA user_version = {SCHEMA}"

TABLES = (
    f"""
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
        fallbacks INTEGER NOT NULL DEFAULT 0,
        {_RUNS_SINCE_2}
    )
    """,
    "CREATE INDEX runs_by_start ON runs (started_at_s)",
    f"""
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
        {_STEPS_SINCE_2},
        PRIMARY KEY (run, number)
    ) WITHOUT ROWID
    """,
    _SUMS,
    _EVENTS,
    _EVENTS_BY_TIME,
    f"PRAGMA application_id = {APPLICATION}",
    _VERSION,
)
"""The statements that create a new file. The name of a run's row is its id, and its label is what people call it."""

_MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    1: (
        *(f"ALTER TABLE runs ADD COLUMN {column.strip()}" for column in _RUNS_SINCE_2.split(",\n")),
        *(f"ALTER TABLE steps ADD COLUMN {column.strip()}" for column in _STEPS_SINCE_2.split(",\n")),
        "DROP TRIGGER sums",
        _SUMS,
        _EVENTS,
        _EVENTS_BY_TIME,
        "PRAGMA user_version = 2",
    )
}
"""For each old schema, the statements that make the next one of it. What old steps did not measure is NULL."""


class HistoryRefusedError(Exception):
    """The file holds something else, is of a newer version, or cannot be migrated. The message says what to do."""


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Creates the tables of an empty file, or migrates an older one. Called inside an open transaction.

    Raises:
        HistoryRefusedError: The file is the database of another program, a newer version wrote it, or it cannot be
            migrated now. The caller rolls the transaction back.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if tables and application != APPLICATION:
        raise HistoryRefusedError(f'"{path}" is the database of another program: use another file with --store')
    if version > SCHEMA:  # Rule 5
        raise HistoryRefusedError(
            f'"{path}" was written by a newer Backhaul (schema {version}, this one knows {SCHEMA}): '
            "upgrade, or use another file with --store"
        )
    if not tables:
        for statement in TABLES:
            connection.execute(statement)
    elif version < SCHEMA:
        _migrate(connection, path, version)


def copy_of(path: str, schema: int) -> Path:
    """Returns the path of the copy that a migration keeps of a file of an older schema."""
    return Path(f"{path}.schema-{schema}")


def _migrate(connection: sqlite3.Connection, path: str, version: int) -> None:
    try:
        if version not in _MIGRATIONS:
            raise OSError(f"no version of Backhaul has written schema {version}")
        _keep_copy(path, version)
        for schema in range(version, SCHEMA):
            for statement in _MIGRATIONS[schema]:
                connection.execute(statement)
    except (OSError, sqlite3.Error) as error:  # Rule 4
        cause = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise HistoryRefusedError(
            f'"{path}" was written by an older Backhaul (schema {version}) and could not be migrated to schema '
            f"{SCHEMA}: {cause}. The file is as it was. Remove the cause, or use another file with --store"
        ) from error


def _keep_copy(path: str, version: int) -> None:
    """Copies the file as it was before the migration (Rule 2). Raises OSError or sqlite3.Error."""
    size = sum(part.stat().st_size for name in (path, f"{path}-wal") if (part := Path(name)).exists())
    free = shutil.disk_usage(Path(path).parent).free
    if free < _ROOM * size:
        raise OSError(f"{_ROOM * size / 1e6:.0f} MB of disk space are needed, and {free / 1e6:.0f} MB are free")
    kept = copy_of(path, version)
    unfinished = kept.with_name(f"{kept.name}.unfinished")
    with suppress(FileNotFoundError):  # a migration was interrupted
        unfinished.unlink()
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        # A connection of its own reads what was committed, while the transaction of the other keeps writers away.
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(unfinished)) as target:
            source.backup(target)
        _sync(unfinished)
        unfinished.replace(kept)
        _sync(kept.parent)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def _sync(path: Path) -> None:
    """Waits until a file or directory is on disk, so that a power failure cannot lose the copy."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
