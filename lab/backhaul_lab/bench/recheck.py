"""Measures what rechecking a hundredth of the gradients adds to a step."""

from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.harness.rounds import Plan, added_by
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import BlockTraining, take_turns

BLOCKS, WIDTH, TOKENS = 8, 256, (4, 64)
SHARE = 0.01
STEPS = 25
"""Steps timed together: of their 200 segments about 2 are rechecked."""
PLAN = Plan(most=20, limit_s=90.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure recheck_added."""
    # Each session has a worker of its own: a shared one would already store the tensors that the second session sends.
    sessions = {
        "off": stage.session(returns="gradients"),
        "on": stage.session(returns="gradients", recheck=SHARE),
    }
    trainings = [
        BlockTraining(name, BLOCKS, TOKENS, session.checkpoint, width=WIDTH) for name, session in sessions.items()
    ]
    rounds = take_turns(trainings, stage.cores, PLAN, STEPS)
    rechecked = sum(segment.rechecked for segment in sessions["on"].report().segments)
    return [of_rounds("recheck_added", rounds, added_by("on", "off"), f"{rechecked} segments were rechecked")]
