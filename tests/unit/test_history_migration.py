"""A history file of an older version: migrated without a loss, and left as it was by what goes wrong."""

import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.history import schema
from backhaul_server.dashboard.history.archive import EventSelection, RunSelection
from backhaul_server.dashboard.history.schema import SCHEMA, HistoryRefusedError, copy_of
from backhaul_server.dashboard.history.sqlite import HistoryFile, report_rows
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.views.runs import stored_costs
from backhaul_server.dashboard.views.verdict import verdict
from support.history_schema_1 import write_schema_1

EVERYTHING = "SELECT * FROM runs ORDER BY id", "SELECT * FROM steps ORDER BY run, number"


@pytest.fixture
def old(tmp_path: Path) -> str:
    """A file of schema 1 with two runs of 300 steps, which began 20 and 10 minutes ago."""
    path = str(tmp_path / "state" / "history.sqlite3")
    now_s = time.time()
    write_schema_1(path, [("first", now_s - 1_200), ("second", now_s - 600)], steps=300)
    return path


def content(path: str | Path) -> tuple[int, list[Any], list[Any]]:
    """The schema and all rows of a file."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        runs, steps = (connection.execute(query).fetchall() for query in EVERYTHING)
        return version, runs, steps


def test_all_of_an_old_file_is_there_after_the_migration(old: str) -> None:
    _, old_runs, old_steps = content(old)
    file = HistoryFile(old)
    second, first = file.runs(RunSelection(10), [], time.time()).runs
    series = list(file.series("first", 1_000) or ())
    file.close()
    version, runs, steps = content(old)
    assert version == SCHEMA
    assert [run[: len(old_runs[0])] for run in runs] == old_runs
    assert [step[: len(old_steps[0])] for step in steps] == old_steps
    assert (first.run, second.run, second.steps, second.peak_bytes, second.fallbacks) == (
        "first",
        "second",
        300,
        1_300,
        150,
    )
    assert (second.name, second.tags, second.rank, second.world_size, second.costed_steps) == ("", [], 0, 0, 0)
    assert [point.step for point in series] == list(range(1, 301))
    judged = verdict(stored_costs(second))
    assert (judged.is_worth_it, judged.why) == (None, "0 steps were measured so far, and a verdict needs 5")


def test_a_whole_copy_of_the_old_file_is_kept_that_only_its_owner_can_read(old: str) -> None:
    before = content(old)
    HistoryFile(old).close()
    kept = copy_of(old, 1)
    assert content(kept) == before
    assert kept.stat().st_mode & 0o777 == 0o600
    # No other file is left. SQLite's own of the copy are from looking into it.
    assert {path.name for path in kept.parent.iterdir() if not path.name.endswith(("-wal", "-shm"))} == {
        "history.sqlite3",
        "history.sqlite3.schema-1",
    }


def test_what_a_run_reports_after_the_migration_adds_to_what_it_had(old: str) -> None:
    report = telemetry_pb2.TrainerReport(
        run=telemetry_pb2.Run(id="second", name="lora", tags=["a"], rank=1, world_size=2),
        steps=[
            telemetry_pb2.Step(number=300, wait_s=9.0),  # the file has it
            telemetry_pb2.Step(
                number=301, wait_s=0.5, overhead_s=0.25, spared_s=2.0, gradients=3, peak_saved_bytes=700
            ),
        ],
    )
    file = HistoryFile(old)
    file.write([report_rows(report, time.time())])
    (run,) = file.runs(RunSelection(10, query="LORA", tag="a"), [], time.time()).runs
    file.close()
    assert (run.run, run.steps, run.costed_steps, run.remote, run.saved_bytes) == ("second", 301, 1, 3, 700)
    assert (run.wait_s, run.overhead_s, run.spared_s) == (0.5, 0.25, 2.0)
    assert (run.name, run.tags, run.rank, run.world_size) == ("lora", ["a"], 1, 2)


def test_a_failed_migration_changes_nothing_and_says_so(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(old)
    statements = schema._MIGRATIONS[1]
    monkeypatch.setattr(schema, "_MIGRATIONS", {1: (*statements[:-1], "CREATE TABLE runs (id INTEGER)")})
    with pytest.raises(
        HistoryRefusedError, match=r"older Backhaul \(schema 1\).*already exists.*The file is as it was"
    ):
        HistoryFile(old)
    assert content(old) == before
    monkeypatch.undo()
    HistoryFile(old).close()  # the next dashboard succeeds
    assert content(old)[0] == SCHEMA
    assert content(copy_of(old, 1)) == before


def test_without_room_for_the_copy_nothing_is_begun(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(old)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000})())
    history = History(old, 30)
    assert "MB of disk space are needed, and 0 MB are free. The file is as it was" in history.trouble()
    assert content(old) == before
    assert not copy_of(old, 1).exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["_keep_copy", "_sync", "commit"])
def test_a_migration_that_is_killed_loses_nothing(old: str, stage: str) -> None:
    before = content(old)
    script = f"""
        import os, signal, sqlite3
        from backhaul_server.dashboard.history import schema, sqlite as history

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if {stage!r} == "commit":
            schema._MIGRATIONS = {{1: (*schema._MIGRATIONS[1], "SELECT die()")}}
            connect = sqlite3.connect
            def with_die(*arguments, **options):
                connection = connect(*arguments, **options)
                connection.create_function("die", 0, die)
                return connection
            history.sqlite3.connect = with_die
        else:
            setattr(schema, {stage!r}, die)
        history.HistoryFile({old!r})
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=240, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert content(old) == before
    HistoryFile(old).close()
    assert content(old)[0] == SCHEMA
    assert content(copy_of(old, 1)) == before
    assert not list(Path(old).parent.glob("*.unfinished*"))


def test_a_second_dashboard_waits_for_the_first_and_keeps_its_copy(old: str) -> None:
    before = content(old)
    HistoryFile(old).close()
    written = copy_of(old, 1).read_bytes()
    HistoryFile(old).close()
    assert copy_of(old, 1).read_bytes() == written
    assert content(copy_of(old, 1)) == before


def test_events_of_kinds_that_only_a_newer_version_knows_are_left_out(tmp_path: Path) -> None:
    path = str(tmp_path / "history.sqlite3")
    file = HistoryFile(path)
    with closing(sqlite3.connect(path)) as other, other:
        for name, kind in (("1", "worker_lost"), ("2", "of tomorrow")):
            other.execute("INSERT INTO events VALUES (?, 1.0, ?, '', '', '', '', 1)", (name, kind))
    assert [event.id for event in file.events(EventSelection(10)).events] == ["1"]
    file.close()
