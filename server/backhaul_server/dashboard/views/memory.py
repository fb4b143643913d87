"""Memory over the last minutes, thinned out for drawing."""

from collections.abc import Sequence

from backhaul_server.dashboard.collect.held_memory import WorkerMemoryOfRun
from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import CounterIncrease, Watched
from backhaul_server.dashboard.views import schemas
from backhaul_server.dashboard.views.ranges import TimeRange


def memory_history(watch: Watch, shown: TimeRange, points: int) -> schemas.MemoryHistory:
    """Returns the memory of all workers, and of all runs with a session in the range."""
    width_s = shown.interval_s(points)
    runs = [_run(held, shown, width_s) for held in watch.held if _has_rows(held.series, shown)]
    return schemas.MemoryHistory(workers=[_worker(worker, shown, width_s) for worker in watch.workers], runs=runs)


def _has_rows(series: Series, shown: TimeRange) -> bool:
    return series.since(shown.since_s) < series.after(shown.until_s)


def _worker(worker: Watched, shown: TimeRange, width_s: int) -> schemas.TierHistory:
    series = worker.memory
    kept = _thin(series, shown, width_s)
    segment, cached, working, result = ([int(column[index]) for index in kept] for column in series.columns)
    return schemas.TierHistory(
        worker=worker.address.text,
        budget_bytes=worker.budget_bytes,
        at_s=[series.at_s[index] for index in kept],
        segment_bytes=segment,
        cached_bytes=cached,
        working_bytes=working,
        result_bytes=result,
        marks=_marks([growth for growth in worker.increases if shown.since_s <= growth.at_s <= shown.until_s], width_s),
    )


def _run(held: WorkerMemoryOfRun, shown: TimeRange, width_s: int) -> schemas.HeldHistory:
    series = held.series
    kept = _thin(series, shown, width_s)
    held_bytes, peak, saved = ([int(column[index]) for index in kept] for column in series.columns)
    return schemas.HeldHistory(
        run=held.run,
        trainer=held.trainer,
        budget_bytes=held.budget_bytes,
        at_s=[series.at_s[index] for index in kept],
        held_bytes=held_bytes,
        trainer_peak_bytes=peak,
        saved_bytes=saved,
    )


def _thin(series: Series, shown: TimeRange, width_s: int) -> list[int]:
    """Returns, for each interval, the row with the largest sum. Intervals keep their times between requests."""
    best: dict[int, tuple[float, int]] = {}
    for index in range(series.since(shown.since_s), series.after(shown.until_s)):
        piece = int(series.at_s[index] // width_s)
        total = sum(column[index] for column in series.columns)
        if piece not in best or total >= best[piece][0]:
            best[piece] = (total, index)
    return [index for _, index in best.values()]


def _marks(increases: Sequence[CounterIncrease], width_s: int) -> list[schemas.MemoryEvent]:
    """Merges increases into one event per kind and interval."""
    marks: dict[tuple[int, str], schemas.MemoryEvent] = {}
    for increase in increases:
        key = (int(increase.at_s // width_s), increase.kind)
        if key in marks:
            marks[key].count += increase.count
        else:
            marks[key] = schemas.MemoryEvent(at_s=increase.at_s, kind=increase.kind, count=increase.count)
    return list(marks.values())
