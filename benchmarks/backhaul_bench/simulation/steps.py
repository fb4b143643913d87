"""Measures steps that were predicted, by the method of the benchmarks."""

import time
from contextlib import ExitStack

from backhaul.simulate.costs import Setup
from backhaul.simulate.predictions import Measured
from backhaul_bench.rounds import Alternative, Rounds, timed
from backhaul_bench.simulation.throttled_proxy import ThrottledProxy
from backhaul_bench.stage import Stage
from backhaul_bench.training import LARGE, Training, compare

LIMIT_S = 420.0
"""No round begins later."""


def measure(stage: Stage, setups: dict[str, Setup]) -> dict[str, Measured]:
    """Steps of each setup, by its name. All workers are on the worker's core.

    Raises:
        UnequalGradientsError: Gradients differ from those of training plainly.
        RuntimeError: A segment fell back to the trainer.
    """
    with ExitStack() as opened:
        trainings: dict[str, Training] = {}
        sessions = []
        for name, setup in setups.items():
            workers = None
            if setup.workers > 1 or setup.bytes_per_s:
                workers = ",".join(stage.tcp_worker() for _ in range(setup.workers))
            if setup.bytes_per_s:
                assert workers is not None
                workers = opened.enter_context(ThrottledProxy(workers, setup.bytes_per_s)).address
            session = stage.session(workers, returns="gradients", memory_bytes=setup.memory_bytes)
            sessions.append(session)
            trainings[name] = Training(name, setup.segments, LARGE, session.checkpoint)
        rounds = _in_turns(stage, [Alternative(name, each.step, each.step) for name, each in trainings.items()])
        taken = max(len(each.found) for each in rounds.values())
        for count in sorted({setup.segments for setup in setups.values()}):
            plain = Training(f"{count} blocks, plainly", count, LARGE, None)
            plain.steps(2 * (1 + taken))
            compare([plain, *(trainings[name] for name, setup in setups.items() if setup.segments == count)])
        if any(session.report().fallbacks for session in sessions):
            raise RuntimeError("segments fell back to the trainer: what was measured is not what was predicted")
        for session in sessions:
            session.close()
    found = {}
    for name, each in rounds.items():
        spread = each.spread(lambda taken: taken["step"])
        found[name] = Measured(spread.value, spread.low, spread.high, each.kept, each.is_conclusive)
    return found


def _in_turns(stage: Stage, variants: list[Alternative]) -> dict[str, Rounds]:
    """Steps until enough of each were not disturbed: their times are not compared with each other."""
    rounds = {variant.name: Rounds() for variant in variants}
    for variant in variants:
        timed(variant, stage.cores)
    began_s = time.monotonic()
    while not all(found.is_conclusive for found in rounds.values()) and time.monotonic() - began_s < LIMIT_S:
        for variant in variants:
            taken_s, is_quiet = timed(variant, stage.cores)
            rounds[variant.name].add({"step": taken_s}, is_quiet=is_quiet)
    return rounds
