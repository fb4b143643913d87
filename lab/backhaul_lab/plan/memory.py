"""The memory that a way to train takes, on the trainer and on its workers. Pure; imports no torch.

NOTE [Peak]
The peak is the largest of these moments, each with the gradients that exist by then:
1. Backward begins: everything saved outside of the segments and by layers that are kept, and all boundaries that are
   held, with the temporary tensors of one backward.
2. The first segment's backward runs last, with all gradients.
A trainer with a worker holds only the boundaries that wait to be sent, see docs/memory.md. If the worker is lost it
recomputes segments itself, with at most two times the square root of their number of boundaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from backhaul import _arithmetic as arithmetic
from backhaul._accumulate.plan import MORE_OPEN
from backhaul._config import Config, Local, Returns
from backhaul_lab.plan.candidates import Candidate
from backhaul_lab.simulate.layer_costs import LayerCosts

_SENT_BOUNDARIES = 2
"""Boundaries that a trainer holds besides those that wait to be sent: the first one and the current one."""
_GRADIENTS_AT_A_TIME = 2
"""Gradients of boundaries that a trainer holds at a time: the one that it sends and the one that it receives."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a step takes besides parameters and the optimizer's state, in bytes.

    Attributes:
        trainer_bytes: On the trainer, gradients included.
        lost_bytes: Highest memory of the trainer in a step in whose middle the worker is lost, in bytes.
        worker_bytes: On the worker that needs most.
    """

    trainer_bytes: int
    lost_bytes: int = 0
    worker_bytes: int = 0


class _Sizes:
    """The sizes that peaks are made of, in bytes.

    Args:
        costs: The costs of the model's layers.
        candidate: The way to train.
        micro_batches: Number of micro-batches of a step.
    """

    def __init__(self, costs: LayerCosts, candidate: Candidate, micro_batches: int) -> None:
        plain = costs.plain
        self.boundary, self.gradients, self.outside = plain.boundary_bytes, plain.gradient_bytes, plain.outside_bytes
        self.layer = plain.saved_bytes + plain.boundary_bytes
        self.segments, self.length = candidate.segments(plain.layers), candidate.segment_layers
        self.segment = self.length * plain.saved_bytes + plain.boundary_bytes
        self.kept = candidate.kept_layers * self.layer
        self.weights = self.length * plain.trained_bytes
        # Gradients of earlier micro-batches exist from the beginning.
        self.early = self.gradients if micro_batches > 1 else 0
        self.running_backward = max(0, plain.footprint.backward_bytes - plain.footprint.ready_bytes)
        self.transient = plain.transient_bytes


def peak_of(costs: LayerCosts, candidate: Candidate, micro_batches: int, shares: Sequence[int] = ()) -> Peak:
    """Returns the peak memory of a step.

    Args:
        costs: The costs of the model's layers.
        candidate: The way to train.
        micro_batches: Number of micro-batches of a step.
        shares: For a deferred backward the number of segments of each micro-batch that the trainer computes.
    """
    sizes = _Sizes(costs, candidate, micro_batches)
    if candidate.kind == "plain":
        saved = sizes.outside + costs.plain.layers * sizes.layer + sizes.early
        return Peak(max(saved, sizes.gradients + sizes.layer) + sizes.running_backward)
    if candidate.kind == "torch":
        return Peak(_recomputing(sizes, sizes.segments))
    if candidate.kind == "blocking":
        trainer = _blocking(sizes, candidate.returns)
        unfinished = 1
    else:
        unfinished = min(micro_batches, MORE_OPEN + len(candidate.workers))
        trainer = _deferred(sizes, candidate.local, shares, unfinished)
    lost = max(trainer, _recomputing(sizes, min(sizes.segments, int(2 * sqrt(sizes.segments)) + 1)))
    return Peak(trainer, lost, _worker_bytes(costs, candidate, unfinished))


def _recomputing(sizes: _Sizes, boundaries: int) -> int:
    """Returns the peak of a trainer that recomputes segments itself and holds a number of boundaries."""
    held = boundaries * sizes.boundary
    begins = _begins(sizes, held)
    recomputes = sizes.early + held + sizes.segment + sizes.running_backward
    return max(begins, recomputes, sizes.gradients + sizes.segment + sizes.running_backward)


def _begins(sizes: _Sizes, held: int) -> int:
    """Returns the peak of forward and of the beginning of backward, with the boundaries that are held, in bytes."""
    # Layers that are kept are the last ones, so nothing of them exists while others run forward.
    backward = sizes.outside + sizes.kept + sizes.running_backward
    return sizes.early + held + max(sizes.outside + sizes.transient, backward)


def _blocking(sizes: _Sizes, returns: Returns) -> int:
    """Returns the peak of a trainer that waits for its workers."""
    held = min(sizes.segments, Config().inflight_boundaries + _SENT_BOUNDARIES) * sizes.boundary
    received = _GRADIENTS_AT_A_TIME * sizes.boundary
    if returns == "activations":
        # They arrive in the order in which autograd uses and frees them, so about half of a layer's exist at a time.
        received = sizes.layer // 2 + sizes.running_backward
    elif sizes.early:  # the first gradients that arrive become those of the model, and later ones are added to them
        received += sizes.weights
    return max(_begins(sizes, held), sizes.early + held + received, sizes.gradients + received)


def _deferred(sizes: _Sizes, local: Local, shares: Sequence[int], unfinished: int) -> int:
    """Returns the peak of a trainer in an accumulation block.

    Args:
        sizes: The sizes of the parts.
        local: What the trainer does with its share of the segments.
        shares: The number of segments of each micro-batch that the trainer computes.
        unfinished: The number of micro-batches whose backward is unfinished at a time.
    """
    own = max(sum(shares[first : first + unfinished]) for first in range(len(shares)))
    held = own * (sizes.segment if local == "keep" else sizes.boundary)
    held += unfinished * _GRADIENTS_AT_A_TIME * sizes.boundary
    computes = sizes.segment + sizes.running_backward if any(shares) else sizes.running_backward
    # Gradients are held back until the block ends.
    return max(sizes.outside + held + sizes.transient, held + computes + sizes.gradients)


def _worker_bytes(costs: LayerCosts, candidate: Candidate, unfinished: int) -> int:
    speeds = [worker.speed for worker in candidate.workers]
    part = max(speeds) / sum(speeds)
    layers = costs.plain.layers - candidate.kept_layers
    execution = costs.footprint_of(candidate.segment_layers).execution_bytes
    result = candidate.segment_layers * costs.plain.trained_bytes + costs.plain.boundary_bytes
    return int(
        arithmetic.worker_memory_bytes(
            part * layers,
            costs.plain.trained_bytes + costs.plain.frozen_bytes,
            unfinished * part * candidate.segments(costs.plain.layers),
            costs.plain.boundary_bytes,
            execution + result,
        )
    )
