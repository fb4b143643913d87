"""The tables of the history file. A file with other tables is refused and left alone."""

import sqlite3

SCHEMA = 3
"""The number of these tables, which changes with each change of them."""
APPLICATION = 0x4248_4C31
"""Identifies the owner of the file: "BHL1"."""

TABLES = (
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
        label TEXT NOT NULL,
        tags TEXT NOT NULL,
        notes TEXT NOT NULL,
        rank INTEGER NOT NULL,
        world_size INTEGER NOT NULL,
        steps INTEGER NOT NULL DEFAULT 0,
        last_step INTEGER NOT NULL DEFAULT 0,
        last_loss REAL,
        peak_bytes INTEGER NOT NULL DEFAULT 0,
        up_bytes INTEGER NOT NULL DEFAULT 0,
        down_bytes INTEGER NOT NULL DEFAULT 0,
        fallbacks INTEGER NOT NULL DEFAULT 0,
        saved_bytes INTEGER NOT NULL DEFAULT 0,
        wait_s REAL NOT NULL DEFAULT 0,
        overhead_s REAL NOT NULL DEFAULT 0,
        spared_s REAL NOT NULL DEFAULT 0,
        remote INTEGER NOT NULL DEFAULT 0,
        spared_bytes INTEGER NOT NULL DEFAULT 0
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
        saved_bytes INTEGER NOT NULL,
        wait_s REAL NOT NULL,
        overhead_s REAL NOT NULL,
        spared_s REAL NOT NULL,
        remote INTEGER NOT NULL,
        spared_bytes INTEGER NOT NULL,
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
            fallbacks = fallbacks + new.fallbacks,
            saved_bytes = max(saved_bytes, new.saved_bytes),
            wait_s = wait_s + new.wait_s,
            overhead_s = overhead_s + new.overhead_s,
            spared_s = spared_s + new.spared_s,
            remote = remote + new.remote,
            spared_bytes = spared_bytes + new.spared_bytes
        WHERE id = new.run;
    END
    """,
    """
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
    """,
    "CREATE INDEX events_by_time ON events (at_s, id)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
"""The statements that create a new file. The name of a run's row is its id, and its label is what people call it."""


class HistoryRefusedError(Exception):
    """The file holds something else, or another version wrote it. The message says what to do."""


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Creates the tables of an empty file. Called inside an open transaction.

    Raises:
        HistoryRefusedError: The file is the database of another program, or of a version of Backhaul with other tables.
            It was not changed.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not tables:
        for statement in TABLES:
            connection.execute(statement)
    elif application != APPLICATION:
        raise HistoryRefusedError(f'"{path}" is the database of another program: use another file with --store')
    elif version != SCHEMA:
        raise HistoryRefusedError(
            f'"{path}" was written by another version of Backhaul (schema {version}, this version has schema {SCHEMA}) '
            "and was not changed: move it away, or use another file with --store"
        )
