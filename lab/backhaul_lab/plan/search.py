"""Predicts each way to train with the simulator, and chooses the fastest one that fits. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backhaul_lab.plan.candidates import Candidate, candidates
from backhaul_lab.plan.memory import Peak, peak_of
from backhaul_lab.plan.workers import PlannedWorker
from backhaul_lab.simulate.costs import Costs, Setup
from backhaul_lab.simulate.deferred import BlockSetup, predict_block
from backhaul_lab.simulate.layer_costs import LayerCosts
from backhaul_lab.simulate.model import predict

TIE = 0.01
"""Plans whose steps differ by less than this part count as equally fast. Then the one with the lower peak is chosen."""


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """A way to train, and what it takes.

    Attributes:
        candidate: The way to train.
        step_s: Duration of forward and backward of all micro-batches of a step, in seconds, without the optimizer.
        peak: The memory of activations and gradients.
        is_shared: Whether the workers that the candidate has get any segments.
    """

    candidate: Candidate
    step_s: float
    peak: Peak
    is_shared: bool = True

    def fits(self, room_bytes: float) -> bool:
        """Whether trainer and workers have enough memory, also if a worker is lost.

        Args:
            room_bytes: Memory of the trainer that is left for activations and gradients, in bytes.
        """
        workers = self.candidate.workers
        has_workers = all(self.peak.worker_bytes <= worker.memory_bytes for worker in workers if worker.memory_bytes)
        return has_workers and max(self.peak.trainer_bytes, self.peak.lost_bytes) <= room_bytes


def predict_plan(costs: LayerCosts, candidate: Candidate, micro_batches: int) -> PredictedPlan:
    """Predicts a step of a training that has run for many steps.

    Args:
        costs: The costs of the model's layers.
        candidate: The way to train.
        micro_batches: Number of micro-batches of a step.
    """
    plain = costs.plain
    layers, kept = plain.layers, candidate.kept_layers
    alone_s = layers * (plain.forward_s + plain.backward_s) + plain.outside_s
    if candidate.kind == "plain":
        return PredictedPlan(candidate, micro_batches * alone_s, peak_of(costs, candidate, micro_batches))
    if candidate.kind == "torch":
        step_s = micro_batches * (alone_s + (layers - kept) * plain.forward_s)
        return PredictedPlan(candidate, step_s, peak_of(costs, candidate, micro_batches))
    segments = candidate.segments(layers)
    of_segment = costs.at((layers - kept) / segments)
    speeds = tuple(worker.speed for worker in candidate.workers)
    rates = [worker.bytes_per_s for worker in candidate.workers if worker.bytes_per_s]
    rate, latency_s = min(rates, default=0.0), max(worker.latency_s for worker in candidate.workers)
    if candidate.kind == "deferred":
        block = predict_block(
            of_segment,
            BlockSetup(
                segments,
                micro_batches,
                speeds,
                bytes_per_s=rate,
                latency_s=latency_s,
                derives=candidate.boundaries == "derive",
                keeps=candidate.local == "keep",
                outside_s=plain.outside_s,
                has_free_transport=costs.has_free_transport,
            ),
        )
        peak = peak_of(costs, candidate, micro_batches, block.shares)
        return PredictedPlan(candidate, block.took_s, peak, is_shared=min(block.shares) < segments)
    if candidate.returns == "activations":
        of_segment = costs.returning_activations(of_segment, (layers - kept) / segments)
    # What a worker holds besides boundaries, trained weights and replays.
    frozen_bytes = layers * plain.frozen_bytes
    memories = [worker.memory_bytes - frozen_bytes for worker in candidate.workers if worker.memory_bytes]
    setup = Setup(
        segments,
        workers=len(speeds),
        memory_bytes=max(1, min(memories)) if memories else 0,
        bytes_per_s=rate,
        latency_s=latency_s,
        speeds=speeds,
        outside_s=plain.outside_s + kept * (plain.forward_s + plain.backward_s),
        derives=candidate.boundaries == "derive",
        has_free_transport=costs.has_free_transport,
    )
    step_s = predict(of_segment, setup).step_s
    if micro_batches > 1:
        step_s += (micro_batches - 1) * predict(_with_known_weights(of_segment), setup).step_s
    return PredictedPlan(candidate, step_s, peak_of(costs, candidate, micro_batches))


def _with_known_weights(costs: Costs) -> Costs:
    """Returns the costs of a segment in a micro-batch after the first one: its weights are on the worker already."""
    part = costs.boundary_bytes / costs.upload_bytes
    return replace(
        costs,
        upload_s=part * costs.upload_s,
        ingest_s=part * costs.ingest_s,
        weight_bytes=0,
        returned_bytes=costs.result_bytes,
    )


def search(
    costs: LayerCosts, workers: Sequence[PlannedWorker], micro_batches: int, room_bytes: float
) -> tuple[PredictedPlan | None, list[PredictedPlan]]:
    """Predicts all ways to train.

    Args:
        costs: The costs of the model's layers.
        workers: The workers that plans may use.
        micro_batches: Number of micro-batches of a step.
        room_bytes: Memory of the trainer for activations and gradients, in bytes.

    Returns:
        The fastest plan that fits, None if none does; and all plans, the fastest first.
    """
    predicted = (
        predict_plan(costs, candidate, micro_batches) for candidate in candidates(costs, workers, micro_batches)
    )
    plans = [plan for plan in predicted if plan.is_shared]
    plans.sort(key=lambda plan: plan.step_s)
    fitting = [plan for plan in plans if plan.fits(room_bytes)]
    if not fitting:
        return None, plans
    as_fast = [plan for plan in fitting if plan.step_s <= (1 + TIE) * fitting[0].step_s]
    # Without a worker there is less that can go wrong.
    return min(as_fast, key=lambda plan: (plan.candidate.is_remote, plan.peak.trainer_bytes)), plans
