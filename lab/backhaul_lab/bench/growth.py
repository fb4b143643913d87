"""Measures whether later segments of a step cost more than the first ones."""

from functools import partial

from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.harness.rounds import Alternative, Plan, Round, interleave
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import BlockTraining, checkpoint_of_torch, compare

FEW, MANY = 8, 64
WIDTH = 128
TOKENS = (1, 256)
STEPS_OF_FEW = 8
"""Steps timed together, so that both variants take about equally long."""
PLAN = Plan(most=15, warm=2, limit_s=50.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure growth."""
    session = stage.session(returns="gradients")
    pairs = {
        count: [
            BlockTraining("backhaul", count, TOKENS, session.checkpoint, width=WIDTH),
            BlockTraining("torch", count, TOKENS, checkpoint_of_torch, width=WIDTH),
        ]
        for count in (FEW, MANY)
    }
    few, many = pairs[FEW][0], pairs[MANY][0]
    variants = [
        Alternative("few", partial(few.steps, STEPS_OF_FEW), few.step),
        Alternative("many", many.step, many.step),
    ]

    def equal() -> None:
        pairs[FEW][1].steps(STEPS_OF_FEW + 1)
        pairs[MANY][1].steps(2)
        for pair in pairs.values():
            compare(pair)

    rounds = interleave(variants, stage.cores, PLAN, equal)
    return [of_rounds("growth", rounds, _growth, on_trainer(session.report().fallbacks))]


def _growth(taken: Round) -> float:
    few_s = taken["few"] / STEPS_OF_FEW
    return (taken["many"] - few_s) / (MANY - FEW) / (few_s / FEW)
