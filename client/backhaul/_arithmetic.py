"""The formulas that decide where a worker pays. Pure: numbers in, numbers out; imports no torch.

NOTE [One source]
1. `backhaul doctor`, `backhaul plan` and the calculator of the documentation use these functions and no others.
2. `tests/contract/generate_calculator.py` translates them to JavaScript. Their bodies therefore are assignments to
   names and `return` statements, made of arithmetic, comparisons, conditional expressions, `min`, `max`, `ceil`, and
   calls of each other.
3. docs/arithmetic.md derives each formula. A test fails if it lacks one.

Symbols: a forward of a layer on the trainer takes `forward_s`; `backward` is the duration of its backward relative to
that, about 1.05 for LoRA and 2 for full training; `speed` is the worker's speed relative to the trainer's. A boundary
is the tensor between two segments. All sizes are in bytes, durations in seconds and rates in bytes per second.
"""

from math import ceil

LORA_BACKWARD, FULL_BACKWARD = 1.05, 2.0
"""A layer's backward relative to its forward, if only small adapters or if all weights are trained."""
SAVED_PER_BOUNDARY = 17.0
"""What autograd saves of a transformer layer without materialised attention, relative to the layer's input."""


def layer_forward_s(parameters: float, tokens: float, length: float, width: float, flop_per_s: float) -> float:
    """Returns the seconds that the forward of a transformer layer takes.

    Args:
        parameters: Number of parameters of the layer's matrices.
        tokens: Tokens of a micro-batch.
        length: Tokens of a sequence, which attend causally to each other.
        width: Width of the model.
        flop_per_s: Floating-point operations that the device reaches in a second, not its nominal peak.
    """
    return (2 * parameters * tokens + 2 * tokens * length * width) / flop_per_s


def blocking_threshold(backward: float) -> float:
    """Returns the relative speed from which a worker makes a step with `loss.backward()` shorter than torch's."""
    return (1 + backward) / (2 + backward)


def blocking_ratio(speed: float, backward: float, recording: float) -> float:
    """Returns the duration of a step with `loss.backward()` relative to torch's checkpoint, over a free link.

    Args:
        speed: The relative speed of the worker.
        backward: A layer's backward relative to its forward.
        recording: Time that recording adds to a forward, relative to the forward.
    """
    return max(1 + recording + backward / speed, (1 + backward) / speed) / (2 + backward)


def deferred_limit(speeds: float, backward: float) -> float:
    """Returns the limit of the speed-up over torch's checkpoint with accumulation blocks of many micro-batches.

    Args:
        speeds: The sum of the workers' relative speeds.
        backward: A layer's backward relative to its forward.
    """
    return min(1 + speeds, 2 + backward)


def deferred_ratio(speeds: float, backward: float, recording: float) -> float:
    """Returns the duration of a micro-batch in a block of many relative to torch's checkpoint, over a free link.

    Args:
        speeds: The sum of the workers' relative speeds.
        backward: A layer's backward relative to its forward.
        recording: Time that recording adds to a forward, relative to the forward.
    """
    shared = (2 + backward + recording) / (1 + speeds)
    return max(1 + recording, shared) / (2 + backward)


def layers_that_hide_link(boundary_bytes: float, bytes_per_s: float, layer_s: float) -> float:
    """Returns the layers that a segment needs so that its boundary is sent while its forward runs.

    Args:
        boundary_bytes: Size of a boundary.
        bytes_per_s: Bandwidth to the worker.
        layer_s: Duration of a layer's forward on the trainer.
    """
    return max(1, ceil(boundary_bytes / bytes_per_s / layer_s))


def break_even_bytes_per_s(boundary_bytes: float, layers: float, layer_s: float) -> float:
    """Returns the bandwidth at which moving a segment's three boundaries takes as long as recomputing it locally.

    Args:
        boundary_bytes: Size of a boundary.
        layers: Layers of a segment.
        layer_s: Duration of a layer's forward on the trainer.
    """
    return 3 * boundary_bytes / (layers * layer_s)


def traffic_bytes(boundary_bytes: float, segments: float, workers: float, derives: float) -> float:
    """Returns the bytes of boundaries and their gradients that a micro-batch moves, in both directions together.

    Args:
        boundary_bytes: Size of a boundary.
        segments: Segments of a micro-batch.
        workers: Number of workers that share the segments.
        derives: 1 if workers compute boundaries themselves, 0 if the trainer sends each.
    """
    return 3 * boundary_bytes * (min(workers, segments) if derives > 0 else segments)


