"""What the history forgets, and how long and where it is kept."""

import asyncio
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator

import pytest

from backhaul_server.dashboard.history import sqlite, writer
from backhaul_server.dashboard.history.retention import default_path, parse_retention
from backhaul_server.dashboard.history.selection import EventSelection
from backhaul_server.dashboard.history.sqlite import HistoryFile
from backhaul_server.dashboard.schemas.events import EventEntry
from conftest import wait_until
from support.histories import DAY_S, kept, report_of, run_of, runs, series, step_of, steps_of

pytestmark = pytest.mark.usefixtures("quick_history")


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


def test_events_older_than_the_retention_are_forgotten(path: str) -> None:
    now_s = time.time()
    with kept(path) as history:
        for name, at_s in (("old", now_s - 3 * DAY_S), ("new", now_s - 1)):
            history.put_event(EventEntry(id=name, at_s=at_s, kind="worker_lost"))
    with kept(path, retention_days=2) as history:

        def left() -> list[str]:
            page = asyncio.run(history.events(EventSelection(10)))
            return [] if page is None else [event.id for event in page.events]

        wait_until(lambda: left() == ["new"], "the old one is forgotten")


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
