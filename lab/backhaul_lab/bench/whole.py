"""Measures steps whose first micro-batches a helper computes whole."""

from backhaul_lab.bench.deferred import HELPERS_SHARE, MANY, MICRO_BATCHES, PLAN, training
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.harness import throttle
from backhaul_lab.harness.rounds import Rounds, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import checkpoint_of_torch, take_turns


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure whole_equal."""
    return [_measured("whole_equal", *_rounds(stage))]


def measure_adapted(stage: Stage) -> list[Outcome]:
    """Measures the figure whole_lora."""
    return [_measured("whole_lora", *_rounds(stage, is_adapted=True))]


def measure_third(stage: Stage) -> list[Outcome]:
    """Measures the figure whole_third: the helper has less than a third of the trainer's speed."""
    with throttle.to(HELPERS_SHARE, stage.worker.pids, stage.trainer.number):
        return [_measured("whole_third", *_rounds(stage, micro_batches=MANY))]


def _rounds(stage: Stage, *, is_adapted: bool = False, micro_batches: int = MICRO_BATCHES) -> tuple[Rounds, int]:
    session = stage.session(returns="gradients", graphs="eager")
    trainings = [
        training(name, checkpoint, accumulate, micro_batches, is_adapted=is_adapted, is_whole=accumulate is not None)
        for name, checkpoint, accumulate in (
            ("torch", checkpoint_of_torch, None),
            ("whole", session.checkpoint, session.accumulate),
        )
    ]
    return take_turns(trainings, stage.cores, PLAN, leads_in=False), session.report().fallbacks


def _measured(name: str, rounds: Rounds, fallbacks: int) -> Outcome:
    return of_rounds(name, rounds, ratio_of("whole", "torch"), on_trainer(fallbacks))
