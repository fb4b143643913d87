"""Memory over the last minutes, thinned out for drawing."""

from collections.abc import Sequence
from typing import Any

from backhaul_server.dashboard.collect.held_memory import HELD, WorkerMemoryOfRun
from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import TIERS, Watched
from backhaul_server.dashboard.schemas.memory import HeldHistory, MemoryEvent, MemoryHistory, TierHistory
from backhaul_server.dashboard.views.ranges import TimeRange


def memory_history(watch: Watch, shown: TimeRange, points: int) -> MemoryHistory:
    """Returns the memory of all workers, and of all runs with a session in the range."""
    width_s = shown.interval_s(points)
    runs = [_run(held, shown, width_s) for held in watch.held if _has_rows(held.series, shown)]
    return MemoryHistory(workers=[_worker(worker, shown, width_s) for worker in watch.workers], runs=runs)


def _has_rows(series: Series, shown: TimeRange) -> bool:
    return series.since(shown.since_s) < series.after(shown.until_s)


def _worker(worker: Watched, shown: TimeRange, width_s: int) -> TierHistory:
    return TierHistory(
        worker=worker.address.text,
        budget_bytes=worker.budget_bytes,
        marks=_marks([growth for growth in worker.increases if shown.since_s <= growth.at_s <= shown.until_s], width_s),
        **_points(worker.memory, TIERS, shown, width_s),
    )


def _run(held: WorkerMemoryOfRun, shown: TimeRange, width_s: int) -> HeldHistory:
    return HeldHistory.of(held, **_points(held.series, HELD, shown, width_s))


def _points(series: Series, names: Sequence[str], shown: TimeRange, width_s: int) -> dict[str, Any]:
    """Returns the times and the columns of a series by their names, thinned out."""
    rows = _thin(series, shown, width_s)
    columns = {name: [int(column[index]) for index in rows] for name, column in zip(names, series.columns, strict=True)}
    return {"at_s": [series.at_s[index] for index in rows], **columns}


def _thin(series: Series, shown: TimeRange, width_s: int) -> list[int]:
    """Returns, for each interval, the row with the largest sum. Intervals keep their times between requests."""
    best: dict[int, tuple[float, int]] = {}
    for index in range(series.since(shown.since_s), series.after(shown.until_s)):
        piece = int(series.at_s[index] // width_s)
        total = sum(column[index] for column in series.columns)
        if piece not in best or total >= best[piece][0]:
            best[piece] = (total, index)
    return [index for _, index in best.values()]


def _marks(increases: Sequence[MemoryEvent], width_s: int) -> list[MemoryEvent]:
    """Merges increases into one event per kind and interval."""
    marks: dict[tuple[int, str], MemoryEvent] = {}
    for increase in increases:
        key = (int(increase.at_s // width_s), increase.kind)
        if key in marks:
            marks[key].count += increase.count
        else:
            marks[key] = increase.model_copy()
    return list(marks.values())
