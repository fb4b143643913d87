"""Measures steps of 8 or 16 micro-batches of 256 tokens in an accumulation block of Backhaul."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from backhaul import Settings
from backhaul_lab.bench.outcomes import Outcome, of_counts, of_rounds
from backhaul_lab.bench.steps import BLOCKS, on_trainer
from backhaul_lab.harness import throttle
from backhaul_lab.harness.core_times import Core
from backhaul_lab.harness.processes import descendants
from backhaul_lab.harness.rounds import Alternative, Plan, interleave, ratio_of, timed
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.harness.training import MICRO_BATCH, WIDTH, BlockTraining, Checkpoint, checkpoint_of_torch, take_turns

if TYPE_CHECKING:
    from backhaul._session import Session

MICRO_BATCHES = 8
MANY = 16
"""Micro-batches of a step beside a slow helper, which needs time to contribute."""
HELPERS_SHARE = 0.3
"""Share of a core that the slow helper gets."""
RESTART_S = 60.0
"""Longest time that a killed worker takes to be replaced, in seconds."""
PLAN = Plan(most=8, warm=2, limit_s=100.0)  # the trainer's share follows the speeds measured in earlier blocks
BOUNDARY_BYTES = 4 * MICRO_BATCH[0] * MICRO_BATCH[1] * WIDTH


def training(
    name: str,
    checkpoint: Checkpoint | None,
    accumulate: Callable[[], AbstractContextManager[Any]] | None = None,
    micro_batches: int = MICRO_BATCHES,
    **options: Any,
) -> BlockTraining:
    """Returns a training with steps of several micro-batches.

    Args:
        name: Name of the training in messages.
        checkpoint: Function that runs a segment. None: without checkpointing.
        accumulate: Opens an accumulation block. None: each backward blocks.
        micro_batches: Number of micro-batches in a step.
        **options: Further arguments of `BlockTraining`.
    """
    options |= {"rows": micro_batches, "micro_batches": micro_batches, "accumulate": accumulate}
    return BlockTraining(name, BLOCKS, MICRO_BATCH, checkpoint, **options)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figures defer_equal, defer_equal_graphs, defer_vs_none and defer_keep_vs_none."""
    session = stage.session(returns="gradients")
    keeping = stage.session(session.workers, returns="gradients")  # each session measures what its own share takes
    kept = training("kept", keeping.checkpoint, partial(keeping.accumulate, "keep"))
    trainings, graphs = _three(stage, session)
    rounds = take_turns([training("none", None), *trainings, kept], stage.cores, PLAN, leads_in=False)
    note = on_trainer(session.report().fallbacks + keeping.report().fallbacks)
    return [
        of_rounds("defer_equal", rounds, ratio_of("deferred", "torch"), note),
        of_rounds("defer_equal_graphs", rounds, ratio_of("graphs", "torch"), on_trainer(graphs.report().fallbacks)),
        of_rounds("defer_vs_none", rounds, ratio_of("deferred", "none"), note),
        of_rounds("defer_keep_vs_none", rounds, ratio_of("kept", "none"), note),
    ]


def measure_adapted(stage: Stage) -> list[Outcome]:
    """Measures the figures defer_lora and defer_lora_graphs."""
    session = stage.session(returns="gradients")
    trainings, graphs = _three(stage, session, is_adapted=True)
    rounds = take_turns(trainings, stage.cores, PLAN, leads_in=False)
    return [
        of_rounds("defer_lora", rounds, ratio_of("deferred", "torch"), on_trainer(session.report().fallbacks)),
        of_rounds("defer_lora_graphs", rounds, ratio_of("graphs", "torch"), on_trainer(graphs.report().fallbacks)),
    ]


def measure_third(stage: Stage) -> list[Outcome]:
    """Measures defer_third and defer_third_graphs: the helper has less than a third of the trainer's speed."""
    session = stage.session(returns="gradients")
    trainings, graphs = _three(stage, session, micro_batches=MANY)
    with throttle.to(HELPERS_SHARE, stage.worker.pids, stage.trainer.number):
        rounds = take_turns(trainings, stage.cores, PLAN, leads_in=False)
    return [
        of_rounds("defer_third", rounds, ratio_of("deferred", "torch"), on_trainer(session.report().fallbacks)),
        of_rounds("defer_third_graphs", rounds, ratio_of("graphs", "torch"), on_trainer(graphs.report().fallbacks)),
    ]


