"""Measures steps of 8 blocks at 64 tokens, where the overhead per segment is a large part of the step."""

from collections.abc import Sequence

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
    """Measures the figures small_frozen_vs_torch and small_frozen_graphs."""
    return _measure("small_frozen", stage, [stage.tcp_worker(), stage.tcp_worker()], is_adapted=True)


def measure_trainable(stage: Stage) -> list[Outcome]:
    """Measures the figures small_trainable_vs_torch and small_trainable_graphs."""
    return _measure("small_trainable", stage, [None, None], is_adapted=False)


def _measure(name: str, stage: Stage, workers: Sequence[str | None], *, is_adapted: bool) -> list[Outcome]:
    sessions = {  # each has a worker of its own, which would already store what the other session sends
        way: stage.session(
            worker, returns="gradients", graphs=graphs, settings=Settings(**OVER_TCP) if worker else None
        )
        for (way, graphs), worker in zip({"vs_torch": "off", "graphs": "eager"}.items(), workers, strict=True)
    }
    trainings = [
        BlockTraining("torch", BLOCKS, SMALL, checkpoint_of_torch, is_adapted=is_adapted),
        *(BlockTraining(way, BLOCKS, SMALL, sessions[way].checkpoint, is_adapted=is_adapted) for way in sessions),
    ]
    rounds = take_turns(trainings, stage.cores, PLAN, STEPS)
    return [
        of_rounds(f"{name}_{way}", rounds, ratio_of(way, "torch"), on_trainer(session.report().fallbacks))
        for way, session in sessions.items()
    ]
