"""The entry point through which `backhaul simulate` measures. It imports torch only after pinning the process."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from backhaul.simulate.costs import Costs
from backhaul.simulate.predictions import Measured, measurable
from backhaul_bench.machine import describe
from backhaul_bench.noise import pin
from backhaul_bench.stage import Stage


def measure_on_cores(
    cores: Sequence[int], costs: Costs | None, *, with_steps: bool
) -> tuple[dict[str, Any], Costs, Mapping[str, Measured]]:
    """Measures a segment's costs and, if asked, steps on two cores of this machine.

    The function pins the calling process to the trainer's core and sets OMP_NUM_THREADS, so call it once, from the main
    thread of a process that has not imported torch.

    Args:
        cores: Numbers of the trainer's core and of the worker's core.
        costs: Costs that are known already. None: they are measured.
        with_steps: Whether the steps of `measurable(costs)` are measured too.

    Returns:
        A description of the machine as JSON, the costs, and the measured steps by the name of their setup.

    Raises:
        UnequalGradientsError: Gradients differ from those of training without a worker.
        RuntimeError: A segment fell back to the trainer.
    """
    machine = describe(cores[0], cores[1], "cpu")
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pin(cores[0])  # Before torch is imported: its threads inherit the affinity of the thread that starts them.
    import torch

    from backhaul_bench.simulation.calibration import calibrate
    from backhaul_bench.simulation.steps import measure

    torch.set_num_threads(1)
    if costs is None:
        with Stage.of(cores[0], cores[1], os.getpid()) as stage:
            print("measuring what a segment costs", file=sys.stderr, flush=True)
            costs = calibrate(stage)
    if not with_steps:
        return machine, costs, {}
    with Stage.of(cores[0], cores[1], os.getpid()) as stage:
        print("measuring steps", file=sys.stderr, flush=True)
        return machine, costs, measure(stage, measurable(costs))
