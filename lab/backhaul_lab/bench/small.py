"""Measures steps of 8 blocks at 64 tokens, where the overhead per segment is a large part of the step."""

from backhaul import Settings
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import BLOCKS, on_trainer
from backhaul_lab.harness.rounds import Plan, ratio_of
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.harness.training import SMALL, BlockTraining, checkpoint_of_torch, take_turns

STEPS = 4
"""Steps timed together, because one alone is too short to detect disturbances."""
PLAN = Plan(most=20, warm=2, limit_s=40.0)


def measure_frozen(stage: Stage) -> list[Outcome]:
    """Measures the figure small_frozen_vs_torch."""
    return [_measure("small_frozen_vs_torch", stage, stage.tcp_worker(), is_adapted=True)]


def measure_trainable(stage: Stage) -> list[Outcome]:
    """Measures the figure small_trainable_vs_torch."""
    return [_measure("small_trainable_vs_torch", stage, None, is_adapted=False)]


def _measure(name: str, stage: Stage, worker: str | None, *, is_adapted: bool) -> Outcome:
    session = stage.session(worker, returns="gradients", settings=Settings(**OVER_TCP) if worker else None)
    trainings = [
        BlockTraining("torch", BLOCKS, SMALL, checkpoint_of_torch, is_adapted=is_adapted),
        BlockTraining("gradients", BLOCKS, SMALL, session.checkpoint, is_adapted=is_adapted),
    ]
    rounds = take_turns(trainings, stage.cores, PLAN, STEPS)
    return of_rounds(name, rounds, ratio_of("gradients", "torch"), on_trainer(session.report().fallbacks))
