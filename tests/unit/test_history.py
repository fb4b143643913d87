"""History in SQLite: what is kept, what is forgotten, and what a file may do without ending the dashboard."""

import asyncio
import os
import re
import resource
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.event_log import LogEvent
from backhaul_server.dashboard.history import sqlite, writer
from backhaul_server.dashboard.history.archive import EventSelection, RunRecord, RunSelection, StepSeries
from backhaul_server.dashboard.history.retention import default_path, parse_retention
from backhaul_server.dashboard.history.schema import SCHEMA
from backhaul_server.dashboard.history.sqlite import HistoryFile
from backhaul_server.dashboard.history.writer import History
from conftest import wait_until
from support.processes import open_files

DAY_S = 86_400
NOBODY = 65_534


def run_of(name: str = "run", *, started_at_s: float | None = None, is_closed: bool = False) -> telemetry_pb2.Run:
    """A run with two workers."""
    return telemetry_pb2.Run(
        id=name,
        trainer="host:1",
        client_version="0.1.0",
        started_at_s=time.time() - 100 if started_at_s is None else started_at_s,
        settings={"returns": "auto"},
        fingerprint={"torch": "2.13.0"},
        workers=["a:1", "b:2"],
        is_closed=is_closed,
    )


def step_of(
    number: int, *, loss: float | None = None, started_at_s: float | None = None, duration_s: float = 0.5
) -> telemetry_pb2.Step:
    """A step whose bytes follow from its number."""
    return telemetry_pb2.Step(
        number=number,
        started_at_s=time.time() - 1 if started_at_s is None else started_at_s,
        duration_s=duration_s,
        loss=loss,
        calls=2,
        gradients=1,
        activations=1,
        fallbacks=number % 2,
        up_bytes=10 * number,
        down_bytes=number,
        peak_bytes=1000 + number,
        saved_bytes=500,
        peak_saved_bytes=700,
    )


