"""Measures steps whose first micro-batches a helper computes whole."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backhaul import Settings
from backhaul_lab.bench.deferred import HELPERS_SHARE, MANY, MICRO_BATCHES, PLAN, lost_helper, training
from backhaul_lab.bench.outcomes import Outcome, of_counts, of_rounds
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.harness import throttle
from backhaul_lab.harness.rounds import Rounds, ratio_of
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.harness.training import BlockTraining, checkpoint_of_torch, take_turns

if TYPE_CHECKING:
    from backhaul._session import Session

TOKENS, WIRE_WIDTH, WIRE_BATCH = 64, 16, (8, 2048)


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


def measure_lost(stage: Stage) -> list[Outcome]:
    """Measures the figure whole_lost_helper."""
    session = stage.session(returns="gradients", graphs="eager")
    return [lost_helper("whole_lost_helper", stage, session, *_trainings(session))]


def measure_wire(stage: Stage) -> list[Outcome]:
    """Measures the figure whole_wire: what a micro-batch adds to the traffic of a block, over its token ids."""
    session = stage.session(stage.tcp_worker(), returns="gradients", settings=Settings(whole_recheck=0.0, **OVER_TCP))
    model = nn.Sequential(nn.Embedding(TOKENS, WIRE_WIDTH), nn.Linear(WIRE_WIDTH, TOKENS))

    def compute_loss(tokens: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def moved_bytes(micro_batches: int) -> int:
        before = session.report()
        with session.accumulate() as block:
            for _ in range(micro_batches):
                block.run(compute_loss, torch.randint(TOKENS, WIRE_BATCH))
        after = session.report()
        model.zero_grad()
        return after.up_bytes + after.down_bytes - before.up_bytes - before.down_bytes

    session._whole_shares.first = lambda: MANY  # type: ignore[method-assign]
    moved_bytes(MICRO_BATCHES)  # sends the program and the weights, which do not change
    input_bytes = torch.empty(WIRE_BATCH, dtype=torch.int64).nbytes
    values = [
        (moved_bytes(MANY) - moved_bytes(MICRO_BATCHES)) / (MANY - MICRO_BATCHES) / input_bytes
        for _ in range(PLAN.most)
    ]
    return [of_counts("whole_wire", values, on_trainer(session.report().fallbacks))]


def _rounds(stage: Stage, *, is_adapted: bool = False, micro_batches: int = MICRO_BATCHES) -> tuple[Rounds, int]:
    session = stage.session(returns="gradients", graphs="eager")
    trainings = _trainings(session, micro_batches=micro_batches, is_adapted=is_adapted)
    return take_turns(trainings, stage.cores, PLAN, leads_in=False), session.report().fallbacks


def _trainings(session: "Session", **options: Any) -> list[BlockTraining]:
    return [
        training("torch", checkpoint_of_torch, **options),
        training("whole", session.checkpoint, session.accumulate, is_whole=True, **options),
    ]


def _measured(name: str, rounds: Rounds, fallbacks: int) -> Outcome:
    return of_rounds(name, rounds, ratio_of("whole", "torch"), on_trainer(fallbacks))
