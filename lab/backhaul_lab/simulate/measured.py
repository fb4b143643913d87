"""Measures what `backhaul simulate` predicts from. Imports torch only after pinning the process."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from backhaul_lab.harness.core_times import pin
from backhaul_lab.harness.machine import describe
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.simulate.costs import Costs, KnownCosts


def measure_on_cores(cores: Sequence[int]) -> tuple[dict[str, Any], KnownCosts]:
    """Measures what a segment costs on two cores of this machine.

    The function pins the calling process to the trainer's core and sets OMP_NUM_THREADS, so call it once, from the main
    thread of a process that has not imported torch.

    Args:
        cores: Numbers of the trainer's core and of the worker's core.

    Returns:
        A description of the machine, as JSON, and the costs.
    """
    machine = describe(cores)
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pin(cores[0])  # Before torch is imported: its threads inherit the affinity of the thread that starts them.
    import torch

    from backhaul_lab.harness.training import LARGE, MICRO_BATCH
    from backhaul_lab.simulate.calibration import calibrate

    torch.set_num_threads(1)

    def calibrated(tokens: tuple[int, int], options: Mapping[str, Any]) -> Costs:
        how = " over TCP" * bool(options)
        print(f"measuring what a segment of {math.prod(tokens)} tokens costs{how}", file=sys.stderr, flush=True)
        with Stage.of(cores[0], cores[1], os.getpid()) as stage:
            session = stage.session(stage.tcp_worker() if options else None, returns="gradients", **options)
            return calibrate(session, stage, tokens)

    return machine, KnownCosts(calibrated(LARGE, {}), calibrated(LARGE, OVER_TCP), calibrated(MICRO_BATCH, {}))
