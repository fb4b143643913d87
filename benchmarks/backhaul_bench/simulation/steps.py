"""Measures the steps that `backhaul simulate` predicts, with the method of the benchmarks."""

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext

from backhaul.simulate.costs import Setup
from backhaul.simulate.deferred import BlockSetup
from backhaul.simulate.predictions import Measured
from backhaul_bench import throttle
from backhaul_bench.deferred import AccumulatingTraining
from backhaul_bench.rounds import Alternative, Rounds, timed
from backhaul_bench.simulation.throttled_proxy import ThrottledProxy
from backhaul_bench.stage import Stage
from backhaul_bench.training import LARGE, Training, checkpoint_of_torch, compare

LIMIT_S, BLOCKS_LIMIT_S = 420.0, 60.0
"""Seconds after which no round begins; for accumulation blocks those of each setup."""
LEARNING_BLOCKS = 3
"""Blocks after which the trainer's share follows the measured speeds."""


def measure(stage: Stage, setups: dict[str, Setup]) -> dict[str, Measured]:
    """Measures steps of each setup. All workers run on the worker's core.

    Args:
        stage: Cores and processes of the measurement.
        setups: Setups to measure, by name.

    Returns:
        The measured steps, by the name of their setup.

    Raises:
        UnequalGradientsError: Gradients differ from those of training without checkpointing.
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
        rounds = _in_turns(
            stage, [Alternative(name, training.step, training.step) for name, training in trainings.items()]
        )
        most_rounds = max(len(of_setup.measured) for of_setup in rounds.values())
        for count in sorted({setup.segments for setup in setups.values()}):
            plain = Training(f"{count} blocks without checkpointing", count, LARGE, None)
            plain.steps(2 * (1 + most_rounds))
            compare([plain, *(trainings[name] for name, setup in setups.items() if setup.segments == count)])
        if any(session.report().fallbacks for session in sessions):
            raise RuntimeError(
                "segments fell back to the trainer, so the measured steps cannot be compared with the predicted ones"
            )
        for session in sessions:
            session.close()
    return _results(rounds)


def measure_blocks(stage: Stage, setups: dict[str, BlockSetup]) -> dict[str, Measured]:
    """Measures steps with an accumulation block and the optimizer, with one worker.

    Args:
        stage: Cores and processes of the measurement.
        setups: Blocks to measure, by name, each with one worker that is at most as fast as the trainer.

    Returns:
        The measured steps, by the name of their setup.

    Raises:
        UnequalGradientsError: Gradients differ from those of torch's checkpoint.
        RuntimeError: A segment fell back to the trainer.
    """
    rounds: dict[str, Rounds] = {}
    for name, setup in setups.items():
        (speed,) = setup.speeds
        session = stage.session(returns="gradients")
        plain = AccumulatingTraining("torch", checkpoint_of_torch, micro_batches=setup.micro_batches)
        training = AccumulatingTraining(name, session.checkpoint, session.accumulate, micro_batches=setup.micro_batches)
        with throttle.to(speed, stage.worker.pids, stage.trainer.number) if speed < 1 else nullcontext():
            for _ in range(LEARNING_BLOCKS):
                training.step()
            rounds |= _in_turns(stage, [Alternative(name, training.step)], limit_s=BLOCKS_LIMIT_S)
        plain.steps(LEARNING_BLOCKS + 1 + len(rounds[name].measured))
        compare([plain, training])
        if session.report().fallbacks:
            raise RuntimeError("segments fell back to the trainer, so the measured blocks cannot be compared")
        session.close()
    return _results(rounds)


def _results(rounds: Mapping[str, Rounds]) -> dict[str, Measured]:
    results = {}
    for name, of_setup in rounds.items():
        spread = of_setup.spread(lambda taken: taken["step"])
        results[name] = Measured(spread.value, spread.low, spread.high, of_setup.kept, of_setup.is_conclusive)
    return results


def _in_turns(stage: Stage, variants: list[Alternative], limit_s: float = LIMIT_S) -> dict[str, Rounds]:
    """Runs steps in turns until each variant has enough undisturbed ones. Variants are not compared with each other."""
    rounds = {variant.name: Rounds() for variant in variants}
    for variant in variants:
        timed(variant, stage.cores)
    began_s = time.monotonic()
    while not all(of_setup.is_conclusive for of_setup in rounds.values()) and time.monotonic() - began_s < limit_s:
        for variant in variants:
            taken_s, is_quiet = timed(variant, stage.cores)
            rounds[variant.name].add({"step": taken_s}, is_quiet=is_quiet)
    return rounds
