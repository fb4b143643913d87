"""Runs and their steps as /api/v1 shows them."""

from backhaul_server.dashboard.collect.step_points import StepRow, series_of, step_row
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.verdict import verdict
from backhaul_server.dashboard.history.selection import RunSelection, matches
from backhaul_server.dashboard.schemas.network import run_id
from backhaul_server.dashboard.schemas.runs import RunSeries, RunSummary
from backhaul_server.dashboard.views.ranges import EVER, TimeRange

_SUMS = ("steps", "last_step", "peak_bytes", "up_bytes", "down_bytes", "fallbacks", "spared_bytes")


def run_summary(run: TrainerRun, now_s: float) -> RunSummary:
    """Summarizes a run as far as it was reported, with its state at a time in seconds since 1970."""
    return RunSummary.of(
        run.about,
        run.totals,
        run,
        id=run_id(run.id),
        run=run.id,
        state=run.state(now_s),
        last_step=run.last_step.number,
        last_loss=run.last_step.loss if run.last_step.HasField("loss") else None,
        verdict=verdict(run.totals, run.peak_bytes, run.saved_bytes, run.drift),
    )


def merged(stored: RunSummary, run: TrainerRun, now_s: float) -> RunSummary:
    """Summarizes a run that reports now. The history has its whole sums if the run is older than this process."""
    summary = run_summary(run, now_s)
    update = {name: max(getattr(summary, name), getattr(stored, name)) for name in _SUMS}
    update["started_at_s"] = stored.started_at_s  # the history orders runs by it
    if stored.steps > run.steps:
        update["verdict"] = stored.verdict.model_copy(update={"values": summary.verdict.values})
    return summary.model_copy(update=update)


def is_wanted(run: TrainerRun, wanted: RunSelection) -> bool:
    """Whether a run is among the wanted ones, on whatever page."""
    about = run.about
    has_text = matches(wanted.query.casefold(), run.id, about.name, about.trainer, *about.tags)
    return has_text and (not wanted.tag or wanted.tag in about.tags) and wanted.id in {"", run.id}


def run_series(run: TrainerRun, points: int, within: TimeRange = EVER, shift_s: float = 0.0) -> RunSeries:
    """Returns the last known steps by number: as many as this process keeps, fewer for a run without detail.

    Args:
        run: The run whose steps are returned.
        points: The largest number of points.
        within: The range in which steps must end, by this process's clock.
        shift_s: Seconds to add to times of the trainer's clock for this process's.
    """
    rows = sorted(row for row in _rows(run) if within.since_s <= row[-1] + shift_s <= within.until_s)
    width = -(-len(rows) // points) or 1
    return series_of(run.id, (rows[first : first + width] for first in range(0, len(rows), width)), shift_s)


def _rows(run: TrainerRun) -> list[StepRow]:
    if run.detail is not None:
        return list(zip(*run.detail.steps.columns, run.detail.steps.at_s, strict=True))
    return [step_row(step) for step in run.ended_steps()]
