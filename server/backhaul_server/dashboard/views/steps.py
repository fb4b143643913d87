"""A run's steps in few points."""

from itertools import groupby
from math import isfinite
from statistics import median

from backhaul_server.dashboard.collect.runs import TrainerRun, step_row
from backhaul_server.dashboard.views import schemas


def run_series(run: TrainerRun, points: int) -> schemas.RunSeries:
    """The last steps that are known, by number: as many as this process keeps, fewer of a run without detail."""
    rows = sorted(_rows(run))
    width = -(-len(rows) // points) or 1
    found = schemas.RunSeries(run=run.id, step=[], step_ms=[], peak_bytes=[], moved_bytes=[], loss=[])
    for _, group in groupby(enumerate(rows), key=lambda item: item[0] // width):
        numbers, step_ms, peaks, moved, losses = zip(*(row for _, row in group), strict=True)
        known = [loss for loss in losses if isfinite(loss)]
        found.step.append(int(numbers[-1]))
        found.step_ms.append(median(step_ms))
        found.peak_bytes.append(int(max(peaks)))
        found.moved_bytes.append(int(max(moved)))
        found.loss.append(median(known) if known else None)
    return found


def _rows(run: TrainerRun) -> list[tuple[float, ...]]:
    if run.detail is not None:
        return list(zip(*run.detail.steps.columns, strict=True))
    return [step_row(step) for step in run.ended_steps()]
