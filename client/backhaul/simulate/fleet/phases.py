"""The parts of a session's step, and what each asks of the shared resources. Imports no torch.

A step consists of phases, one after the other. In a phase the trainer computes while links carry bytes and workers
compute. The phase ends when all of that has ended, each part with a tail: the time from its end to the end of the phase
during which nothing else overlaps, such as the replay of the last segment after it has arrived.
"""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What a session asks of one worker in one phase.

    Attributes:
        worker: Which of the session's workers it is, from 0.
        calls: Number of segments whose work this is, counted once for each micro-batch.
        ahead_s: Seconds of the worker's core that it may use before it is asked, for the replays of the next phases.
        ahead_from_s: Seconds from the beginning of the phase until that work can begin.
        compute_s: Seconds of the worker's core that the phase waits for, besides work that should have been done ahead.
        up_bytes: Bytes from the trainer to the worker.
        down_bytes: Bytes from the worker to the trainer.
        compute_tail_s: Seconds from the end of the computation to the earliest end of the phase.
        up_tail_s: Seconds from the arrival of the last byte at the worker to the earliest end of the phase.
        down_tail_s: Seconds from the arrival of the last byte at the trainer to the earliest end of the phase.
    """

    worker: int
    calls: int
    ahead_s: float
    ahead_from_s: float
    compute_s: float
    up_bytes: float
    down_bytes: float
    compute_tail_s: float
    up_tail_s: float
    down_tail_s: float


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A part of a step.

    Attributes:
        trainer_s: Seconds that the phase takes at least, because of the trainer's core, its link and latency.
        shares: What is asked of each worker.
    """

    trainer_s: float
    shares: tuple[WorkerShare, ...]


@dataclass(frozen=True)
class Demand:
    """What one step of a session asks for.

    Attributes:
        phases: The parts of the step, in their order.
        remote_segments: Number of a micro-batch's segments that workers compute at first. The trainer computes the
            others.
        remote_calls: Number of segments that workers compute in the step, over all micro-batches.
        trainer_compute_s: Seconds of the trainer's core.
        own_s: Seconds in which the trainer recomputes a segment and its backward itself.
        most_waiting: Number of sessions that wait for a worker's backward at most. The trainers of further ones compute
            the segment themselves, because the queue takes longer than they wait. Infinity in a block.
        parameter_bytes: Bytes of trained parameters and of their gradients that travel in the step.
        frozen_bytes: Bytes of frozen parameters of the remote segments. They travel once to each new worker.
        held_bytes: Bytes that the session keeps on all of its workers at its peak: parameters, boundaries and results.
    """

    phases: tuple[StepPhase, ...]
    remote_segments: int
    remote_calls: int
    trainer_compute_s: float
    own_s: float
    most_waiting: float
    parameter_bytes: float
    frozen_bytes: float
    held_bytes: float

    @cached_property
    def worker_s(self) -> float:
        """Seconds of workers' cores, over all workers."""
        return sum(share.ahead_s + share.compute_s for phase in self.phases for share in phase.shares)

    @cached_property
    def up_bytes(self) -> float:
        """Bytes from the trainer to all workers."""
        return sum(share.up_bytes for phase in self.phases for share in phase.shares)

    @cached_property
    def down_bytes(self) -> float:
        """Bytes from all workers to the trainer."""
        return sum(share.down_bytes for phase in self.phases for share in phase.shares)

    def alone_s(self, bytes_per_s: float) -> float:
        """Returns the seconds of a step of a session that shares its workers with nobody.

        Args:
            bytes_per_s: Bandwidth of a worker's link.
        """
        now_s, ahead_ends_s = 0.0, dict[int, float]()
        for phase in self.phases:
            ends_s = [phase.trainer_s]
            for share in phase.shares:
                if share.ahead_s:
                    ahead_ends_s[share.worker] = now_s + share.ahead_from_s + share.ahead_s
                if share.compute_s:
                    left_s = max(0.0, ahead_ends_s.pop(share.worker, 0.0) - now_s)
                    ends_s.append(left_s + share.compute_s + share.compute_tail_s)
                ends_s.append(share.up_bytes / bytes_per_s + share.up_tail_s)
                ends_s.append(share.down_bytes / bytes_per_s + share.down_tail_s)
            now_s += max(ends_s)
        return now_s


def per_second(bytes_per_s: float) -> float:
    """Returns a bandwidth as a number to divide by: infinity for 0, which means unlimited."""
    return bytes_per_s or math.inf
