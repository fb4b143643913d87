"""The inputs of a prediction: the costs of one segment, and the setup it runs in. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from backhaul_runtime.replay.schedule import Footprint


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one segment, in seconds of CPU time on the core that they were measured on.

    Attributes:
        forward_s: Forward without checkpointing, on the trainer.
        backward_s: Backward without checkpointing, on the trainer.
        optimizer_s: The optimizer's update of the segment's parameters, on the trainer.
        record_s: Time that `checkpoint` adds to forward, on the trainer.
        upload_s: Sending the segment, on the trainer.
        ingest_s: Receiving the segment, on the worker.
        replay_s: Recomputing the forward, on the worker.
        replay_backward_s: Backward of the recomputed forward, on the worker.
        answer_s: Sending the gradients, on the worker.
        finish_s: Requesting, receiving and checking the gradients, on the trainer.
        weight_bytes: Size of the segment's parameters, in bytes.
        boundary_bytes: Size of the input, in bytes. The output and the gradients of both have the same size.
        footprint: Memory that a replay of the segment needs on the worker.
        returned_bytes: Bytes that the worker returns; 0 for as many as the trainer sends.
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
    returned_bytes: int = 0

    @property
    def upload_bytes(self) -> int:
        """Size of the weights and the input that the trainer sends, in bytes."""
        return self.weight_bytes + self.boundary_bytes

    @property
    def result_bytes(self) -> int:
        """Size of the gradients or activations that the worker returns, in bytes."""
        return self.returned_bytes or self.upload_bytes

    def budget_bytes(self, segments: int, replays: int) -> int:
        """Returns bytes that a worker needs to hold `segments` segments, `replays` of them replayed, and run one."""
        running_bytes = self.weight_bytes + 2 * self.boundary_bytes
        return segments * self.upload_bytes + replays * self.footprint.ready_bytes + running_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """A training and its workers.

    Attributes:
        segments: Number of segments, which run one after the other.
        workers: Number of workers. Each has a core of its own.
        memory_bytes: Memory budget of each worker, in bytes. 0: unlimited.
        bytes_per_s: Bandwidth of the network in each direction. 0: unlimited.
        latency_s: Latency of the network in one direction, in seconds.
        worker_speed: Speed of a worker's core relative to the trainer's core.
        is_predicted: Whether a segment is sent before its forward, using the program of its last call. If not, it is
            sent after its forward.
        speeds: Speed of each worker's core relative to the trainer's, if they differ; empty for `worker_speed`.
        outside_s: Time that the trainer computes between the last forward and the first backward, in seconds.
        derives: Whether a worker computes the input of a segment itself if it has the segment before. The segment is
            then sent after its forward.
        has_free_transport: Whether sending and receiving leave the trainer's core free, because it has other cores.
    """

    segments: int
    workers: int = 1
    memory_bytes: int = 0
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    worker_speed: float = 1.0
    is_predicted: bool = True
    speeds: tuple[float, ...] = ()
    outside_s: float = 0.0
    derives: bool = False
    has_free_transport: bool = False

    @property
    def worker_speeds(self) -> tuple[float, ...]:
        """Speed of each worker's core relative to the trainer's."""
        return self.speeds or (self.worker_speed,) * self.workers


def costs_of(stored: Mapping[str, Any]) -> Costs:
    """Returns costs that were stored as JSON.

    Raises:
        KeyError, TypeError, ValueError: They are none, or have numbers with which nothing can be predicted.
    """
    sizes = {"footprint": Footprint(**stored["footprint"])}
    costs = Costs(**{**stored, **sizes})
    for part in (costs, costs.footprint):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, Footprint):
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < inf:
                raise ValueError(f"{field.name} is {value!r}, but must be a number that is not negative")
    for name in ("forward_s", "backward_s", "replay_s", "replay_backward_s", "boundary_bytes"):
        if not getattr(costs, name):
            raise ValueError(f"{name} is 0, but every segment takes some")
    return costs


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """What a segment costs in each situation that is predicted.

    Attributes:
        steps: With the batch of a step, beside a worker on the same machine, which shares memory with the trainer.
        links: With the batch of a step, beside a worker that is reached over TCP.
        blocks: With a micro-batch of an accumulation block, beside a worker on the same machine.
    """

    steps: Costs
    links: Costs
    blocks: Costs

    def of(self, setup: Setup) -> Costs:
        """Returns the costs of a step's segment: those over TCP if a network limits it."""
        return self.links if setup.bytes_per_s else self.steps

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> "KnownCosts":
        """Returns the costs in a file of `backhaul simulate --json`. All but those of steps may be missing.

        Raises:
            KeyError, TypeError, ValueError: As `costs_of` raises them.
        """
        of_steps = stored["costs"]
        return cls(*(costs_of(stored.get(key, of_steps)) for key in ("costs", "link_costs", "block_costs")))

    def as_json(self) -> dict[str, Any]:
        """Returns what `read` reads."""
        return {"costs": asdict(self.steps), "link_costs": asdict(self.links), "block_costs": asdict(self.blocks)}


def step_without_checkpointing_s(costs: Costs, segments: int) -> float:
    """Returns the duration of a step on the trainer alone that keeps all activations."""
    return segments * (costs.forward_s + costs.backward_s + costs.optimizer_s)


def step_of_torch_s(costs: Costs, segments: int) -> float:
    """Returns the duration of a step on the trainer alone that recomputes each segment."""
    return step_without_checkpointing_s(costs, segments) + segments * costs.forward_s
