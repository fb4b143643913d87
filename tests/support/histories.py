"""Reports of a made-up run, and a history that they are put into."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.history.selection import RunSelection
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.schemas.runs import RunSeries, RunSummary
from conftest import wait_until

DAY_S = 86_400


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


@contextmanager
def kept(path: str, retention_days: float = 30) -> Iterator[History]:
    """Opens a history, and closes it with everything written."""
    history = History(path, retention_days)
    history.start()
    try:
        yield history
    finally:
        history.stop()
        wait_until(lambda: not history._thread.is_alive(), "it has closed the file")  # a busy disk may take a while


def runs(history: History, limit: int = 100) -> list[RunSummary]:
    """Asks for the newest runs."""
    return asyncio.run(history.runs(RunSelection(limit))).runs


def series(history: History, run: str = "run", points: int = 400) -> RunSeries | None:
    """Asks for the steps of a run."""
    return asyncio.run(history.series(run, points))


def steps_of(history: History, run: str = "run") -> list[int]:
    """Asks for the numbers of the steps of a run; none for an unknown run."""
    whole = series(history, run, 1000)
    return [] if whole is None else whole.step
