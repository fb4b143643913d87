"""The inputs of a prediction for a fleet. Imports no torch."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from backhaul_runtime.errors import SettingError

Boundaries = Literal["send", "derive", "auto"]
BOUNDARIES: tuple[Boundaries, ...] = ("send", "derive", "auto")
"""How a worker gets the boundaries between its own segments; see the setting of this name of `backhaul.connect()`."""

PlacementOfSessions = Literal["even", "random"]
PLACEMENTS: tuple[PlacementOfSessions, ...] = ("even", "random")
"""How sessions are divided among workers: equally many for each worker, or each session's workers drawn at random."""

SILENCE_S = 2.0
"""Seconds after which a trainer gives up a silent worker. It is the default of `silence_s`."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Many sessions and the workers that they share. All sessions train equal models, and all workers are equal.

    Attributes:
        sessions: Number of sessions, each of one trainer with a core and a link of its own.
        workers: Number of workers in all racks together.
        workers_per_session: Number of workers that a session divides its segments among.
        segments: Number of segments of a model, which run one after the other.
        micro_batches: Number of micro-batches in a step.
        is_deferred: Whether the micro-batches form an accumulation block, in which workers finish them later. If not,
            the trainer waits for the backward of each.
        boundaries: How a worker gets the boundaries between its own segments. Only blocks derive them.
        trainable_share: The part of a segment's parameter bytes that is trained, from 0 to 1. Only these bytes travel
            in each step; frozen parameters travel once.
        trainer_speed: Speed of a trainer's core relative to the core on which the costs were measured.
        worker_speed: Speed of a worker's core relative to a trainer's core.
        trainer_link_bytes_per_s: Bandwidth of a trainer's link in each direction. 0: unlimited.
        worker_link_bytes_per_s: Bandwidth of a worker's link in each direction. 0: unlimited.
        latency_s: Latency between trainer and worker in one direction, in seconds.
        rack_size: Number of workers in a rack.
        rack_link_bytes_per_s: Bandwidth in each direction of the link that the workers of a rack share. 0: unlimited.
        placement: How sessions are divided among workers.
        racks_lost: Number of racks that fail at the same time.
    """

    sessions: int
    workers: int
    workers_per_session: int = 1
    segments: int = 8
    micro_batches: int = 1
    is_deferred: bool = False
    boundaries: Boundaries = "auto"
    trainable_share: float = 1.0
    trainer_speed: float = 1.0
    worker_speed: float = 1.0
    trainer_link_bytes_per_s: float = 0.0
    worker_link_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    rack_size: int = 20
    rack_link_bytes_per_s: float = 0.0
    placement: PlacementOfSessions = "even"
    racks_lost: int = 0

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            SettingError: A value is out of range, or two values contradict each other. Names the values.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise SettingError(f"{field.name} is {value}, but must be a finite number that is not negative")
        for name in ("sessions", "workers", "workers_per_session", "segments", "micro_batches", "rack_size"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("trainer_speed", "worker_speed"):
            if getattr(self, name) == 0:
                raise SettingError(f"{name} is 0, but must be greater than 0")
        if self.trainable_share > 1:
            raise SettingError(f"trainable_share is {self.trainable_share:g}, but must be at most 1")
        if self.workers_per_session > min(self.workers, self.segments):
            raise SettingError(
                f"workers_per_session is {self.workers_per_session}, but there are {self.workers} workers and "
                f"{self.segments} segments: a session cannot divide its segments among more workers than either"
            )
        if not 0 <= self.racks_lost <= self.racks:
            raise SettingError(
                f"racks_lost is {self.racks_lost}, but the {self.workers} workers fill {self.racks} racks"
            )
        if 0 < self.workers - self.workers_lost < self.workers_per_session:
            raise SettingError(
                f"racks_lost is {self.racks_lost}, which leaves {self.workers - self.workers_lost} workers, fewer than "
                f"the {self.workers_per_session} of workers_per_session"
            )

    @property
    def racks(self) -> int:
        """Number of racks; the last one may be partly filled."""
        return math.ceil(self.workers / self.rack_size)

    @property
    def workers_lost(self) -> int:
        """Number of workers in the lost racks, which are those with the lowest numbers."""
        return min(self.workers, self.racks_lost * self.rack_size)

    @property
    def sessions_per_worker(self) -> float:
        """Mean number of sessions that a worker serves."""
        return self.sessions * self.workers_per_session / self.workers
