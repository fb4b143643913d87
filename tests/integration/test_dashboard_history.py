"""Runs outlive the dashboard, and a dashboard outlives what keeps them."""

import os
import time
from pathlib import Path

import pytest

from conftest import wait_until
from support.dashboards import Dashboard
from support.reporting import FakeWorker, Training

NOBODY = "127.0.0.1:1"


def dashboard(store: Path | str, worker: str, *options: str) -> Dashboard:
    return Dashboard(worker, options=options, store=str(store)).ready()


def kept(store: Path, training: Training, steps: int) -> None:
    """Has a dashboard keep a run."""
    with FakeWorker() as worker, dashboard(store, worker.address) as shown:
        worker.tell(training.report(range(steps), is_closed=True))
        wait_until(lambda: [run["steps"] for run in shown.items("runs")] == [steps], "it is told")


@pytest.mark.slow
def test_a_run_is_there_after_a_restart(tmp_path: Path) -> None:
    training = Training(began_at_s=time.time() - 10)
    kept(tmp_path / "history.sqlite3", training, 12)
    with dashboard(tmp_path / "history.sqlite3", NOBODY) as shown:
        (run,) = shown.items("runs")
        assert (run["run"], run["steps"], run["last_step"], run["state"]) == (training.run, 12, 11, "ended")
        assert run["settings"] == {"returns": "auto", "numerics": "auto"}
        assert shown.api(f"runs/{training.run}/steps")["step"] == list(range(12))
        assert shown.api("overview")["history"] == ""


@pytest.mark.slow
def test_what_is_not_kept_over_a_restart_is_said(tmp_path: Path) -> None:
    training = Training(began_at_s=time.time() - 10)
    kept(tmp_path / "history.sqlite3", training, 3)
    with dashboard(tmp_path / "history.sqlite3", NOBODY) as shown:
        segments = shown.api(f"segments?runs={training.run}")
        assert (segments["total"], segments["note"][:38]) == (0, "Segments are kept for the last 8 runs ")
        timeline = shown.api(f"timeline?runs={training.run}")
        assert (timeline["spans"], timeline["why_empty"][:39]) == ([], "Timelines are kept for the last 8 runs ")
        assert shown.api(f"latency?run={training.run}")["phases"] == []
        assert shown.get(f"/api/v1/segments.csv?run={training.run}").text.startswith("run,segment,")
        assert shown.get("/api/v1/segments?runs=unknown").status_code == 404


@pytest.mark.slow
def test_what_came_last_is_kept_when_the_dashboard_is_told_to_end(tmp_path: Path) -> None:
    training = Training(began_at_s=time.time() - 10)
    with FakeWorker() as worker, dashboard(tmp_path / "history.sqlite3", worker.address) as shown:
        worker.tell(training.report(range(3)))
        wait_until(lambda: len(shown.api("segments")["rows"]) > 0, "it came")
    with dashboard(tmp_path / "history.sqlite3", NOBODY) as shown:
        assert [run["steps"] for run in shown.items("runs")] == [3]


@pytest.mark.slow
def test_a_place_where_nothing_can_be_kept_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = tmp_path / "file/history.sqlite3"
    with dashboard(store, NOBODY) as shown:
        assert "runs will not be kept over a restart: " in (said := shown.logged())
        assert f'"{store}" cannot be' in said
    with dashboard(tmp_path / "history.sqlite3", NOBODY) as shown:
        assert shown.logged() == ""


@pytest.mark.slow
def test_a_corrupt_file_costs_the_history_and_nothing_else(tmp_path: Path) -> None:
    store = tmp_path / "history.sqlite3"
    store.write_bytes(os.urandom(1 << 16))
    with FakeWorker() as worker, dashboard(store, worker.address) as shown:
        training = Training(began_at_s=time.time() - 10)
        worker.tell(training.report(range(3)))
        wait_until(lambda: str(store) in shown.api("overview")["history"], "it says so")
        wait_until(lambda: [run["steps"] for run in shown.items("runs")] == [3], "runs of memory are shown")
        assert shown.api(f"runs/{training.run}/steps")["step"] == [0, 1, 2]
        assert shown.items("workers")[0]["state"] == "serving"


@pytest.mark.slow
def test_retention_is_a_setting(tmp_path: Path) -> None:
    store = tmp_path / "history.sqlite3"
    kept(store, Training(began_at_s=time.time() - 3 * 86_400), 5)
    with dashboard(store, NOBODY, "--retention", "5") as shown:
        assert len(shown.items("runs")) == 1
    with dashboard(store, NOBODY, "--retention", "2") as shown:
        wait_until(lambda: shown.items("runs") == [], "it is forgotten")


@pytest.mark.slow
@pytest.mark.parametrize("store", [":memory:", None])
def test_nothing_is_left_where_nothing_was_asked_for(
    store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Dashboard(NOBODY, store=store).ready() as shown:
        wait_until(lambda: shown.api("overview")["history"] == "", "it is kept")
    expected = [] if store else [tmp_path / "backhaul/history.sqlite3"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == expected
