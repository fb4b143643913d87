"""Measures what one segment costs, by CPU clocks, so that neighbours don't count.

NOTE [Costs]
A plain training and one with a worker have BLOCKS blocks each. Forward, backward and optimizer are measured one after
the other, each until trainer and worker have nothing left to do, so what belongs to which is known. On each side the
thread that computes (the one that ran most) is told from those that send and receive. The median of ROUNDS counts.
"""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from backhaul.demo.model import Block
from backhaul.simulate.costs import Costs
from backhaul_bench.noise import CoreTimes, settle
from backhaul_bench.stage import Stage
from backhaul_bench.training import DROPOUT, LARGE, WIDTH, Training
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.tensors.layout import copy_exact

BLOCKS = 3
ROUNDS = 7
_WARM = 2

Seconds = dict[str, float]
"""By what it was spent on, per block."""


def calibrate(stage: Stage) -> Costs:
    """Costs of a block of the benchmarks, its input 1,024 tokens."""
    session = stage.session(returns="gradients")
    plain = Training("plain", BLOCKS, LARGE, None)
    ours = Training("ours", BLOCKS, LARGE, session.checkpoint)
    rounds = [(_phases(stage, plain), _phases(stage, ours)) for _ in range(_WARM + ROUNDS)][_WARM:]

    def median(side: int, name: str) -> float:
        return statistics.median(found[side][name] for found in rounds)

    forward_s, backward_s = median(0, "trainer forward"), median(0, "trainer backward")
    return Costs(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=median(0, "trainer optimizer"),
        record_s=max(0.0, median(1, "trainer forward") - forward_s),
        upload_s=median(1, "trainer's others forward"),
        ingest_s=median(1, "worker's others forward"),
        replay_s=median(1, "worker forward"),
        replay_backward_s=median(1, "worker backward"),
        answer_s=median(1, "worker's others backward"),
        finish_s=median(1, "trainer backward") + median(1, "trainer's others backward"),
        weight_bytes=plain.parameter_bytes // BLOCKS,
        boundary_bytes=plain.x.nbytes,
        footprint=footprint(),
    )


def footprint() -> Footprint:
    """Of a block's replay, found by one here."""
    block, x = Block(WIDTH, DROPOUT), torch.randn(*LARGE, WIDTH, requires_grad=True)
    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        y = block(x)
    program = recorder.finish([y])
    assert program is not None, recorder.recording.refusal
    sources = [source.value for source in recorder.recording.sources]
    states = recorder.recording.generator_states
    found = Replay(program, sources, states, is_own=True, is_measured=True).footprint
    assert found is not None
    return found


def _phases(stage: Stage, training: Training) -> Seconds:
    """A step of a training, phase by phase."""
    found: Seconds = {}
    losses: list[Tensor] = []

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    training.clear_gradients()
    _spend(stage, "forward", lambda: losses.append(training.forward()), found)
    _spend(stage, "backward", backward, found)
    _spend(stage, "optimizer", training.optimize, found)
    return found


def _spend(stage: Stage, phase: str, run: Callable[[], None], found: Seconds) -> None:
    settle(stage.cores)
    before = [core.times() for core in stage.cores]
    run()
    settle(stage.cores)
    for name, core, earlier in zip(("trainer", "worker"), stage.cores, before, strict=True):
        lead_s, others_s = _by_thread(earlier, core.times())
        found[f"{name} {phase}"], found[f"{name}'s others {phase}"] = lead_s / BLOCKS, others_s / BLOCKS


def _by_thread(before: CoreTimes, after: CoreTimes) -> tuple[float, float]:
    """What the thread that ran most has run, and all the others, those that have ended too."""
    ran_s = sum(ran - before.processes_ran_s.get(pid, 0.0) for pid, ran in after.processes_ran_s.items())
    lead_s = max(
        (
            times.ran_s - (earlier[thread].ran_s if thread in (earlier := before.threads.get(pid, {})) else 0.0)
            for pid, threads in after.threads.items()
            for thread, times in threads.items()
        ),
        default=0.0,
    )
    return lead_s, max(0.0, ran_s - lead_s)
