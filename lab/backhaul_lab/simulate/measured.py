"""Measures what `backhaul simulate` predicts from. Imports torch only after pinning the process."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import thread_time
from typing import Any

from backhaul import Settings
from backhaul_lab.harness.core_times import pin
from backhaul_lab.harness.machine import describe
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.simulate.costs import Costs, KnownCosts
from backhaul_lab.simulate.layer_costs import segment_costs
from backhaul_runtime.errors import SettingError

BLOCKS = 3
ROUNDS = 7


def measure_on_cores(cores: Sequence[int]) -> tuple[dict[str, Any], KnownCosts]:
    """Measures what a segment costs on two cores of this machine, as `backhaul doctor` measures a user's model.

    The function pins the calling process to the trainer's core and sets OMP_NUM_THREADS, so call it once, from the main
    thread of a process that has not imported torch.

    Args:
        cores: Numbers of the trainer's core and of the worker's core.

    Raises:
        SettingError: The worker recomputed no segment.

    Returns:
        A description of the machine, as JSON, and the costs.
    """
    machine = describe(cores)
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pin(cores[0])  # Before torch is imported: its threads inherit the affinity of the thread that starts them.
    import torch

    from backhaul.demo.model import Block
    from backhaul.doctor.profile.measurement import measure_model
    from backhaul.doctor.profile.model_options import patient
    from backhaul.doctor.profile.target import Target
    from backhaul_lab.harness.training import LARGE, MICRO_BATCH, BlockTraining

    torch.set_num_threads(1)

    def calibrated(tokens: tuple[int, int], options: Mapping[str, Any]) -> Costs:
        how = " over TCP" * bool(options)
        print(f"measuring what a segment of {math.prod(tokens)} tokens costs{how}", file=sys.stderr, flush=True)
        training = BlockTraining("calibrated", BLOCKS, tokens, None)
        target = Target("a chain of blocks", training.module, training.module, (Block,))
        with Stage.of(cores[0], cores[1], os.getpid()) as stage:
            measured = measure_model(target, patient(Settings(**options), worker=stage.tcp_worker()), ROUNDS)
        if not measured.workers[0].speed(measured.plain):
            why = ", ".join(measured.workers[0].segment_times[0].reasons) or "no segment was sent to it"
            raise SettingError(f"the worker recomputed no segment: {why}")
        training.forward_backward()
        return replace(segment_costs(measured), optimizer_s=_cpu_s(training.optimize) / BLOCKS)

    return machine, KnownCosts(calibrated(LARGE, {}), calibrated(LARGE, OVER_TCP), calibrated(MICRO_BATCH, {}))


def _cpu_s(work: Callable[[], None]) -> float:
    """Returns the CPU seconds of an undisturbed call of a function."""
    from backhaul.doctor.profile.plain import undisturbed

    ends_s = [thread_time()]
    for _ in range(ROUNDS):
        work()
        ends_s.append(thread_time())
    return undisturbed([end_s - began_s for began_s, end_s in pairwise(ends_s)])
