"""The memory and load of all workers at once, in intervals that are the same for all of them."""

from collections.abc import Callable, Iterable
from statistics import fmean

from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.schemas.network import Fleet, FleetMember, worker_id
from backhaul_server.dashboard.views.ranges import TimeRange
from backhaul_server.dashboard.views.workers import accelerator_status


def fleet(workers: Iterable[Watched], shown: TimeRange, points: int) -> Fleet:
    """Returns all workers over a range, in at most `points` intervals.

    Intervals keep their times between requests, so that a chart that is drawn again does not flicker.
    """
    width_s = shown.interval_s(points)
    last = int(shown.until_s // width_s)
    first = max(last - points + 1, int(shown.since_s // width_s))
    return Fleet(
        at_s=[float(interval * width_s) for interval in range(first, last + 1)],
        interval_s=width_s,
        workers=[_worker(worker, first, last, width_s) for worker in workers],
    )


def _worker(worker: Watched, first: int, last: int, width_s: int) -> FleetMember:
    budget_bytes = worker.budget_bytes
    now = worker.telemetry if worker.state != "unreachable" else None
    memory = _intervals(worker.memory, first, last, width_s, max)
    return FleetMember.of(
        now,
        id=worker_id(worker.address.text),
        address=worker.address.text,
        state=worker.state,
        seen_at_s=worker.answered_at_s,
        memory_share=[None if held is None or not budget_bytes else round(held / budget_bytes, 4) for held in memory],
        load=[
            None if load is None else round(load, 4) for load in _intervals(worker.load, first, last, width_s, fmean)
        ],
        sessions=len(now.sessions) if now is not None else None,
        accelerator=accelerator_status(now),
    )


def _intervals(
    series: Series, first: int, last: int, width_s: int, merge: Callable[[list[float]], float]
) -> list[float | None]:
    """Returns the sums of the columns of a series, merged by interval; None for an interval without a row."""
    rows: list[list[float]] = [[] for _ in range(first, last + 1)]
    start = series.since(first * width_s)
    for at_s, *row in zip(series.at_s[start:], *(column[start:] for column in series.columns), strict=True):
        interval = int(at_s // width_s)
        if interval > last:
            break
        rows[interval - first].append(sum(row))
    return [merge(values) if values else None for values in rows]
