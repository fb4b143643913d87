"""Measures what telemetry adds to a step.

Two sessions take turns, one with telemetry and one without, while a dashboard watches the worker of the first.
"""

from backhaul import Settings
from backhaul.demo.dashboard import DashboardProcess
from backhaul_lab.bench.figures import Verdict
from backhaul_lab.bench.outcomes import Outcome, of_rounds, without_value
from backhaul_lab.harness.rounds import Plan, added_by
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import BlockTraining, take_turns

BLOCKS, WIDTH, TOKENS = 8, 256, (4, 64)
STEPS = 3
"""Steps timed together, because one alone is too short to detect disturbances."""
PLAN = Plan(most=20, warm=2, limit_s=20.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure telemetry_added."""
    # Each session has a worker of its own: a shared one would already store the tensors that the second session sends.
    sessions = {
        "off": stage.session(returns="gradients", settings=Settings(telemetry=False)),
        "on": stage.session(returns="gradients"),
    }
    dashboard = DashboardProcess(sessions["on"].workers, "")  # It shares the trainer's core.
    try:
        if not dashboard.url:
            return [without_value("telemetry_added", Verdict.UNAVAILABLE, "the dashboard did not start")]
        trainings = [
            BlockTraining(name, BLOCKS, TOKENS, session.checkpoint, width=WIDTH) for name, session in sessions.items()
        ]
        rounds = take_turns(trainings, stage.cores, PLAN, STEPS)
    finally:
        dashboard.close()
    return [of_rounds("telemetry_added", rounds, added_by("on", "off"))]
