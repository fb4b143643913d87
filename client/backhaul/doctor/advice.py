"""Says whether a worker pays for a model, from measurements and the formulas of `backhaul._arithmetic`. Pure.

The order of the checks is that in which a user needs the answers: without segments that travel nothing else matters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from backhaul import _arithmetic as arithmetic
from backhaul.doctor.check import Check, State
from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul.doctor.profile.disturbance import NOISY
from backhaul.doctor.profile.measurement import WorkerProfile
from backhaul_runtime.process.units import size_text

WAYS = ("loss.backward()", "accumulation blocks")
"""The ways to train with a worker."""
ENOUGH_SHARE = 0.9
"""A smaller share of segments that travel is worth a note."""
MUCH_RECORDING = 0.5
"""Recording that takes more than this part of a forward is worth a note."""
_BETTER = 0.95
"""An alternative is named if its step takes at most this part of Backhaul's."""
_CHEAPER = 0.8
"""Compiled segments are recommended if they add at most this part of what recording adds."""
_MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the advice depends on besides the measurements.

    Attributes:
        fixed_bytes: Size of the parameters and of the optimizer's state, in bytes.
        host_bytes_per_s: Rate between the trainer's accelerator and its host; 0 if the model is on a CPU.
    """

    fixed_bytes: float
    host_bytes_per_s: float


def model_checks(plain: PlainProfile, worker: WorkerProfile, around: Surroundings) -> list[Check]:
    """Returns the checks of a model with a worker, in the order in which they are to be read."""
    first = worker.segment_times[0]
    if not first.remote:
        return [_share(first)]
    return [
        _share(first),
        _speed(worker, plain),
        _link_layers(worker, plain),
        _worker_memory(worker, plain),
        _recording(worker, plain),
        _tokens(worker, plain),
        _alternative(worker, plain, around),
    ]


def machine_check(disturbed: float) -> Check:
    """Says whether other programs disturbed the measurement.

    Args:
        disturbed: The share of the time in which other programs had the core of a computing thread, from 0 to 1.
    """
    values = {"disturbed": disturbed}
    if disturbed <= NOISY:
        return Check("machine", "ok", "other programs did not disturb the measurement.", values=values)
    text = f"other programs had the cores that were measured for {disturbed:.0%} of the time."
    return Check("machine", "note", text, "Durations may be wrong: measure again when the machine is idle.", values)


def verdict(plain: PlainProfile, checks: Sequence[Check]) -> str:
    """Returns what the checks of a model with a worker mean, in a sentence or two.

    Args:
        plain: What the model costs on the trainer alone.
        checks: The checks of `model_checks`, and of `machine_check`.
    """
    by_name = {check.name: check for check in checks}
    if "alternative" not in by_name:
        return "Verdict: no segment of this model runs on the worker, so it would not change anything."
    ratios = by_name["alternative"].values["ratios"]
    ways = {name: ratio for name, ratio in ratios.items() if name in WAYS}
    best = min(ways, key=lambda name: ways[name])
    boundaries_bytes, saved_bytes = (plain.layers + 1) * plain.boundary_bytes, plain.layers * plain.saved_bytes
    doubt = " The machine was busy, so this is a guess." if by_name["machine"].state == "note" else ""
    pays = "so this worker pays" if ways[best] < 1 else "so this worker does not pay"
    return (
        f"Verdict: with {best}, steps are predicted to take {ways[best]:.2f} times as long as with torch's checkpoint, "
        f"{pays}. The trainer would keep {size_text(boundaries_bytes)} of the layers' activations, and "
        f"{size_text(saved_bytes)} without checkpointing.{doubt}"
    )


def _share(times: SegmentTimes) -> Check:
    values = {"share": times.share, "remote": times.remote, "segments": times.needed, "reasons": dict(times.reasons)}
    reasons = [f"{count} stay because of {reason}" for reason, count in times.reasons.items()]
    text = f"{times.remote} of {times.needed} segments run on the worker, {times.share:.0%}."
    if reasons:
        text += f" {'; '.join(reasons)}."
    if not times.remote:
        return Check("share", "failed", text, "docs/models.md says what can travel.", values)
    if times.share < ENOUGH_SHARE:
        return Check("share", "note", text, "docs/models.md says what can travel.", values)
    return Check("share", "ok", text, values=values)


def _speed(worker: WorkerProfile, plain: PlainProfile) -> Check:
    speed, needed = worker.speed(plain), arithmetic.blocking_threshold(plain.backward)
    limit = arithmetic.deferred_limit(speed, plain.backward)
    values = {"speed": speed, "threshold": needed, "backward": plain.backward, "deferred_limit": limit}
    beside = (
        f"the worker computes a layer {speed:.2f} times as fast as this trainer. With loss.backward() it needs "
        f"{needed:.2f} to be faster than torch's checkpoint"
    )
    if not speed:
        return Check("speed", "failed", "the worker returned activations only, so its speed is unknown.", "", values)
    if speed >= needed:
        return Check("speed", "ok", f"{beside}. With accumulation blocks the limit is {limit:.2f}.", values=values)
    return Check(
        "speed",
        "note",
        f"{beside}, so such a step would take longer.",
        f"Use session.accumulate(), where any speed helps: the limit is {limit:.2f} times the speed of torch's.",
        values,
    )


def _rate(worker: WorkerProfile) -> float:
    return worker.link.bytes_per_s if worker.link is not None else 0.0


def _link_layers(worker: WorkerProfile, plain: PlainProfile) -> Check:
    rate = _rate(worker)
    needed = int(arithmetic.layers_that_hide_link(plain.boundary_bytes, rate, plain.forward_s)) if rate else 1
    values = {"layers": needed, "of": plain.layers, "boundary_bytes": plain.boundary_bytes, "bytes_per_s": rate}
    text = (
        f"a segment of {_layers(needed)} hides the transfer of its boundary of {size_text(plain.boundary_bytes)} at "
        "this link"
    )
    if needed == 1:
        return Check("segment length", "ok", f"{text}.", values=values)
    if needed <= plain.layers:
        return Check("segment length", "note", f"{text}.", f"Use segment_layers={needed}.", values)
    todo = 'Use accumulation blocks with boundaries="derive", which send one boundary for each worker.'
    return Check("segment length", "note", f"{text}, and the model has only {plain.layers}.", todo, values)


def _worker_memory(worker: WorkerProfile, plain: PlainProfile) -> Check:
    result = plain.trained_bytes + plain.boundary_bytes

    def needed(layers: int) -> float:
        weights = plain.trained_bytes + plain.frozen_bytes
        execution = plain.footprint.execution_bytes + result
        return arithmetic.worker_memory_bytes(layers, weights, layers, plain.boundary_bytes, execution)

    all_bytes = needed(plain.layers)
    values = {"needed_bytes": all_bytes, "memory_bytes": worker.memory_bytes}
    text = f"all segments need {size_text(all_bytes)} on one worker, which lends {size_text(worker.memory_bytes)}"
    if all_bytes <= worker.memory_bytes:
        return Check("worker memory", "ok", f"{text}.", values=values)
    for count in range(2, plain.layers + 1):
        if (part := needed(ceil(plain.layers / count))) <= worker.memory_bytes:
            todo = f"Give it a larger --memory, or use {count} such workers, of which each needs {size_text(part)}."
            return Check("worker memory", "note", f"{text}. Segments that do not fit run on the trainer.", todo, values)
    todo = f"Give it a --memory of at least {size_text(needed(1))}."
    return Check("worker memory", "failed", f"{text}, and not even one segment fits.", todo, values)


def _recording(worker: WorkerProfile, plain: PlainProfile) -> Check:
    times = worker.segment_times[-1]
    layers = plain.layers / times.segments
    ratio = times.record_s / layers / plain.forward_s
    values = {"record_s": times.record_s / layers, "forward_s": plain.forward_s, "ratio": ratio}
    text = (
        f"recording adds {times.record_s / layers * _MILLISECONDS:.2f} ms to a layer's forward of "
        f"{plain.forward_s * _MILLISECONDS:.2f} ms, {ratio:.0%}."
    )
    graphs, recorded = worker.graph_times, worker.segment_times[0]
    if graphs is not None:
        values |= {"recorded_s": recorded.record_s, "graphs_s": graphs.record_s, "compile_s": worker.compile_s}
        text += (
            f' With graphs="eager" a segment of one layer adds {graphs.record_s * _MILLISECONDS:.2f} ms instead of '
            f"{recorded.record_s * _MILLISECONDS:.2f} ms, once torch.compile has taken {worker.compile_s:.1f} s."
        )
        if graphs.remote >= recorded.remote and graphs.record_s <= _CHEAPER * recorded.record_s:
            state: State = "ok" if ratio <= MUCH_RECORDING else "note"
            return Check("recording", state, text, 'Use connect(graphs="eager").', values)
    if ratio <= MUCH_RECORDING:
        return Check("recording", "ok", text, values=values)
    todo = "Use larger micro-batches: recording takes the same time for each operation, however large its tensors are."
    return Check("recording", "note", text, todo, values)


def _tokens(worker: WorkerProfile, plain: PlainProfile) -> Check:
    rate, trained = _rate(worker), plain.layers * plain.trained_bytes
    token_s = plain.layers * plain.forward_s / plain.tokens
    needed = arithmetic.tokens_that_hide_weights(trained, rate, token_s, plain.backward) if rate else 0.0
    values = {"tokens": needed, "tokens_of_micro_batch": plain.tokens, "trained_bytes": trained}
    text = (
        f"{size_text(trained)} of trained weights go to the worker in each optimizer step and as many gradients come "
        f"back. {needed:,.0f} tokens in a step hide that, and a micro-batch has {plain.tokens:,}."
    )
    if needed <= plain.tokens:
        return Check("weights", "ok", text, values=values)
    todo = f"Accumulate {ceil(needed / plain.tokens):,} micro-batches in a step, or train fewer weights, as LoRA does."
    return Check("weights", "note", text, todo, values)


def _alternative(worker: WorkerProfile, plain: PlainProfile, around: Surroundings) -> Check:
    """Compares the durations of a step relative to torch's checkpoint, over a link that costs no time."""
    speed, times = worker.speed(plain), worker.segment_times[-1]
    record = times.record_s * times.segments / plain.layers / plain.forward_s
    ratios = {
        WAYS[0]: arithmetic.blocking_ratio(speed, plain.backward, record) if speed else 1.0,
        WAYS[1]: arithmetic.deferred_ratio(speed, plain.backward, record) if speed else 1.0,
    }
    best = min(ratios, key=lambda name: ratios[name])
    others = dict(_alternatives(worker, plain, around, speed))
    text = (
        f"a step is predicted to take {ratios[WAYS[0]]:.2f} times as long as with torch's checkpoint with {WAYS[0]}, "
        f"and {ratios[WAYS[1]]:.2f} times with {WAYS[1]}, without what a link adds."
    )
    values = {"ratios": {**ratios, **others}}
    better = min(others, key=lambda name: others[name], default="")
    if better and others[better] <= _BETTER * ratios[best]:
        text += f" {better} would take {others[better]:.2f} times as long."
        return Check("alternative", "note", text, f"Use {better} instead.", values)
    if ratios[best] >= 1:
        todo = "Use torch's checkpoint, or larger micro-batches, longer segments or a faster worker."
        if around.host_bytes_per_s and not worker.crosses_network:
            todo = "Where boundaries are what does not fit, use Transformers' offload=True, which needs no worker."
        return Check("alternative", "note", f"{text} This worker does not make the model train faster.", todo, values)
    return Check("alternative", "ok", f"{text} No alternative that was considered is better.", values=values)