def measure_lost(stage: Stage) -> list[Outcome]:
    """Measures the figure defer_lost_helper."""
    session = stage.session(returns="gradients")
    return [lost_helper("defer_lost_helper", stage, session, *_pair(session))]


def lost_helper(name: str, stage: Stage, session: "Session", torch: BlockTraining, deferred: BlockTraining) -> Outcome:
    """Measures the mean step of a training whose helper is killed halfway in every second block.

    Args:
        name: What the figure is called in `FIGURES`.
        stage: Where the helper runs.
        session: The session of `deferred`.
        torch: A training on the trainer alone, with which it is compared.
        deferred: The one with the helper.
    """
    (worker,), (supervisor, *_) = session._workers, stage.worker.pids

    def kill(number: int) -> None:
        if number == MICRO_BATCHES // 2:
            for pid in descendants(supervisor):
                os.kill(pid, signal.SIGKILL)

    def run(training: BlockTraining, *, is_lost: bool) -> None:
        training.happens = kill if is_lost else lambda _: None
        training.step()

    def measured(variant: Alternative, cores: Sequence[Core]) -> tuple[float, bool]:
        until_s = monotonic() + RESTART_S
        while worker.connection.up is None:
            if monotonic() > until_s:
                raise RuntimeError(f"the worker was not back within {RESTART_S:g} s")
            sleep(0.05)
        stage.worker.pids[:] = [supervisor, *descendants(supervisor)]
        return timed(variant, cores)

    variants = [
        Alternative("torch", torch.step),
        Alternative("lost", partial(run, deferred, is_lost=True)),
        Alternative("kept", partial(run, deferred, is_lost=False)),
    ]
    rounds = interleave(variants, stage.cores, PLAN, measured=measured)
    return of_rounds(name, rounds, lambda taken: (taken["lost"] + taken["kept"]) / 2 / taken["torch"])


def measure_wire(stage: Stage) -> list[Outcome]:
    """Measures the figure defer_wire, the bytes of a micro-batch with derived boundaries, without sums and weights."""
    session = stage.session(stage.tcp_worker(), returns="gradients", settings=Settings(boundaries="derive", **OVER_TCP))
    deferred = training("deferred", session.checkpoint, session.accumulate)
    deferred.forward_backward()  # sends programs and weights, which do not change afterwards
    values = []
    for _ in range(PLAN.most):
        deferred.clear_gradients()
        share = session._shares["recompute"].trainers_share()
        assert share is not None  # a block was measured
        before = session.report()
        deferred.forward_backward()
        after = session.report()
        assert after.block is not None
        last = after.block.trainer.segments - share * MICRO_BATCHES
        micro_batches = MICRO_BATCHES - (last == BLOCKS - share)  # without the last one if the trainer has computed it
        sum_bytes = (BLOCKS - share) * sum(parameter.nbytes for parameter in deferred.parameters) // BLOCKS
        moved = after.up_bytes + after.down_bytes - before.up_bytes - before.down_bytes - sum_bytes
        values.append(moved / micro_batches / (3 * BOUNDARY_BYTES))
    return [of_counts("defer_wire", values, on_trainer(session.report().fallbacks))]


def _pair(session: "Session", **options: Any) -> list[BlockTraining]:
    """Returns a training with torch's checkpoint and one in accumulation blocks."""
    return [
        training("torch", checkpoint_of_torch, **options),
        training("deferred", session.checkpoint, session.accumulate, **options),
    ]


def _three(stage: Stage, session: "Session", **options: Any) -> tuple[list[BlockTraining], "Session"]:
    """Returns the trainings of `_pair`, and one with graphs="eager" on the same worker, with its session."""
    graphs = stage.session(session.workers, returns="gradients", graphs="eager")
    return [*_pair(session, **options), training("graphs", graphs.checkpoint, graphs.accumulate, **options)], graphs
