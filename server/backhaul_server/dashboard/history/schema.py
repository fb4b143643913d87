"""The tables of the history file. A file with other tables is refused and left alone."""

import sqlite3
from collections.abc import Mapping

SCHEMA = 3
"""The number of these tables, which changes with each change of them."""
APPLICATION = 0x4248_4C31
"""Identifies the owner of the file: "BHL1"."""

SUMS = {
    **dict.fromkeys(("up_bytes", "down_bytes", "fallbacks", "remote", "spared_bytes"), "INTEGER"),
    **dict.fromkeys(("wait_s", "overhead_s", "spared_s"), "REAL"),
}
"""Columns of steps that add up in those of runs, with their types. `remote` counts recomputations on workers."""
PEAKS = dict.fromkeys(("peak_bytes", "saved_bytes"), "INTEGER")
"""Columns of steps of whose values runs have the largest."""
STEP = {"number": "INTEGER", "started_at_s": "REAL", "duration_s": "REAL", **PEAKS, **SUMS}
"""Columns of steps that are never null. A step also has the id of its run's row, and its loss, which may be null."""
RUN = {
    **dict.fromkeys(("name", "trainer", "client_version", "workers", "settings", "fingerprint"), "TEXT"),
    **dict.fromkeys(("label", "tags", "notes"), "TEXT"),
    **dict.fromkeys(("started_at_s", "heard_at_s"), "REAL"),
    **dict.fromkeys(("is_closed", "rank", "world_size"), "INTEGER"),
}
"""Columns of runs that reports have. The name of a run's row is its id, and its label is what people call it."""
EVENT = {
    "id": "TEXT",
    "at_s": "REAL",
    **dict.fromkeys(("kind", "run", "worker", "segment", "text"), "TEXT"),
    "count": "INTEGER",
}


def _typed(columns: Mapping[str, str], more: str = "") -> str:
    """Returns the definitions of columns that are never null."""
    return ", ".join(f"{name} {kind} NOT NULL{more}" for name, kind in columns.items())


TABLES = (
    f"""
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY, {_typed(RUN)}, last_loss REAL,
        {_typed({"steps": "INTEGER", "last_step": "INTEGER", **PEAKS, **SUMS}, " DEFAULT 0")}, UNIQUE (name)
    )
    """,
    "CREATE INDEX runs_by_start ON runs (started_at_s)",
    f"""
    CREATE TABLE steps (
        run INTEGER NOT NULL REFERENCES runs ON DELETE CASCADE,
        {_typed(STEP)}, loss REAL,
        PRIMARY KEY (run, number)
    ) WITHOUT ROWID
    """,
    f"""
    CREATE TRIGGER sums AFTER INSERT ON steps BEGIN
        UPDATE runs SET
            steps = steps + 1,
            last_loss = CASE WHEN new.number >= last_step THEN coalesce(new.loss, last_loss) ELSE last_loss END,
            last_step = max(last_step, new.number),
            heard_at_s = max(heard_at_s, new.started_at_s + new.duration_s),
            {", ".join(f"{name} = max({name}, new.{name})" for name in PEAKS)},
            {", ".join(f"{name} = {name} + new.{name}" for name in SUMS)}
        WHERE id = new.run;
    END
    """,
    f"CREATE TABLE events ({_typed(EVENT)}, PRIMARY KEY (id)) WITHOUT ROWID",
    "CREATE INDEX events_by_time ON events (at_s, id)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
"""The statements that create a new file."""


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