def report_of(*steps: telemetry_pb2.Step, run: telemetry_pb2.Run | None = None) -> telemetry_pb2.TrainerReport:
    """A report without calls."""
    return telemetry_pb2.TrainerReport(run=run or run_of(), steps=steps)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writes at once rather than every second; nothing is left open."""
    monkeypatch.setattr(writer, "WRITE_S", 0.01)
    before = threading.active_count(), open_files()
    yield
    assert (threading.active_count(), open_files()) == before


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "history.sqlite3")


@contextmanager
def kept(path: str, retention_days: float = 30) -> Iterator[History]:
    history = History(path, retention_days)
    history.start()
    try:
        yield history
    finally:
        history.stop()
        wait_until(lambda: not history._thread.is_alive(), "it has closed the file")  # a busy disk may take a while


def runs(history: History, limit: int = 100) -> list[RunRecord]:
    return asyncio.run(history.runs(RunSelection(limit))).runs


def series(history: History, run: str = "run", points: int = 400) -> StepSeries | None:
    return asyncio.run(history.series(run, points))


def steps_of(history: History, run: str = "run") -> list[int]:
    whole = series(history, run, 1000)
    return [] if whole is None else whole.step


def damage(path: str) -> None:
    """Overwrites the file and its log, where they lie, from the first to the last byte."""
    for part in (path, f"{path}-wal", f"{path}-shm"):
        if Path(part).exists():
            with Path(part).open("r+b") as file:
                file.write(b"\x5a" * max(4096, Path(part).stat().st_size))


def test_a_run_is_kept_with_all_that_tells_it_apart(path: str) -> None:
    with kept(path) as history:
        started_at_s = time.time() - 100
        history.put(report_of(*(step_of(n, loss=1 / n) for n in (1, 2, 3)), run=run_of(started_at_s=started_at_s)))
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        (run,) = runs(history)
    assert (run.run, run.trainer, run.client_version, run.workers) == ("run", "host:1", "0.1.0", ["a:1", "b:2"])
    assert (run.settings, run.fingerprint, run.state) == ({"returns": "auto"}, {"torch": "2.13.0"}, "running")
    assert (run.steps, run.last_step, run.median_step_ms) == (3, 3, 500)
    assert run.last_loss == pytest.approx(1 / 3)
    assert (run.peak_bytes, run.up_bytes, run.down_bytes, run.fallbacks) == (1003, 60, 6, 2)
    assert run.started_at_s == pytest.approx(started_at_s)
    assert run.heard_at_s == pytest.approx(time.time(), abs=10)


def test_the_name_and_the_costs_of_a_run_are_kept(path: str) -> None:
    run = run_of()
    run.MergeFrom(telemetry_pb2.Run(name="lora", tags=["a"], notes="none", rank=1, world_size=2))
    costs = telemetry_pb2.Step(wait_s=0.5, overhead_s=0.25, spared_s=2.0, spared_bytes=30)
    steps = [step_of(number) for number in (1, 2)]
    for step in steps:
        step.MergeFrom(costs)
    with kept(path) as history:
        history.put(report_of(*steps, run=run))
        (stored,) = runs(history)
    assert (stored.name, stored.tags, stored.notes, stored.rank, stored.world_size) == ("lora", ["a"], "none", 1, 2)
    assert (stored.wait_s, stored.overhead_s, stored.spared_s, stored.spared_bytes) == (1.0, 0.5, 4.0, 60)
    assert (stored.saved_bytes, stored.remote) == (700, 4)


def test_it_survives_a_restart_and_what_stop_finds_is_written(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
    with kept(path) as history:
        wait_until(lambda: steps_of(history) == [1], "the file is read")
        history.put(report_of(step_of(2), run=run_of(is_closed=True)))
        wait_until(lambda: steps_of(history) == [1, 2], "the run goes on")
        assert [run.state for run in runs(history)] == ["ended"]


def test_who_asks_gets_what_was_put_before(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WRITE_S", 60.0)
    with kept(path) as history:
        for number in range(1, 4):
            history.put(report_of(step_of(number)))
            assert steps_of(history) == list(range(1, number + 1))


def test_only_its_owner_may_read_it(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "the file is there")
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert {stat.S_IMODE(part.stat().st_mode) for part in Path(path).parent.iterdir()} == {0o600}


def test_a_step_told_twice_counts_once_also_by_two_dashboards(path: str) -> None:
    with kept(path) as one, kept(path) as other:
        for number in range(1, 21):
            for history in (one, other):
                history.put(report_of(step_of(number), step_of(number)))
        wait_until(lambda: steps_of(one) == list(range(1, 21)) == steps_of(other), "both see all")
        (run,) = runs(one)
        assert (run.steps, run.up_bytes) == (20, 10 * sum(range(1, 21)))
        assert (one.error, other.error) == ("", "")


def test_the_newest_runs_come_first_and_silent_ones_are_named(path: str) -> None:
    with kept(path) as history:
        now_s = time.time()
        for age_s in (300, 100, 200):
            run = run_of(f"run{age_s}", started_at_s=now_s - age_s)
            history.put(report_of(step_of(1, started_at_s=now_s - age_s), run=run))
        wait_until(lambda: len(runs(history)) == 3, "all are written")
        assert [run.run for run in runs(history)] == ["run100", "run200", "run300"]
        assert [run.run for run in runs(history, 1)] == ["run100"]
        assert {run.state for run in runs(history)} == {"silent"}


def test_a_point_is_the_median_and_of_bytes_the_largest(path: str) -> None:
    with kept(path) as history:
        steps = [step_of(n, loss=None if n == 3 else n, duration_s=n * n / 1e3) for n in range(1, 7)]
        history.put(report_of(*steps, step_of(101, duration_s=1)))
        wait_until(lambda: series(history) is not None, "it is written")
        whole, coarse = series(history, points=1000), series(history, points=34)  # 3 numbers a point
    assert whole is not None and coarse is not None
    assert (whole.step, whole.loss) == ([1, 2, 3, 4, 5, 6, 101], [1, 2, None, 4, 5, 6, None])
    assert coarse.step == [3, 6, 101]
    assert coarse.step_ms == pytest.approx([4, 25, 1000])
    assert coarse.loss == [1.5, 5, None]
    assert (coarse.peak_bytes, coarse.moved_bytes) == ([1003, 1006, 1101], [33, 66, 1111])


def test_a_run_without_steps_has_an_empty_series_and_an_unknown_one_none(path: str) -> None:
    with kept(path) as history:
        history.put(report_of())
        wait_until(lambda: series(history) is not None, "it is written")
        assert steps_of(history) == []
        assert series(history, "other") is None
        assert runs(history)[0].median_step_ms is None


def test_numbers_that_no_trainer_means_do_no_harm(path: str) -> None:
    nonsense = step_of(2, loss=float("nan"), started_at_s=1e300, duration_s=float("inf"))
    nonsense.number = nonsense.up_bytes = nonsense.down_bytes = nonsense.peak_bytes = 2**64 - 1
    with kept(path) as history:
        history.put(report_of(step_of(1, started_at_s=-5, duration_s=float("nan")), nonsense))
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        assert (history.error, runs(history)[0].steps, runs(history)[0].last_loss) == ("", 2, None)
        assert runs(history)[0].heard_at_s <= time.time()
        whole = series(history)
        assert whole is not None
        assert whole.step_ms == [0, 0]


def test_retention_forgets_runs_and_the_old_steps_of_those_that_go_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "FORGOTTEN_AT_ONCE", 3)
    now_s = time.time()
    old = [step_of(n, started_at_s=now_s - 40 * DAY_S) for n in range(1, 12)]
    with kept(path, retention_days=1000) as history:
        history.put(report_of(*old, run=run_of("over", started_at_s=now_s - 41 * DAY_S)))
        history.put(report_of(*old, step_of(12), step_of(13), run=run_of("long", started_at_s=now_s - 41 * DAY_S)))
        wait_until(lambda: len(runs(history)) == 2, "both are written")
    with kept(path, retention_days=30) as history:
        wait_until(lambda: [run.run for run in runs(history)] == ["long"], "it is applied at start")
        assert steps_of(history, "long") == [12, 13]
        assert runs(history)[0].steps == 13  # it had them
        assert series(history, "over") is None


def test_a_clock_that_jumps_ahead_does_not_make_the_history_look_old(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FORGET_S", 0.0)
    passes: list[float] = []
    forget = HistoryFile.forget

    def forgotten(self: HistoryFile, before_s: float) -> Iterator[None]:
        passes.append(before_s)
        return forget(self, before_s)

    monkeypatch.setattr(HistoryFile, "forget", forgotten)
    real = time.time
    with kept(path, retention_days=30) as history:
        history.put(report_of(step_of(1), run=run_of("kept", started_at_s=real())))
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        monkeypatch.setattr(writer.time, "time", lambda: real() + 400 * DAY_S)  # type: ignore[attr-defined]
        before = len(passes)
        wait_until(lambda: len(passes) > before + 1, "the retention is applied with the wrong clock")
        assert [run.run for run in runs(history)] == ["kept"]


@pytest.mark.slow
def test_retention_is_applied_again_while_it_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FORGET_S", 0.05)
    with kept(path, retention_days=2 / DAY_S) as history:
        history.put(report_of(step_of(1, started_at_s=time.time(), duration_s=0)))
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        wait_until(lambda: runs(history) == [], "its two seconds are over")


def test_where_nothing_is_to_be_kept_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kept(":memory:") as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is there while it lasts")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/me"}, "/home/me/.local/state/backhaul/history.sqlite3"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "/state"}, "/state/backhaul/history.sqlite3"),
        ({"HOME": "/home/me", "XDG_STATE_HOME": "relative"}, "/home/me/.local/state/backhaul/history.sqlite3"),
        ({}, ":memory:"),
    ],
)
def test_the_default_path_follows_the_specification(environment: dict[str, str], expected: str) -> None:
    assert default_path(environment) == expected


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "a month"])
def test_a_retention_that_can_not_be_is_named(text: str) -> None:
    assert parse_retention("0.5") == 0.5
    with pytest.raises(ArgumentTypeError, match=f'"{text}" is not a number of days above 0'):
        parse_retention(text)


def test_a_corrupt_file_is_named_left_alone_and_done_without(path: str) -> None:
    Path(path).parent.mkdir()
    Path(path).write_bytes(b"no database" * 1000)
    with kept(path) as history:
        wait_until(lambda: "is damaged or no SQLite file: move it away" in history.error, "it says so")
        history.put(report_of(step_of(1)))
        assert (runs(history), series(history)) == ([], None)
        assert Path(path).read_bytes() == b"no database" * 1000
        Path(path).rename(f"{path}.bad")
        wait_until(lambda: steps_of(history) == [1], "history goes on when it is moved away")
        assert history.error == ""


def test_a_file_that_is_damaged_while_open_is_named_and_done_without(path: str) -> None:
    with kept(path) as history:
        for number in range(1, 2000):
            history.put(report_of(step_of(number)))
        wait_until(lambda: len(steps_of(history)) == 1000, "it is large")
        damage(path)

        def is_named() -> bool:
            history.put(report_of(step_of(2001)))
            return path in history.error

        wait_until(is_named, "a later call finds it")
        assert runs(history) == []
        assert Path(path).read_bytes()[:8] == b"\x5a" * 8


def test_a_run_with_settings_of_another_kind_is_named_and_done_without(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE runs SET settings = '{\"returns\": [1]}'")
            connection.commit()
        assert runs(history) == []
        assert path in history.error


def test_a_file_that_is_moved_away_while_open_is_begun_anew(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        shutil.rmtree(Path(path).parent)
        history.put(report_of(step_of(2)))
        wait_until(lambda: steps_of(history) == [2], "it goes on in a new file")


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A directory of one's own, as somebody whom permissions concern."""
    folder = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize("part", ["file", "directory"])
