"""Which segments of a micro-batch the trainer recomputes itself while workers recompute the others. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Local = Literal["recompute", "keep"]
LOCALS: tuple[Local, ...] = ("recompute", "keep")
"""What the trainer does with its share of the segments."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a segment takes, as measured in the last block.

    Attributes:
        forward_s: Seconds of the trainer's forward of a micro-batch, with all that it does beside its own backwards.
        trainer_s: Seconds of a segment's recomputation and backward on the trainer.
        workers_s: Seconds of the same on each worker.
    """

    forward_s: float
    trainer_s: float
    workers_s: Sequence[float]


def trainers_share(segments: int, micro_batches: int, speeds: Speeds) -> int:
    """Returns how many of the first segments of each micro-batch the trainer computes itself.

    The worker's part of a micro-batch begins after its forward, and the trainer's part after the worker's. Otherwise
    both compute side by side. Of several equal choices the one with fewer segments is returned. One segment stays with
    the workers in any case, so that their speed is measured again.

    Args:
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of a block.
        speeds: The times that were measured in the last block.
    """
    rate = sum(1 / seconds for seconds in speeds.workers_s if seconds > 0)
    if not rate or not segments:
        return 0

    def block_s(share: int) -> float:
        own_s, remote_s = share * speeds.trainer_s, (segments - share) / rate
        forwards_s = micro_batches * speeds.forward_s
        remote_end_s = max(speeds.forward_s + micro_batches * remote_s, forwards_s + remote_s)
        return max(forwards_s + (micro_batches - 1) * own_s, remote_end_s) + own_s

    return min(range(segments), key=block_s)


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """What a block took.

    Attributes:
        micro_batches: The number of its micro-batches.
        segments: The number of segments of each micro-batch.
        trainers_segments: Segments of all micro-batches that the trainer has computed.
        trainers_s: Seconds that the trainer took for these.
        others_s: Seconds of everything else that the trainer has done, without waiting.
        busy_s: Seconds per segment of each worker.
    """

    micro_batches: int
    segments: int
    trainers_segments: int
    trainers_s: float
    others_s: float
    busy_s: Sequence[float]


class Shares:
    """Chooses the trainer's share for each block from what the blocks before took."""

    def __init__(self) -> None:
        self._last: BlockTimes | None = None
        self._trainer_s = 0.0  # per segment, as measured last

    def trainers_share(self) -> int:
        """Returns how many of the first segments of each micro-batch the trainer should compute itself."""
        last = self._last
        if last is None or not last.micro_batches or not last.busy_s:
            return 0
        # Until the trainer has computed a segment, it is taken to be as fast as the fastest worker.
        trainer_s = self._trainer_s or min(last.busy_s)
        speeds = Speeds(last.others_s / last.micro_batches, trainer_s, last.busy_s)
        return trainers_share(last.segments, last.micro_batches, speeds)

    def measured(self, measured: BlockTimes) -> None:
        """Notes what a block took."""
        self._last = measured
        if measured.trainers_segments:
            self._trainer_s = measured.trainers_s / measured.trainers_segments
