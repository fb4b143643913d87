"""What predictions are made from: the costs of a measured model's layers and segments. Pure; imports no torch.

NOTE [Costs of a segment]
Costs were measured with two lengths of segments. Each is taken as a part that every segment has, and a part for each
of its layers. The worker's costs are those of a core as fast as the trainer's, because `Setup` and `BlockSetup` divide
them by its relative speed. What the worker needs to receive and to send was not measured, because it may be another
machine: it is taken to be what the trainer needs to send and to receive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backhaul_lab.simulate.costs import Costs
from backhaul_runtime.replay.schedule import Footprint

if TYPE_CHECKING:
    from backhaul.doctor.profile.measurement import ModelMeasurement


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of a model's layers, see `PlainProfile` for those without a worker.

    Attributes:
        layers: Number of layers of the model.
        forward_s: Duration of a layer's forward, in seconds.
        backward_s: Duration of a layer's backward, in seconds.
        outside_s: Duration of forward and backward outside of the layers, in seconds.
        boundary_bytes: Size of a layer's input, in bytes.
        saved_bytes: Size of what autograd saves of a layer, in bytes.
        outside_bytes: Size of what autograd saves outside of the layers, in bytes.
        transient_bytes: The most that a layer's forward holds at a time if nothing is saved, in bytes.
        trained_bytes: Size of a layer's parameters with gradients, in bytes.
        frozen_bytes: Size of a layer's other parameters and buffers, in bytes.
        gradient_bytes: Size of the gradients of the model, in bytes.
        footprint: Memory of a layer's replay.
        replay_part: The part of a worker's time for a segment that the replay takes, with the digests for its check.
        segments: The costs of segments of one length or of two.
        has_free_transport: Whether sending and receiving leave the cores that compute free.
    """

    layers: int
    forward_s: float
    backward_s: float
    outside_s: float
    boundary_bytes: int
    saved_bytes: int
    outside_bytes: int
    transient_bytes: int
    trained_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    footprint: Footprint
    replay_part: float
    segments: "tuple[SegmentCosts, ...]"
    has_free_transport: bool

    def at(self, segment_layers: float) -> Costs:
        """Returns the costs of a segment of so many layers, which may be a mean."""
        first, last = self.segments[0], self.segments[-1]
        weight_bytes, boundary_bytes = int(segment_layers * self.trained_bytes), max(1, self.boundary_bytes)

        def linear(cost: "Callable[[SegmentCosts], float]") -> float:
            if first.layers == last.layers:
                return cost(first) / first.layers * segment_layers
            slope = max(0.0, (cost(last) - cost(first)) / (last.layers - first.layers))
            return max(0.0, cost(first) - slope * first.layers) + slope * segment_layers

        computed_s = segment_layers * (self.forward_s + self.backward_s)
        upload_s, finish_s = linear(lambda costs: costs.upload_s), linear(lambda costs: costs.finish_s)
        return Costs(
            forward_s=segment_layers * self.forward_s,
            backward_s=segment_layers * self.backward_s,
            optimizer_s=0.0,
            record_s=linear(lambda costs: costs.record_s),
            upload_s=upload_s,
            ingest_s=upload_s,
            replay_s=self.replay_part * computed_s,
            replay_backward_s=(1 - self.replay_part) * computed_s,
            answer_s=finish_s,
            finish_s=finish_s,
            weight_bytes=weight_bytes,
            boundary_bytes=boundary_bytes,
            footprint=self.footprint_of(segment_layers),
        )

    def footprint_of(self, segment_layers: float) -> Footprint:
        """Returns the memory of a segment's replay. The results of all layers stay, and one backward runs at a time."""
        one, others = self.footprint, segment_layers - 1
        kept_bytes = int(others * one.ready_bytes)
        trained_bytes = int(others * self.trained_bytes)
        return Footprint(
            one.replay_bytes + kept_bytes, one.ready_bytes + kept_bytes, one.backward_bytes + kept_bytes + trained_bytes
        )

    def returning_activations(self, costs: Costs, segment_layers: float) -> Costs:
        """Returns the costs of a segment whose backward the trainer runs on activations from the worker."""
        returned = int(segment_layers * self.saved_bytes) + costs.boundary_bytes
        more = returned / costs.result_bytes
        return replace(
            costs,
            replay_backward_s=0.0,
            answer_s=more * costs.answer_s,
            finish_s=costs.backward_s + more * costs.finish_s,
            returned_bytes=returned,
        )


@dataclass(frozen=True, slots=True)
class SegmentCosts:
    """What a segment of some layers costs the trainer, in seconds: the first four costs of `SegmentTimes`.

    Attributes:
        layers: Number of layers of the segment.
        record_s: Time that recording adds to a forward.
        upload_s: CPU time of sending the segment.
        finish_s: CPU time of requesting, receiving and checking its result.
    """

    layers: int
    record_s: float
    upload_s: float
    finish_s: float


def layer_costs(measured: "ModelMeasurement") -> LayerCosts:
    """Returns the costs of a measured model's layers, with those of the first worker, which must have run segments."""
    plain = measured.plain
    runs = [run for run in measured.workers[0].runs if run.remote]
    return LayerCosts(
        layers=plain.layers,
        forward_s=plain.forward_s,
        backward_s=plain.backward_s,
        outside_s=plain.outside_forward_s + plain.outside_backward_s,
        boundary_bytes=plain.boundary_bytes,
        saved_bytes=plain.saved_bytes,
        outside_bytes=plain.outside_bytes,
        transient_bytes=plain.transient_bytes,
        trained_bytes=plain.trained_bytes,
        frozen_bytes=plain.frozen_bytes,
        gradient_bytes=plain.gradient_bytes,
        footprint=plain.footprint,
        replay_part=runs[-1].replay_s / (runs[-1].replay_s + runs[-1].replay_backward_s),
        segments=tuple(SegmentCosts(run.layers, run.record_s, run.upload_s, run.finish_s) for run in runs),
        has_free_transport=measured.has_free_transport,
    )


def segment_costs(measured: "ModelMeasurement") -> Costs:
    """Returns the costs of a segment of one layer, beside a core that is as fast as that of the first worker."""
    costs, speed = layer_costs(measured).at(1), measured.workers[0].speed(measured.plain)
    return replace(costs, replay_s=costs.replay_s / speed, replay_backward_s=costs.replay_backward_s / speed)