def worker_memory_bytes(
    layers: float, layer_bytes: float, segments: float, boundary_bytes: float, execution_bytes: float
) -> float:
    """Returns the memory that a worker needs.

    Args:
        layers: Layers of the segments that the worker gets.
        layer_bytes: Size of a layer's weights.
        segments: Segments that the worker gets.
        boundary_bytes: Size of a boundary.
        execution_bytes: The most that the replay and the backward of one segment hold.
    """
    return layers * layer_bytes + segments * boundary_bytes + execution_bytes


def tokens_that_hide_weights(
    trained_bytes: float, bytes_per_s: float, token_forward_s: float, backward: float
) -> float:
    """Returns the tokens of an optimizer step whose computation takes as long as the traffic of the trained weights.

    The weights go to the worker and their gradients come back. The two are added, because a segment whose weights
    arrive last is the first whose gradients are needed.

    Args:
        trained_bytes: Size of the trained weights of all segments; 0 if nothing is trained in them.
        bytes_per_s: Bandwidth in each direction.
        token_forward_s: Duration of all layers' forward for one token on the trainer.
        backward: A layer's backward relative to its forward.
    """
    return 2 * trained_bytes / bytes_per_s / ((1 + backward) * token_forward_s)


def offload_ratio(saved_bytes: float, bytes_per_s: float, layer_s: float, backward: float) -> float:
    """Returns the duration of a layer whose activations go to the host's memory, relative to torch's checkpoint.

    Args:
        saved_bytes: What autograd saves of a layer.
        bytes_per_s: Bandwidth between the trainer's device and its host, in each direction.
        layer_s: Duration of a layer's forward on the trainer.
        backward: A layer's backward relative to its forward.
    """
    moved = saved_bytes / bytes_per_s / layer_s
    return (max(1, moved) + max(backward, moved)) / (2 + backward)


def data_parallel_ratio(
    speeds: float, trained_bytes: float, bytes_per_s: float, step_s: float, recomputed: float
) -> float:
    """Returns the duration of a step with data parallelism relative to torch's checkpoint on the trainer alone.

    Args:
        speeds: The sum of the workers' relative speeds. The batch is divided by speed.
        trained_bytes: Size of the gradients, which an all-reduce moves once in each direction.
        bytes_per_s: Bandwidth of the slowest link.
        step_s: Duration of a step with torch's checkpoint on the trainer alone.
        recomputed: Part of `step_s` that recomputes, 0 if the activations do not fit without checkpointing.
    """
    computed = (1 - recomputed) / (1 + speeds)
    return max(computed, 2 * trained_bytes / bytes_per_s / step_s)


def sessions_per_worker(speed: float, backward: float) -> float:
    """Returns the sessions whose segments one worker computes in the time of their steps with torch's checkpoint.

    With more sessions for each worker, steps with `loss.backward()` take longer than with torch's checkpoint.

    Args:
        speed: The relative speed of the worker.
        backward: A layer's backward relative to its forward.
    """
    return speed / blocking_threshold(backward)


def link_bytes(
    boundary_bytes: float, segments: float, workers: float, micro_batches: float, trained_bytes: float
) -> float:
    """Returns the bytes that an optimizer step with `loss.backward()` moves in the busier of the two directions.

    The trainer sends trained weights once, a boundary for each segment, and the gradient of the last output of each
    worker. Workers return the gradients of trained weights and of a boundary for each segment and micro-batch.

    Args:
        boundary_bytes: Size of a boundary.
        segments: Segments of a micro-batch.
        workers: Number of workers that share the segments, each with consecutive ones.
        micro_batches: Micro-batches of the step.
        trained_bytes: Size of the trained weights of all segments.
    """
    sent = trained_bytes + micro_batches * (segments + workers) * boundary_bytes
    returned = micro_batches * (trained_bytes + segments * boundary_bytes)
    return max(sent, returned)


def sessions_per_link(step_bytes: float, step_s: float, bytes_per_s: float) -> float:
    """Returns the sessions whose steps a link carries in the time of a step.

    Args:
        step_bytes: What a step of a session moves in the busier direction.
        step_s: Duration of a step.
        bytes_per_s: Bandwidth of the link in each direction.
    """
    return step_s * bytes_per_s / step_bytes


def dashboard_cores(workers: float, sessions: float) -> float:
    """Returns the cores that a dashboard needs. It has one event loop, so it keeps up only below 1.

    The numbers are a line through measurements of 25 November 2026, see docs/scale.md.

    Args:
        workers: Number of workers that the dashboard watches.
        sessions: Number of sessions that report to them, with a step in each second.
    """
    return 0.0188 + 0.00045 * workers + 0.000115 * sessions
