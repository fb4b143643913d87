"""Measures steps of 8 micro-batches of 256 tokens whose backward passes a worker finishes in an accumulation block."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from backhaul_bench.outcomes import Outcome, of_rounds
from backhaul_bench.rounds import Alternative, Plan, Rounds, interleave, ratio_of
from backhaul_bench.stage import Stage
from backhaul_bench.steps import BLOCKS, on_trainer
from backhaul_bench.training import Checkpoint, Training, checkpoint_of_torch, compare

MICRO_BATCH = (1, 256)
"""Batch size and length of a micro-batch."""
MICRO_BATCHES = 8
PLAN = Plan(most=10, warm=3, limit_s=80.0)  # the trainer's share follows the speeds measured in earlier blocks


class AccumulatingTraining(Training):
    """A training whose steps have several micro-batches.

    Args:
        name: Name of the training in messages.
        checkpoint: Function that runs a segment. None: without checkpointing.
        accumulate: Opens an accumulation block. None: each backward blocks.
        is_adapted: Whether blocks are frozen and have LoRA adapters.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint | None,
        accumulate: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        is_adapted: bool,
    ) -> None:
        super().__init__(name, BLOCKS, MICRO_BATCH, checkpoint, is_adapted=is_adapted)
        self._accumulate = accumulate

    def forward_backward(self) -> None:
        """Runs the micro-batches of a step, without the optimizer."""
        if self._accumulate is None:
            for _ in range(MICRO_BATCHES):
                self.forward().backward()  # type: ignore[no-untyped-call]
        else:
            with self._accumulate() as block:
                for _ in range(MICRO_BATCHES):
                    block.backward(self.forward())


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figures defer_equal and defer_vs_none."""
    rounds, note = _measure(stage, is_adapted=False)
    return [
        of_rounds("defer_equal", rounds, ratio_of("deferred", "torch"), note),
        of_rounds("defer_vs_none", rounds, ratio_of("deferred", "none"), note),
    ]


def measure_adapted(stage: Stage) -> list[Outcome]:
    """Measures the figure defer_lora."""
    rounds, note = _measure(stage, is_adapted=True)
    return [of_rounds("defer_lora", rounds, ratio_of("deferred", "torch"), note)]


def _measure(stage: Stage, *, is_adapted: bool) -> tuple[Rounds, str]:
    session = stage.session(returns="gradients")
    trainings = [
        AccumulatingTraining("none", None, is_adapted=is_adapted),
        AccumulatingTraining("torch", checkpoint_of_torch, is_adapted=is_adapted),
        AccumulatingTraining("deferred", session.checkpoint, session.accumulate, is_adapted=is_adapted),
    ]
    variants = [Alternative(training.name, training.step) for training in trainings]
    rounds = interleave(variants, stage.cores, PLAN, lambda: compare(trainings))
    return rounds, on_trainer(session.report().fallbacks)
