"""Measures the trainer's peak activation memory by depth, against torch's checkpoint, and against an ideal offload."""

from collections.abc import Callable
from pathlib import Path

from backhaul.demo.peak_memory import peak_live_bytes
from backhaul_lab.bench.outcomes import Outcome, of_counts
from backhaul_lab.harness.core_times import settle
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import LARGE, BlockTraining, Checkpoint, checkpoint_of_torch, compare
from backhaul_runtime.process.resources import resident_bytes

FEW, MANY = 8, 64
BLOCKS, PER_SEGMENT = 16, 2
RESIDENT_LIMIT = 1.10


def measure_flat(stage: Stage) -> list[Outcome]:
    """Measures the figure peak_flat."""
    few, few_resident = _of_depth(stage, FEW)
    many, many_resident = _of_depth(stage, MANY)
    resident = many_resident / few_resident
    note = f"resident memory grew {resident:.2f} times, limit {RESIDENT_LIMIT}" if resident > RESIDENT_LIMIT else ""
    return [of_counts("peak_flat", [many / few], note, {"few_bytes": few, "many_bytes": many, "resident": resident})]


def _of_depth(stage: Stage, blocks: int) -> tuple[int, int]:
    session = stage.session(returns="gradients")
    training = BlockTraining("backhaul", blocks, LARGE, session.checkpoint)
    _warm(stage, training)
    if blocks == FEW:  # the reference would take as long again
        reference = BlockTraining("torch", blocks, LARGE, checkpoint_of_torch)
        _warm(stage, reference)
        compare([training, reference])
    training.keep_gradients()
    resident = _resident_peak(training.forward_backward)
    training.keep_gradients()
    settle(stage.cores)
    live = peak_live_bytes(training.forward_backward)
    session.close()
    return live, resident


def measure_beside_others(stage: Stage) -> list[Outcome]:
    """Measures the figures peak_vs_torch and peak_vs_offload."""
    session = stage.session(returns="gradients")
    ours, our_bytes = _measured(stage, BLOCKS, session.checkpoint)
    theirs, their_bytes = _measured(stage, BLOCKS, checkpoint_of_torch)
    compare([ours, theirs])
    # An ideal offload keeps no inputs on the trainer. Its peak is that of one segment, recomputed and run backward.
    _, set_bytes = _measured(stage, PER_SEGMENT, None)
    details = {"backhaul_bytes": our_bytes, "torch_bytes": their_bytes, "working_set_bytes": set_bytes}
    return [
        of_counts("peak_vs_torch", [our_bytes / their_bytes], details=details),
        of_counts("peak_vs_offload", [our_bytes / set_bytes], details=details),
    ]


def _measured(stage: Stage, blocks: int, checkpoint: Checkpoint | None) -> tuple[BlockTraining, int]:
    name = "torch" if checkpoint is checkpoint_of_torch else "other"
    training = BlockTraining(name, blocks, LARGE, checkpoint, segment_layers=PER_SEGMENT)
    _warm(stage, training)
    training.keep_gradients()
    settle(stage.cores)
    return training, peak_live_bytes(training.forward_backward)


def _warm(stage: Stage, training: BlockTraining) -> None:
    """Sends programs and weights, so that the measured step sends only inputs and gradients."""
    training.forward_backward()
    settle(stage.cores)


def _resident_peak(step: Callable[[], object]) -> int:
    """Returns the growth of resident memory during a step, which includes memory unknown to torch such as gRPC's."""
    Path("/proc/self/clear_refs").write_text("5")  # Resets VmHWM, the peak.
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before
