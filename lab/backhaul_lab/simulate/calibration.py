"""Measures the costs of one segment with CPU clocks, so that other processes do not count.

NOTE [Costs]
One training without checkpointing and one with a worker have the same segments. Forward, backward and optimizer are
measured one after the other, each until trainer and worker are idle, so that every cost belongs to one phase. On each
side the computing thread, which is the one that ran most, is separated from the threads that send and receive. Each
cost is the median of several rounds.
"""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from backhaul.demo.model import Block
from backhaul_lab.harness.core_times import CoreTimes, settle
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import DROPOUT, WIDTH, Training
from backhaul_lab.simulate.costs import Costs
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.tensors.layout import copy_exact

if TYPE_CHECKING:
    from backhaul._session import Session

BLOCKS = 3
ROUNDS = 7
_WARM = 2

Seconds = dict[str, float]
"""CPU seconds per segment, by core and phase."""


def calibrate(session: "Session", stage: Stage, tokens: tuple[int, int]) -> Costs:
    """Measures the costs of one block of the benchmarks. Costs outside of the blocks are divided among them.

    Args:
        session: A session whose worker runs on the worker's core.
        stage: Cores of the measurement.
        tokens: Batch size and length of the input.
    """
    plain = Training("plain", BLOCKS, tokens, None)
    remote = Training("remote", BLOCKS, tokens, session.checkpoint)
    taken_s = [(_phases(stage, plain), _phases(stage, remote)) for _ in range(_WARM + ROUNDS)][_WARM:]

    def median(side: int, name: str) -> float:
        return statistics.median(taken[side][name] for taken in taken_s)

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
        footprint=_footprint(Block(WIDTH, DROPOUT), torch.randn(*tokens, WIDTH, requires_grad=True)),
    )


def _footprint(segment: nn.Module, x: Tensor) -> Footprint:
    """Measures the memory of a segment's replay by running one in this process.

    Args:
        segment: A module that maps a tensor to a tensor.
        x: An input of the segment that requires gradients.
    """
    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        y = segment(x)
    program = recorder.finish([y])
    assert program is not None, recorder.recording.refusal
    sources = [source.value for source in recorder.recording.sources]
    states = recorder.recording.generator_states
    measured = Replay(program, sources, states, is_own=True, is_measured=True).footprint
    assert measured is not None
    return measured


def _phases(stage: Stage, training: Training) -> Seconds:
    """Runs a step of a training phase by phase and measures each. Returns what a block took."""
    spent: Seconds = {}
    losses: list[Tensor] = []

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    training.clear_gradients()
    _measure_phase(stage, "forward", lambda: losses.append(training.forward()), spent)
    _measure_phase(stage, "backward", backward, spent)
    _measure_phase(stage, "optimizer", training.optimize, spent)
    return {name: seconds / BLOCKS for name, seconds in spent.items()}


def _measure_phase(stage: Stage, phase: str, run: Callable[[], None], spent: Seconds) -> None:
    settle(stage.cores)
    before = [core.times() for core in stage.cores]
    run()
    settle(stage.cores)
    for name, core, earlier in zip(("trainer", "worker"), stage.cores, before, strict=True):
        lead_s, others_s = _by_thread(earlier, core.times())
        spent[f"{name} {phase}"], spent[f"{name}'s others {phase}"] = lead_s, others_s


def _by_thread(before: CoreTimes, after: CoreTimes) -> tuple[float, float]:
    """Returns the CPU seconds of the thread that ran most, and of all others including those that have ended."""
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
