"""What is said where the segments or timelines of runs are not kept: the dashboard has room for those of a few runs."""

import time
from collections.abc import Sequence
from typing import Literal

from backhaul_server.dashboard.collect.trainers import DETAILED_RUNS
from backhaul_server.dashboard.collect.training_runs import TrainerRun


def why_missing(what: Literal["Segments", "Timelines"], runs: Sequence[TrainerRun | None]) -> str:
    """Returns a sentence on runs whose segments or timelines are not kept, and what to do; empty if those of all are.

    Args:
        what: What is not kept.
        runs: All runs that were asked for; None stands for a run that only the history knows.
    """
    missing = [run for run in runs if run is None or run.detail is None]
    if not missing:
        return ""
    at_a_time = f"{what} are kept for {DETAILED_RUNS} runs at a time"
    if len(missing) < len(runs):
        return f"{at_a_time}: those of {len(missing)} of {len(runs)} runs are not shown."
    these, are, it = ("this run", "is", "it") if len(runs) == 1 else ("these runs", "are", "they")
    now_s = time.time()
    if any(run is not None and run.state(now_s) == "running" for run in missing):
        return f"{at_a_time}, and others still report. End one of them, or start another dashboard for {these}."
    return (
        f"{what} are kept for the last {DETAILED_RUNS} runs that reported since the dashboard was started, and {these} "
        f"{are} not among them. The table of runs shows what {it} cost and saved."
    )
