"""History files of schema 1, written by the statements of the version that had it."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

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
    "PRAGMA application_id = 1112034353",
    "PRAGMA user_version = 1",
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


def write_schema_1(path: str, runs: Iterable[tuple[str, float]], steps: int) -> None:
    """Writes a file with runs, each named and begun at a time, that have steps at its seconds 1, 2, and so on."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute("PRAGMA journal_mode = WAL")
        for name, began_at_s in runs:
            about = ("host:1", "0.1.0", '["a:1"]', '{"returns": "auto"}', '{"torch": "2.13.0"}')
            connection.execute(_ADD_RUN, (name, *about, began_at_s, False))
            for number in range(1, steps + 1):
                step = (number, began_at_s + number, 0.5, 1 / number, 1_000 + number, 10 * number, number, number % 2)
                connection.execute(_ADD_STEP, (name, *step))
