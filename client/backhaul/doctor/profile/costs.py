"""What a model costs on the trainer alone, and with a worker. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_runtime.replay.schedule import Footprint


@dataclass(frozen=True, slots=True)
class PlainProfile:
    """What a micro-batch costs without checkpointing. Durations are those of undisturbed rounds.

    Attributes:
        layers: Number of layers of the model.
        forward_s: Mean duration of a layer's forward, in seconds.
        backward_s: Mean duration of a layer's backward, in seconds.
        outside_forward_s: Duration of the forward outside of the layers, in seconds.
        outside_backward_s: Duration of the backward outside of the layers, in seconds.
        boundary_bytes: Size of a layer's input, in bytes.
        saved_bytes: Mean size of what autograd saves of a layer, without parameters and boundaries, in bytes.
        outside_bytes: Size of what autograd saves outside of the layers, in bytes.
        transient_bytes: The most that a layer's forward holds at a time if nothing is saved, in bytes.
        trained_bytes: Mean size of a layer's parameters with gradients, in bytes.
        frozen_bytes: Mean size of a layer's parameters and buffers without gradients, in bytes.
        model_bytes: Size of all parameters and buffers, in bytes.
        gradient_bytes: Size of all gradients, in bytes.
        trained_parameters: Number of all parameters with gradients.
        tokens: Number of items in the batch: the input of a layer without its last dimension.
        footprint: Memory of a layer's replay.
    """

    layers: int
    forward_s: float
    backward_s: float
    outside_forward_s: float
    outside_backward_s: float
    boundary_bytes: int
    saved_bytes: int
    outside_bytes: int
    transient_bytes: int
    trained_bytes: int
    frozen_bytes: int
    model_bytes: int
    gradient_bytes: int
    trained_parameters: int
    tokens: int
    footprint: Footprint

    @property
    def outside_s(self) -> float:
        """Duration of forward and backward outside of the layers, in seconds."""
        return self.outside_forward_s + self.outside_backward_s

    @property
    def whole_forward_s(self) -> float:
        """Duration of the forward of the model, in seconds."""
        return self.layers * self.forward_s + self.outside_forward_s

    @property
    def backward(self) -> float:
        """A layer's backward relative to its forward."""
        return self.backward_s / self.forward_s


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """What a segment of some layers costs with a worker. Durations in seconds, those of undisturbed steps.

    Attributes:
        layers: Number of layers of a segment.
        segments: Number of segments of a micro-batch.
        record_s: Time that recording adds to a forward.
        replay_s: Duration of the replay on the worker.
        replay_backward_s: Duration of the backward on the worker; 0 if it returned activations only.
        upload_s: CPU time of sending the segment.
        finish_s: CPU time of requesting, receiving and checking its result.
        remote: Number of segments of a step that a worker recomputed.
        reasons: Why other segments ran on the trainer, with counts.
    """

    layers: int
    segments: int
    record_s: float
    replay_s: float
    replay_backward_s: float
    upload_s: float
    finish_s: float
    remote: int
    reasons: Mapping[str, int]

    @property
    def needed(self) -> int:
        """The number of segments of a step that backward needed again, wherever they ran."""
        return self.remote + sum(self.reasons.values())

    @property
    def share(self) -> float:
        """The share of the segments that a worker recomputed, from 0 to 1."""
        return self.remote / max(1, self.needed)
