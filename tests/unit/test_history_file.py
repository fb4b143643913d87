"""What a file may do without ending the dashboard: it is named, left alone, and used again when it can be."""

import os
import re
import resource
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from backhaul_server.dashboard.history.schema import SCHEMA
from backhaul_server.dashboard.history.writer import History
from conftest import wait_until
from support.histories import kept, report_of, runs, series, step_of, steps_of

pytestmark = pytest.mark.usefixtures("quick_history")

NOBODY = 65_534


@contextmanager
def begun(path: str) -> Iterator[History]:
    """A history in which a first step is written."""
    with kept(path) as history:
        history.put(report_of(step_of(1)))
        wait_until(lambda: steps_of(history) == [1], "the step is written")
        yield history


@contextmanager
def locked(path: str) -> Iterator[sqlite3.Connection]:
    """A transaction of another process, which keeps the history from writing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def test_only_its_owner_may_read_it(path: str) -> None:
    with begun(path):
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert {stat.S_IMODE(part.stat().st_mode) for part in Path(path).parent.iterdir()} == {0o600}


def test_where_nothing_is_to_be_kept_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with begun(":memory:"):
        pass
    assert list(tmp_path.iterdir()) == []


def damage(path: str) -> None:
    """Overwrites the file and its log, where they lie, from the first to the last byte."""
    for part in (path, f"{path}-wal", f"{path}-shm"):
        if Path(part).exists():
            with Path(part).open("r+b") as file:
                file.write(b"\x5a" * max(4096, Path(part).stat().st_size))


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
    with begun(path) as history:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE runs SET settings = '{\"returns\": [1]}'")
            connection.commit()
        assert runs(history) == []
        assert path in history.error


def test_a_file_that_is_moved_away_while_open_is_begun_anew(path: str) -> None:
    with begun(path) as history:
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
        with begun(str(path)):
            pass
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
    with begun(path) as history:
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
    with begun(path) as history:
        opened[0].execute("PRAGMA max_page_count = 1")  # the least is what it has
        history.put(report_of(*(step_of(number) for number in range(2, 500))))
        wait_until(lambda: "the disk is full: free some space" in history.error, "it says so")
        assert steps_of(history) == [1]
        opened[0].execute("PRAGMA max_page_count = 1000000")
        wait_until(lambda: len(steps_of(history)) == 499, "it goes on")
        assert history.error == ""


@pytest.mark.slow
def test_a_lock_is_waited_for_without_holding_up_anybody(path: str) -> None:
    with begun(path) as history:
        with locked(path) as other:
            history.put(report_of(step_of(2)))
            wait_until(lambda: "is locked by another process" in history.error, "it says so")
            assert steps_of(history) == [1]  # reading needs no lock
            other.execute("ROLLBACK")
        wait_until(lambda: steps_of(history) == [1, 2], "it goes on")
        assert history.error == ""


@pytest.mark.slow
def test_stop_ends_soon_also_while_the_file_is_held(path: str) -> None:
    with begun(path) as history, locked(path):
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


def test_the_advice_follows_from_the_error() -> None:
    with kept("/proc/history.sqlite3") as history:  # no directory may have files there, whatever its permissions
        wait_until(lambda: history.error.endswith("(No such file or directory): use another file with --store"), "so")
