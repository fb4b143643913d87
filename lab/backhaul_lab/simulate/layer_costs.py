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

from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul_lab.simulate.costs import Costs
from backhaul_runtime.replay.schedule import Footprint

if TYPE_CHECKING:
    from backhaul.doctor.profile.measurement import ModelMeasurement


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of a model's layers, alone and with a worker.

    Attributes:
        plain: What the model costs without a worker.
        segments: The costs of segments of one length or of two.
        has_free_transport: Whether sending and receiving leave the cores that compute free.
    """

    plain: PlainProfile
    segments: tuple[SegmentTimes, ...]
    has_free_transport: bool

    @property
    def replay_part(self) -> float:
        """The part of a worker's time for a segment that the replay takes, with the digests for its check."""
        last = self.segments[-1]
        return last.replay_s / (last.replay_s + last.replay_backward_s)

    def at(self, segment_layers: float) -> Costs:
        """Returns the costs of a segment of so many layers, which may be a mean."""
        first, last = self.segments[0], self.segments[-1]
        weight_bytes, boundary_bytes = int(segment_layers * self.plain.trained_bytes), max(1, self.plain.boundary_bytes)

        def linear(cost: "Callable[[SegmentTimes], float]") -> float:
            if first.layers == last.layers:
                return cost(first) / first.layers * segment_layers
            slope = max(0.0, (cost(last) - cost(first)) / (last.layers - first.layers))
            return max(0.0, cost(first) - slope * first.layers) + slope * segment_layers

        computed_s = segment_layers * (self.plain.forward_s + self.plain.backward_s)
        upload_s, finish_s = linear(lambda costs: costs.upload_s), linear(lambda costs: costs.finish_s)
        return Costs(
            forward_s=segment_layers * self.plain.forward_s,
            backward_s=segment_layers * self.plain.backward_s,
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
        one, others = self.plain.footprint, segment_layers - 1
        more_bytes = int(others * one.ready_bytes)
        trained_bytes = int(others * self.plain.trained_bytes)
        return Footprint(
            one.replay_bytes + more_bytes,
            one.ready_bytes + more_bytes,
            one.backward_bytes + more_bytes + trained_bytes,
        )

    def returning_activations(self, costs: Costs, segment_layers: float) -> Costs:
        """Returns the costs of a segment whose backward the trainer runs on activations from the worker."""
        returned = int(segment_layers * self.plain.saved_bytes) + costs.boundary_bytes
        more = returned / costs.result_bytes
        return replace(
            costs,
            replay_backward_s=0.0,
            answer_s=more * costs.answer_s,
            finish_s=costs.backward_s + more * costs.finish_s,
            returned_bytes=returned,
        )


def layer_costs(measured: "ModelMeasurement") -> LayerCosts:
    """Returns the costs of a measured model's layers, with those of the first worker, which must have run segments."""
    times = tuple(one for one in measured.workers[0].segment_times if one.remote)
    return LayerCosts(measured.plain, times, measured.has_free_transport)


def segment_costs(measured: "ModelMeasurement") -> Costs:
    """Returns the costs of a segment of one layer, beside a core that is as fast as that of the first worker."""
    costs, speed = layer_costs(measured).at(1), measured.workers[0].speed(measured.plain)
    return replace(costs, replay_s=costs.replay_s / speed, replay_backward_s=costs.replay_backward_s / speed)