def test_what_may_not_be_written_is_named_and_goes_on_when_it_may(part: str) -> None:
    with unprivileged() as folder:
        path = folder / "history.sqlite3"
        with kept(str(path)) as history:
            history.put(report_of(step_of(1)))
            wait_until(lambda: steps_of(history) == [1], "it is written")
        target, mode = (path, 0o400) if part == "file" else (folder, 0o500)
        before = path.read_bytes()
        target.chmod(mode)
        with kept(str(path)) as history:
            history.put(report_of(step_of(2)))
            wait_until(
                lambda: "change its permissions, or use another file with --store" in history.error, "it says so"
            )
            assert path.read_bytes() == before
            target.chmod(0o700)
            wait_until(lambda: steps_of(history) == [1, 2], "it goes on")
            assert history.error == ""


def test_a_directory_that_cant_be_made_is_named() -> None:
    with unprivileged() as folder:
        folder.chmod(0o500)
        with kept(str(folder / "deep/history.sqlite3")) as history:
            wait_until(lambda: "cannot be written (Permission denied)" in history.error, "it says so")


def test_a_full_disk_is_named_and_what_came_meanwhile_is_written_when_there_is_room(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []
    reason = History._reason

    def noted(self: History, error: Exception) -> str:
        failed.append(reason(self, error))
        return failed[-1]

    monkeypatch.setattr(History, "_reason", noted)
    caplog.set_level("INFO", "backhaul.dashboard")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        resource.setrlimit(resource.RLIMIT_FSIZE, (Path(f"{path}-wal").stat().st_size, hard))
        try:
            history.put(report_of(*(step_of(number) for number in range(2, 500))))
            wait_until(lambda: "cannot be read or written: check the disk" in history.error, "it says so")
            wait_until(lambda: len(failed) >= 3, "it has tried again")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        wait_until(lambda: len(steps_of(history)) == 499, "it goes on")
        assert (history.error, history.dropped_steps) == ("", 0)
    stopped, continued = [record.getMessage() for record in caplog.records]
    assert stopped == f"The history of runs is not kept: {failed[0]}"
    assert "is kept again" in continued


def test_a_file_that_may_not_grow_can_still_be_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(real(*arguments, **options, check_same_thread=False))
        return opened[-1]

    real: Callable[..., sqlite3.Connection] = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        opened[0].execute("PRAGMA max_page_count = 1")  # the least is what it has
        history.put(report_of(*(step_of(number) for number in range(2, 500))))
        wait_until(lambda: "the disk is full: free some space" in history.error, "it says so")
        assert steps_of(history) == [1]
        opened[0].execute("PRAGMA max_page_count = 1000000")
        wait_until(lambda: len(steps_of(history)) == 499, "it goes on")
        assert history.error == ""


@pytest.mark.slow
def test_a_lock_is_waited_for_without_holding_up_anybody(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            history.put(report_of(step_of(2)))
            wait_until(lambda: "is locked by another process" in history.error, "it says so")
            assert steps_of(history) == [1]  # reading needs no lock
            other.execute("ROLLBACK")
        wait_until(lambda: steps_of(history) == [1, 2], "it goes on")
        assert history.error == ""


@pytest.mark.slow
def test_stop_ends_soon_also_while_the_file_is_held(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "it is written")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            history.put(report_of(step_of(2)))
            began_s = time.monotonic()
            history.stop()
            assert time.monotonic() - began_s < 30  # its second, and what a busy machine takes to say so


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_a_file_of_another_schema_is_refused_and_left_alone(path: str, schema: int) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {schema}")
    before = Path(path).read_bytes()
    refused = rf"another version of Backhaul \(schema {schema}, this .* {SCHEMA}\) and was not changed: move it away"
    assert re.search(refused, History(path, 30).trouble())
    with kept(path) as history:
        wait_until(lambda: re.search(refused, history.error) is not None, "it says so")
        assert runs(history) == []
        Path(path).rename(f"{path}.old")
        wait_until(lambda: len(runs(history)) == 0 and not history.error, "a new file is begun")
    assert Path(f"{path}.old").read_bytes() == before


def test_the_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.sqlite3"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    with kept(str(path)) as history:
        wait_until(lambda: "is the database of another program" in history.error, "it says so")
    assert path.read_bytes() == before
    assert [part.name for part in tmp_path.iterdir()] == ["bookmarks.sqlite3"]


def test_what_has_no_room_is_counted_and_nobody_waits(tmp_path: Path) -> None:
    with kept(str(tmp_path)) as history:  # a directory is no file
        steps = [step_of(number) for number in range(1000)]
        for _ in range(25):
            history.put(report_of(*steps))
        assert history.dropped_steps == 6000
        assert history._queued_rows <= writer.QUEUED_ROWS
        wait_until(lambda: "cannot be opened" in history.error, "it says so")


def test_nobody_waits_for_an_answer_of_a_history_that_does_not_run(path: str) -> None:
    history = History(path, 30)
    assert runs(history) == []
    history.start()
    history.stop()
    assert series(history) is None


@pytest.mark.slow
@pytest.mark.soak
def test_a_million_steps_stay_usable(path: str) -> None:
    with kept(path) as history:
        for begin in range(0, 1_000_000, 5000):
            wait_until(lambda: history._queued_rows < 10_000, "the queue has room")
            history.put(report_of(*(step_of(number, loss=1.0) for number in range(begin, begin + 5000))))
        wait_until(lambda: history._queued_rows == 0, "all is written")
        assert history.dropped_steps == 0
        assert runs(history)[0].steps == 1_000_000
        for ask in (lambda: runs(history), lambda: series(history, points=400), lambda: series(history, points=1)):
            began_s = time.process_time()  # others use this machine too
            ask()
            assert time.process_time() - began_s < 5
        whole = series(history, points=400)
        assert whole is not None
        assert (len(whole.step), whole.step[-1], whole.peak_bytes[-1]) == (400, 999_999, 1_000_999)


def event_of(name: str, at_s: float, run: str = "run") -> LogEvent:
    """A worker's loss."""
    return LogEvent(name, at_s, "worker_lost", run, "a:1", "Block", f"event {name}", 2)


def test_events_survive_a_restart_and_are_paged_by_time(path: str) -> None:
    now_s = time.time()
    events = [event_of(f"e{number}", now_s - 50 + number // 2, run="ab"[number % 2]) for number in range(6)]
    with kept(path) as history:
        for event in (*events, *events):  # told twice
            history.put_event(event)
    with kept(path) as history:
        wait_until(lambda: asyncio.run(history.events(EventSelection(10))) is not None, "the file is read")
        page = asyncio.run(history.events(EventSelection(4)))
        assert page is not None
        assert ([event.id for event in page.events], page.total) == (["e5", "e4", "e3", "e2"], 6)
        assert page.events[0] == events[5]
        last = page.events[-1]
        rest = asyncio.run(history.events(EventSelection(4, before=(last.at_s, last.id))))
        assert rest is not None
        assert ([event.id for event in rest.events], rest.total) == (["e1", "e0"], 6)
        wanted = EventSelection(10, runs=("a",), since_s=now_s - 49.5, until_s=now_s - 47.5)
        of_run = asyncio.run(history.events(wanted))
        assert of_run is not None
        assert ([event.id for event in of_run.events], of_run.total) == (["e4", "e2"], 2)


def test_events_of_kinds_that_only_a_newer_version_knows_are_left_out(path: str) -> None:
    file = HistoryFile(path)
    with closing(sqlite3.connect(path)) as other, other:
        for name, kind in (("1", "worker_lost"), ("2", "of tomorrow")):
            other.execute("INSERT INTO events VALUES (?, 1.0, ?, '', '', '', '', 1)", (name, kind))
    assert [event.id for event in file.events(EventSelection(10)).events] == ["1"]
    file.close()


def test_events_older_than_the_retention_are_forgotten(path: str) -> None:
    now_s = time.time()
    with kept(path) as history:
        history.put_event(event_of("old", now_s - 3 * DAY_S))
        history.put_event(event_of("new", now_s - 1))
    with kept(path, retention_days=2) as history:

        def left() -> list[str]:
            page = asyncio.run(history.events(EventSelection(10)))
            return [] if page is None else [event.id for event in page.events]

        wait_until(lambda: left() == ["new"], "the old one is forgotten")


def test_runs_are_filtered_and_paged(path: str) -> None:
    now_s = time.time()
    with kept(path) as history:
        for number in range(5):
            run = run_of(f"run{number}", started_at_s=now_s - 100 + number // 2)
            run.name, run.rank, run.world_size = f"LoRA {number}", number, 5
            run.tags.extend(["even" if number % 2 == 0 else "odd", "all"])
            history.put(report_of(step_of(1), run=run))
        wait_until(lambda: len(runs(history)) == 5, "they are written")

        def listed(wanted: RunSelection) -> tuple[list[str], int]:
            page = asyncio.run(history.runs(wanted, ["run1", "unknown"]))
            assert page.stored == {"run1"}
            return [run.run for run in page.runs], page.total

        assert listed(RunSelection(2)) == (["run4", "run3"], 5)
        last = runs(history)[1]
        assert listed(RunSelection(9, before=(last.started_at_s, last.run))) == (["run2", "run1", "run0"], 5)
        assert listed(RunSelection(9, tag="odd")) == (["run3", "run1"], 2)
        assert listed(RunSelection(9, tag="od")) == ([], 0)
        assert listed(RunSelection(9, query="lora 2")) == (["run2"], 1)
        assert listed(RunSelection(9, query="ODD")) == (["run3", "run1"], 2)
        assert listed(RunSelection(9, query="HOST")) == (["run4", "run3", "run2", "run1", "run0"], 5)
        assert listed(RunSelection(9, id="run3")) == (["run3"], 1)
        (stored,) = asyncio.run(history.runs(RunSelection(1, id="run3"))).runs
        assert (stored.name, stored.tags, stored.rank, stored.world_size) == ("LoRA 3", ["odd", "all"], 3, 5)


def test_a_range_of_time_has_the_steps_that_began_in_it(path: str) -> None:
    began_s = time.time() - 1_000
    numbers = [number for number in range(1, 101) if number % 10]  # some are missing
    with kept(path) as history:
        history.put(report_of(*(step_of(number, started_at_s=began_s + number) for number in numbers)))
        wait_until(lambda: len(steps_of(history)) == len(numbers), "they are written")
        for since, until in ((20.5, 40.5), (0, 5), (95, 400), (20, 20.5), (-5, -1), (200, 300)):
            within = asyncio.run(history.series("run", 1_000, began_s + since, began_s + until))
            assert within is not None
            assert within.step == [number for number in numbers if since < number <= until]
        whole = series(history)
        assert whole is not None
        assert whole.at_s == pytest.approx([began_s + number + 0.5 for number in numbers])


def test_times_of_a_trainer_whose_clock_is_compared_are_converted(path: str) -> None:
    now_s = time.time()
    report = report_of(step_of(1, started_at_s=now_s - 5_000), run=run_of(started_at_s=now_s - 5_100))
    with kept(path) as history:
        history.put(report, 4_000.0)
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        (run,) = runs(history)
        whole = series(history)
    assert run.started_at_s == pytest.approx(now_s - 1_100)
    assert whole is not None
    assert whole.at_s == [pytest.approx(now_s - 999.5)]
