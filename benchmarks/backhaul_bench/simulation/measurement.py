"""The entry point through which `backhaul simulate` measures. It imports torch only after pinning the process."""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from backhaul.simulate.costs import Costs, KnownCosts
from backhaul.simulate.predictions import Measurements, measurable, measurable_blocks
from backhaul_bench.machine import describe
from backhaul_bench.noise import pin
from backhaul_bench.stage import Stage


def measure_on_cores(cores: Sequence[int], costs: KnownCosts | None, *, with_steps: bool) -> Measurements:
    """Measures a segment's costs and, if asked, steps on two cores of this machine.

    The function pins the calling process to the trainer's core and sets OMP_NUM_THREADS, so call it once, from the main
    thread of a process that has not imported torch.

    Args:
        cores: Numbers of the trainer's core and of the worker's core.
        costs: Costs that are known already. None: they are measured.
        with_steps: Whether `measurable(costs.steps)` and `measurable_blocks()` are measured too.

    Raises:
        UnequalGradientsError: Gradients differ from those of training without a worker.
        RuntimeError: A segment fell back to the trainer.
    """
    machine = describe(cores[0], cores[1], "cpu")
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pin(cores[0])  # Before torch is imported: its threads inherit the affinity of the thread that starts them.
    import torch

    from backhaul_bench.deferred import MICRO_BATCH
    from backhaul_bench.simulation.calibration import calibrate
    from backhaul_bench.simulation.steps import measure, measure_blocks
    from backhaul_bench.simulation.throttled_proxy import ThrottledProxy
    from backhaul_bench.training import LARGE

    torch.set_num_threads(1)

    def calibrated(tokens: tuple[int, int], *, over_tcp: bool = False) -> Costs:
        how = " over TCP" * over_tcp
        print(f"measuring what a segment of {math.prod(tokens)} tokens costs{how}", file=sys.stderr, flush=True)
        with ExitStack() as opened:
            stage = opened.enter_context(Stage.of(cores[0], cores[1], os.getpid()))
            # Through the proxy that limits the bandwidth of steps, which runs on the trainer's core.
            proxy = opened.enter_context(ThrottledProxy(stage.tcp_worker(), 0)) if over_tcp else None
            session = stage.session(proxy.address if proxy else None, returns="gradients")
            opened.callback(session.close)  # before the proxy ends
            return calibrate(session, stage, tokens)

    if costs is None:
        costs = KnownCosts(calibrated(LARGE), calibrated(LARGE, over_tcp=True), calibrated(MICRO_BATCH))
    if not with_steps:
        return Measurements(machine, costs, {}, {})
    print("measuring accumulation blocks", file=sys.stderr, flush=True)
    with Stage.of(cores[0], cores[1], os.getpid()) as stage:
        blocks = measure_blocks(stage, measurable_blocks())
    print("measuring steps", file=sys.stderr, flush=True)
    with Stage.of(cores[0], cores[1], os.getpid()) as stage:
        return Measurements(machine, costs, measure(stage, measurable(costs.steps)), blocks)
