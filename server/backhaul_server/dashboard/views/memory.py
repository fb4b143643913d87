"""Memory over the last minutes, thinned out for drawing."""

from collections.abc import Sequence
from math import ceil

from backhaul_server.dashboard.collect.held_memory import WorkerMemoryOfRun
from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import CounterIncrease, Watched
from backhaul_server.dashboard.views import schemas


def memory_history(watch: Watch, now_s: float, seconds: int, points: int) -> schemas.MemoryHistory:
    """Returns the memory of all workers, and of all runs with a session in the window."""
    since_s = now_s - seconds
    width_s = max(1, ceil(seconds / points))
    runs = [_run(held, since_s, width_s) for held in watch.held if held.series.at_s[-1] >= since_s]
    return schemas.MemoryHistory(workers=[_worker(worker, since_s, width_s) for worker in watch.workers], runs=runs)


def _worker(worker: Watched, since_s: float, width_s: int) -> schemas.TierHistory:
    series = worker.memory
    kept = _thin(series, since_s, width_s)
    segment, cached, working, result = ([int(column[index]) for index in kept] for column in series.columns)
    return schemas.TierHistory(
        worker=worker.address.text,
        budget_bytes=worker.budget_bytes,
        at_s=[series.at_s[index] for index in kept],
        segment_bytes=segment,
        cached_bytes=cached,
        working_bytes=working,
        result_bytes=result,
        marks=_marks([growth for growth in worker.increases if growth.at_s >= since_s], width_s),
    )


def _run(held: WorkerMemoryOfRun, since_s: float, width_s: int) -> schemas.HeldHistory:
    series = held.series
    kept = _thin(series, since_s, width_s)
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


def _thin(series: Series, since_s: float, width_s: int) -> list[int]:
    """Returns, for each interval, the row with the largest sum. Intervals keep their times between requests."""
    best: dict[int, tuple[float, int]] = {}
    for index in range(series.since(since_s), len(series.at_s)):
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
