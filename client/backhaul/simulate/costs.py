"""What one segment costs, and where it runs: all that a prediction is made of. Free of torch."""

from dataclasses import dataclass

from backhaul_runtime.replay.schedule import Footprint


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one segment, on the core it was measured on, in seconds of CPU time.

    Attributes:
        forward_s: Plain, on the trainer.
        backward_s: Likewise.
        optimizer_s: Likewise.
        record_s: What `checkpoint` adds to the forward.
        upload_s: Sending it, on the trainer.
        ingest_s: Taking it in, on the worker.
        replay_s: On the worker.
        replay_backward_s: The backward of that.
        answer_s: Sending gradients, on the worker.
        finish_s: Asking for them, receiving and checking them, on the trainer.
        weight_bytes: Of its parameters.
        boundary_bytes: Of its input, output, and the gradients of both.
        footprint: Of its replay.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    record_s: float
    upload_s: float
    ingest_s: float
    replay_s: float
    replay_backward_s: float
    answer_s: float
    finish_s: float
    weight_bytes: int
    boundary_bytes: int
    footprint: Footprint

    @property
    def result_bytes(self) -> int:
        """What an answer carries."""
        return self.weight_bytes + self.boundary_bytes

    def budget_bytes(self, segments: int, replays: int) -> int:
        """What a worker needs for so many segments, of which so many are ready, beside what one takes that runs."""
        beside = self.weight_bytes + 2 * self.boundary_bytes
        return segments * self.result_bytes + replays * self.footprint.ready_bytes + beside


@dataclass(frozen=True, slots=True)
class Setup:
    """A training and its workers.

    Attributes:
        segments: One after the other.
        workers: Each with a core of its own, unless `share_core`.
        memory_bytes: Of each worker; 0: enough.
        bytes_per_s: Of the network, each way; 0: it is no limit.
        latency_s: One way.
        worker_speed: Of a worker's core, over the trainer's.
        is_predicted: A segment leaves before its forward, by the program it had last; else after it.
        shares_core: All workers are on one core.
    """

    segments: int
    workers: int = 1
    memory_bytes: int = 0
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    worker_speed: float = 1.0
    is_predicted: bool = True
    shares_core: bool = False


def step_without_checkpointing_s(costs: Costs, segments: int) -> float:
    """A step on the trainer alone that keeps everything."""
    return segments * (costs.forward_s + costs.backward_s + costs.optimizer_s)


def step_of_torch_s(costs: Costs, segments: int) -> float:
    """Likewise, one that recomputes each segment itself."""
    return step_without_checkpointing_s(costs, segments) + segments * costs.forward_s
