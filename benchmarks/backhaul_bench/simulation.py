"""What `backhaul simulate` measures: the cost of a segment, and steps to compare with the predictions."""

import os
import signal
import sys
from typing import Any

from backhaul.simulate.costs import Costs
from backhaul.simulate.predictions import Measured, measurable
from backhaul_bench.machine import describe
from backhaul_bench.noise import pin

_CORES = 2


def measure_costs(costs: Costs | None, *, with_steps: bool) -> tuple[dict[str, Any], Costs, dict[str, Measured]]:
    """Measures on two cores of this machine. Call it before torch is imported: it pins the process first.

    Args:
        costs: The costs of a segment; None: they are measured.
        with_steps: Whether to measure steps too, which takes about ten minutes.

    Returns:
        A description of the machine, the costs, and the measured steps by the name of their setup.

    Raises:
        OSError: The machine is not Linux or has fewer than two cores.
        RuntimeError: Segments fell back to the trainer.
        UnequalGradientsError: Gradients differ from those of plain training.
    """
    cores = sorted(os.sched_getaffinity(0))[:_CORES] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < _CORES:
        raise OSError(f"measuring needs Linux and {_CORES} cores")
    signal.signal(signal.SIGTERM, _interrupt)  # so that the stage ends its processes on SIGTERM too
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pin(cores[0])  # before torch starts threads
    import torch

    from backhaul_bench.calibrate import calibrate
    from backhaul_bench.measure_steps import measure
    from backhaul_bench.stage import Stage

    torch.set_num_threads(1)
    machine = describe(cores[0], cores[1], "cpu")
    if costs is None:
        with Stage.of(cores[0], cores[1], os.getpid()) as stage:
            print("measuring what a segment costs", file=sys.stderr, flush=True)
            costs = calibrate(stage)
    if not with_steps:
        return machine, costs, {}
    with Stage.of(cores[0], cores[1], os.getpid()) as stage:
        print("measuring steps", file=sys.stderr, flush=True)
        return machine, costs, measure(stage, measurable(costs))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
