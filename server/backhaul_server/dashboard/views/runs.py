"""Runs and their steps as /api/v1 shows them."""

from itertools import groupby
from math import isfinite
from statistics import median

from backhaul_server.dashboard.collect.training_runs import TrainerRun, step_row
from backhaul_server.dashboard.history.archive import RunRecord, RunSelection, matches
from backhaul_server.dashboard.views import schemas
from backhaul_server.dashboard.views.ranges import EVER, TimeRange
from backhaul_server.dashboard.views.topology import run_id
from backhaul_server.dashboard.views.verdict import RunCosts, verdict

_SUMS = ("steps", "last_step", "peak_bytes", "up_bytes", "down_bytes", "fallbacks", "spared_bytes")


def run_summary(run: TrainerRun, now_s: float) -> schemas.RunSummary:
    """Summarizes a run as far as it was reported, with its state at a time in seconds since 1970."""
    median_s, totals = run.median_step_s, run.totals
    return schemas.RunSummary(
        id=run_id(run.id),
        run=run.id,
        name=run.about.name,
        tags=list(run.about.tags),
        notes=run.about.notes,
        rank=run.about.rank,
        world_size=run.about.world_size,
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
        up_bytes=int(totals.up_bytes),
        down_bytes=int(totals.down_bytes),
        fallbacks=int(totals.fallbacks),
        spared_bytes=int(totals.spared_bytes),
        verdict=verdict(run_costs(run)),
    )


def run_costs(run: TrainerRun) -> RunCosts:
    """Returns the measurements of a run as far as it was reported to this process."""
    totals = run.totals
    return RunCosts(
        steps=run.steps,
        peak_bytes=run.peak_bytes,
        saved_bytes=run.saved_bytes,
        wait_s=totals.wait_s,
        overhead_s=totals.overhead_s,
        spared_s=totals.spared_s,
        remote=int(totals.remote),
        fallbacks=int(totals.fallbacks),
        transfer_s=totals.transfer_s,
        queue_s=totals.exposed_queue_s,
    )


def stored_summary(record: RunRecord) -> schemas.RunSummary:
    """Summarizes a run of the history that has not reported to this process."""
    fields = {name: getattr(record, name) for name in schemas.RunSummary.model_fields if hasattr(record, name)}
    return schemas.RunSummary(id=run_id(record.run), verdict=verdict(stored_costs(record)), **fields)


def stored_costs(record: RunRecord) -> RunCosts:
    """Returns the measurements of a run that the history has."""
    return RunCosts(
        steps=record.steps,
        peak_bytes=record.peak_bytes,
        saved_bytes=record.saved_bytes,
        wait_s=record.wait_s,
        overhead_s=record.overhead_s,
        spared_s=record.spared_s,
        remote=record.remote,
        fallbacks=record.fallbacks,
    )


def merged(record: RunRecord, run: TrainerRun, now_s: float) -> schemas.RunSummary:
    """Summarizes a run that reports now. The history has its whole sums if the run is older than this process."""
    summary, stored = run_summary(run, now_s), stored_summary(record)
    update = {name: max(getattr(summary, name), getattr(stored, name)) for name in _SUMS}
    update["started_at_s"] = stored.started_at_s  # the history orders runs by it
    if record.steps > run.steps:
        update["verdict"] = stored.verdict
    return summary.model_copy(update=update)


def is_wanted(run: TrainerRun, wanted: RunSelection) -> bool:
    """Whether a run is among the wanted ones, on whatever page."""
    about = run.about
    has_text = matches(wanted.query.casefold(), run.id, about.name, about.trainer, *about.tags)
    return has_text and (not wanted.tag or wanted.tag in about.tags) and wanted.id in {"", run.id}


def run_series(run: TrainerRun, points: int, within: TimeRange = EVER, shift_s: float = 0.0) -> schemas.RunSeries:
    """Returns the last known steps by number: as many as this process keeps, fewer for a run without detail.

    Args:
        run: The run whose steps are returned.
        points: The largest number of points.
        within: The range in which steps must end, by this process's clock.
        shift_s: Seconds to add to times of the trainer's clock for this process's.
    """
    rows = sorted(row for row in _rows(run) if within.since_s <= row[-1] + shift_s <= within.until_s)
    width = -(-len(rows) // points) or 1
    series = schemas.RunSeries(run=run.id, step=[], at_s=[], step_ms=[], peak_bytes=[], moved_bytes=[], loss=[])
    for _, group in groupby(enumerate(rows), key=lambda item: item[0] // width):
        numbers, step_ms, peaks, moved, losses, at_s = zip(*(row for _, row in group), strict=True)
        known = [loss for loss in losses if isfinite(loss)]
        series.step.append(int(numbers[-1]))
        series.at_s.append(at_s[-1] + shift_s)
        series.step_ms.append(median(step_ms))
        series.peak_bytes.append(int(max(peaks)))
        series.moved_bytes.append(int(max(moved)))
        series.loss.append(median(known) if known else None)
    return series


def _rows(run: TrainerRun) -> list[tuple[float, ...]]:
    if run.detail is not None:
        return list(zip(*run.detail.steps.columns, run.detail.steps.at_s, strict=True))
    return [(*step_row(step), step.started_at_s + step.duration_s) for step in run.ended_steps()]
