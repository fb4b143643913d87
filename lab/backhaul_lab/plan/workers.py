"""The workers that a plan may use. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.doctor.profile.measurement import ModelMeasurement


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker that a plan may use.

    Attributes:
        address: The address that `connect` takes; empty for one that the session starts.
        speed: Speed of its core relative to the trainer's.
        memory_bytes: Its memory budget, in bytes.
        bytes_per_s: Bandwidth of the link to it; 0 for a link that carries everything at once.
        latency_s: Latency of the link in one direction, in seconds.
    """

    address: str
    speed: float
    memory_bytes: int
    bytes_per_s: float = 0.0
    latency_s: float = 0.0


def planned_workers(measured: "ModelMeasurement") -> list[PlannedWorker]:
    """Returns the workers that returned gradients of a measured model."""
    planned = []
    for worker in measured.workers:
        speed, link = worker.speed(measured.plain), worker.link
        # Shared memory has no bandwidth of its own: what it takes is the CPU time that was measured.
        rate = link.bytes_per_s if worker.crosses_network and link is not None else 0.0
        latency_s = link.round_trip_s / 2 if worker.crosses_network and link is not None else 0.0
        if speed:
            planned.append(PlannedWorker(worker.address, speed, worker.memory_bytes, rate, latency_s))
    return planned


def fastest_first(workers: Sequence[PlannedWorker]) -> list[PlannedWorker]:
    """Returns workers in the order in which a plan adds them."""
    return sorted(workers, key=lambda worker: -worker.speed)
