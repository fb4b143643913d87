"""What telemetry adds to a step: two sessions take turns, one of them without it, while a dashboard watches both."""

from functools import partial

from backhaul.demo.dashboard import DashboardProcess
from backhaul_bench.figures import Verdict
from backhaul_bench.outcomes import Outcome, of_rounds, without_value
from backhaul_bench.rounds import Alternative, Plan, Round, interleave
from backhaul_bench.stage import Stage
from backhaul_bench.training import Training, compare

BLOCKS, WIDTH, TOKENS = 8, 256, (4, 64)
STEPS = 3
"""Timed together: one alone is too short to tell whether it was disturbed."""
PLAN = Plan(most=20, warm=2, limit_s=20.0)


def measure(stage: Stage) -> list[Outcome]:
    """telemetry_added."""
    # A worker each: one would have from the first session what the other is to send.
    sessions = {
        "off": stage.session(returns="gradients", telemetry=False),
        "on": stage.session(returns="gradients"),
    }
    dashboard = DashboardProcess(sessions["on"].workers, "")  # in use it has a machine of its own, here it has our core
    try:
        if not dashboard.url:
            return [without_value("telemetry_added", Verdict.UNAVAILABLE, "no dashboard comes up")]
        trainings = [
            Training(name, BLOCKS, TOKENS, session.checkpoint, width=WIDTH) for name, session in sessions.items()
        ]
        variants = [Alternative(training.name, partial(training.steps, STEPS), training.step) for training in trainings]
        rounds = interleave(variants, stage.cores, PLAN, lambda: compare(trainings))
    finally:
        dashboard.close()
    return [of_rounds("telemetry_added", rounds, _added)]


def _added(taken: Round) -> float:
    return taken["on"] / taken["off"] - 1