def _alternatives(
    worker: WorkerProfile, plain: PlainProfile, around: Surroundings, speed: float
) -> Iterator[tuple[str, float]]:
    """Yields what could be used instead, with the duration of a step relative to torch's checkpoint."""
    torch_s = plain.layers * (2 * plain.forward_s + plain.backward_s)
    peak_bytes = around.fixed_bytes + plain.gradient_bytes + plain.outside_bytes + plain.saved_bytes
    peak_bytes += (plain.layers + 1) * plain.boundary_bytes
    if worker.crosses_network and speed and peak_bytes <= worker.memory_bytes:
        rate = _rate(worker)
        yield (
            "DistributedDataParallel (the whole model fits on both machines)",
            arithmetic.data_parallel_ratio(speed, plain.gradient_bytes, rate, torch_s, 0.0),
        )
    if around.host_bytes_per_s:
        saved = plain.saved_bytes + plain.boundary_bytes
        yield (
            "offloading activations to the host's memory (torch.autograd.graph.save_on_cpu(pin_memory=True))",
            arithmetic.offload_ratio(saved, around.host_bytes_per_s, plain.forward_s, plain.backward),
        )


def _layers(count: int) -> str:
    """Returns a number of layers as text."""
    return f"{count} layer" if count == 1 else f"{count} layers"
