"""Measures how much the two cores slow each other down.

It compares a forward while the worker's core computes the same with a forward alone.
`python -m backhaul_lab.bench.cores` computes on the worker's core. Backhaul is not used, so the
ratio bounds the gain from recomputing concurrently with forward.
"""

import select
import signal
import sys

import torch

from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import BLOCKS
from backhaul_lab.harness.processes import MODULE
from backhaul_lab.harness.rounds import Alternative, Plan, interleave, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import LARGE, BlockTraining

PLAN = Plan(most=15, limit_s=20.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure cores_together."""
    training = BlockTraining("none", BLOCKS, LARGE, None)
    other, _ = stage.start([*MODULE, "backhaul_lab.bench.cores"])
    other.send_signal(signal.SIGSTOP)

    def alone() -> None:
        training.forward()

    def together() -> None:
        other.send_signal(signal.SIGCONT)
        try:
            training.forward()
        finally:
            other.send_signal(signal.SIGSTOP)

    try:
        rounds = interleave([Alternative("alone", alone), Alternative("together", together)], stage.cores, PLAN)
    finally:
        other.send_signal(signal.SIGCONT)
    return [of_rounds("cores_together", rounds, ratio_of("together", "alone"))]


def _compute() -> None:
    torch.set_num_threads(1)
    training = BlockTraining("other", BLOCKS, LARGE, None)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:  # Readable means closed: the parent process has ended.
        training.forward()


if __name__ == "__main__":
    _compute()
