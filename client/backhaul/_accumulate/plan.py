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


def block_s(share: int, segments: int, micro_batches: int, speeds: Speeds) -> float:
    """Returns the seconds that a block takes.

    The workers' part of a micro-batch begins after its forward, and the trainer's part after the workers'. Otherwise
    both compute side by side.

    Args:
        share: The number of first segments of each micro-batch that the trainer computes itself.
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of a block.
        speeds: What trainer and workers take.
    """
    forwards_s, own_s = micro_batches * speeds.forward_s, share * speeds.trainer_s
    rate = sum(1 / seconds for seconds in speeds.workers_s if seconds > 0)
    if share == segments or not rate:
        return forwards_s + micro_batches * segments * speeds.trainer_s
    remote_s = (segments - share) / rate
    remote_end_s = max(speeds.forward_s + micro_batches * remote_s, forwards_s + remote_s)
    return max(forwards_s + (micro_batches - 1) * own_s, remote_end_s) + own_s


def trainers_share(segments: int, micro_batches: int, speeds: Speeds) -> int:
    """Returns how many of the first segments of each micro-batch the trainer computes itself, so that a block is short.

    Of several equal choices the one with fewer segments is returned.

    Args:
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of a block.
        speeds: What trainer and workers take.
    """
    if not any(seconds > 0 for seconds in speeds.workers_s):
        return 0
    return min(range(segments + 1), key=lambda share: block_s(share, segments, micro_batches, speeds))


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


RETRY_BLOCKS = 16
"""After so many blocks without a worker's help, its speed is measured again with one segment."""


class Shares:
    """Chooses the trainer's share for each block from what the blocks before took."""

    def __init__(self) -> None:
        self._last: BlockTimes | None = None
        self._trainer_s = 0.0  # per segment, as measured last
        self._workers_s: Sequence[float] = ()  # the same for each worker
        self._alone = 0  # blocks since a worker has computed a segment

    def trainers_share(self) -> int | None:
        """Returns how many of the first segments of each micro-batch the trainer should compute itself.

        None stands for half of them, while nothing is known.
        """
        last = self._last
        if last is None or not last.micro_batches or not last.segments:
            return None
        if not self._workers_s:
            return 0
        forward_s = last.others_s / last.micro_batches
        # Until the trainer has computed a segment: a forward, and a backward of twice its cost.
        trainer_s = self._trainer_s or 3 * forward_s / last.segments
        share = trainers_share(last.segments, last.micro_batches, Speeds(forward_s, trainer_s, self._workers_s))
        return last.segments - 1 if share == last.segments and self._alone >= RETRY_BLOCKS else share

    def measured(self, measured: BlockTimes) -> None:
        """Notes what a block took."""
        self._last = measured
        if measured.trainers_segments:
            self._trainer_s = measured.trainers_s / measured.trainers_segments
        if measured.busy_s:
            self._workers_s, self._alone = measured.busy_s, 0
        else:
            self._alone += 1
