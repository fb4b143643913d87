"""The numbers of the headline."""

from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.collect.totals import WINDOW_S, Totals
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.schemas.now import Overview

_STEPS_WINDOW_S = 30.0
_COST_WINDOW_S = 60.0


def overview(watch: Watch, now_s: float, history_error: str) -> Overview:
    """Returns the headline numbers over all workers and runs. A value that is not known now is None."""
    runs = list(watch.trainers)
    running = [run for run in runs if run.state(now_s) == "running"]
    cost = Totals.of_all(run.recent.since(now_s - _COST_WINDOW_S) for run in runs)
    recent = Totals.of_all(run.recent.since(now_s - WINDOW_S) for run in runs)
    recomputed = recent.remote + recent.on_trainer
    is_answered = any(worker.state != "unreachable" for worker in watch.workers)

    return Overview(
        at_s=now_s,
        workers=len(watch.workers),
        healthy_workers=sum(worker.state == "serving" for worker in watch.workers),
        heard_at_s=max((worker.answered_at_s for worker in watch.workers), default=0.0) or None,
        stepped_at_s=max((run.stepped_at_s for run in runs), default=0.0) or None,
        sessions=_sessions(watch) if is_answered else None,
        steps_per_s=sum(_steps_per_s(run, now_s) for run in runs) if is_answered else None,
        saved_bytes=min(LARGEST, sum(run.last_step.saved_bytes for run in running)) if running else None,
        peak_saved_bytes=min(LARGEST, sum(run.last_step.peak_saved_bytes for run in running)) if running else None,
        added_ms_per_step=cost.per_step_ms(cost.added_s - cost.spared_s),
        wait_ms_per_step=cost.per_step_ms(cost.wait_s),
        overhead_ms_per_step=cost.per_step_ms(cost.overhead_s),
        spared_ms_per_step=cost.per_step_ms(cost.spared_s),
        remote_share=recent.remote / recomputed if recomputed else None,
        fallbacks=int(recent.fallbacks) if is_answered else None,
        dropped_reports=min(LARGEST, sum(run.dropped for run in runs)),
        history=history_error,
    )


def _sessions(watch: Watch) -> int:
    """Returns the number of runs with a session. Sessions that name no run count as one run each."""
    named, nameless = set(), 0
    for worker in watch.workers:
        for session in worker.sessions():
            if session.run:
                named.add(session.run)
            else:
                nameless += 1
    return len(named) + nameless


def _steps_per_s(run: TrainerRun, now_s: float) -> float:
    """Returns the rate over the last 30 seconds, or since the first step of the run if that is more recent."""
    if run.steps == 0:
        return 0.0
    window_s = min(_STEPS_WINDOW_S, max(1.0, now_s - run.first_step_at_s))
    return run.recent.since(now_s - window_s).steps / window_s
