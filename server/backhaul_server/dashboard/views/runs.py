"""Runs and their steps as /api/v1 shows them."""

from itertools import groupby
from math import isfinite
from statistics import median

from backhaul_server.dashboard.collect.runs import TrainerRun, step_row
from backhaul_server.dashboard.views import schemas


def run_summary(run: TrainerRun, now_s: float) -> schemas.RunSummary:
    """Summarizes a run as far as it was reported, with its state at a time in seconds since 1970."""
    median_s = run.median_step_s
    return schemas.RunSummary(
        run=run.id,
        trainer=run.about.trainer,
        client_version=run.about.client_version,
        workers=list(run.about.workers),
        started_at_s=run.about.started_at_s,
        heard_at_s=run.heard_at_s,
        state=run.state(now_s),
        settings=dict(sorted(run.about.settings.items())),
        fingerprint=dict(sorted(run.about.fingerprint.items())),
        steps=run.steps,
        last_step=run.last_step.number,
        last_loss=run.last_step.loss if run.last_step.HasField("loss") else None,
        median_step_ms=None if median_s is None else 1e3 * median_s,
        peak_bytes=run.peak_bytes,
        up_bytes=int(run.totals.up_bytes),
        down_bytes=int(run.totals.down_bytes),
        fallbacks=int(run.totals.fallbacks),
    )


def run_series(run: TrainerRun, points: int) -> schemas.RunSeries:
    """Returns the last known steps by number: as many as this process keeps, fewer for a run without detail."""
    rows = sorted(_rows(run))
    width = -(-len(rows) // points) or 1
    series = schemas.RunSeries(run=run.id, step=[], step_ms=[], peak_bytes=[], moved_bytes=[], loss=[])
    for _, group in groupby(enumerate(rows), key=lambda item: item[0] // width):
        numbers, step_ms, peaks, moved, losses = zip(*(row for _, row in group), strict=True)
        known = [loss for loss in losses if isfinite(loss)]
        series.step.append(int(numbers[-1]))
        series.step_ms.append(median(step_ms))
        series.peak_bytes.append(int(max(peaks)))
        series.moved_bytes.append(int(max(moved)))
        series.loss.append(median(known) if known else None)
    return series


def _rows(run: TrainerRun) -> list[tuple[float, ...]]:
    if run.detail is not None:
        return list(zip(*run.detail.steps.columns, strict=True))
    return [step_row(step) for step in run.ended_steps()]
