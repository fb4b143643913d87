"""Which segments of a micro-batch the trainer recomputes itself while workers recompute the others. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backhaul._dispatch.placement import parts_by_speed
from backhaul._observe.report import BlockReport

Local = Literal["recompute", "keep"]
LOCALS: tuple[Local, ...] = ("recompute", "keep")
"""What the trainer does with its share of the segments."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a segment takes, as measured in the last block.

    Attributes:
        forward_s: Seconds of the trainer's forward of a micro-batch, with all that it does beside its own backwards.
        trainer_s: Seconds of a segment's recomputation and backward on the trainer.
        workers_s: Seconds of the same on each worker, greater than 0.
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
    if share == segments:
        return forwards_s + micro_batches * segments * speeds.trainer_s
    parts = parts_by_speed(segments - share, [1 / seconds for seconds in speeds.workers_s])
    remote_s = max(part * seconds for part, seconds in zip(parts, speeds.workers_s, strict=True))
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
    return min(range(segments + 1), key=lambda share: block_s(share, segments, micro_batches, speeds))


MORE_OPEN = 3
"""A trainer leaves this number of micro-batches unfinished, and one more for each worker: so each worker has one to
compute, and the trainer has work at the end of a block while it waits for the last ones."""

RETRY_BLOCKS = 16
"""After so many blocks without a worker's help, its speed is measured again with one segment."""


class Shares:
    """Chooses the trainer's share for each block from what the blocks before took."""

    def __init__(self) -> None:
        self._segments = self._micro_batches = 0  # of the last block; segments for each micro-batch
        self._forward_s = 0.0  # for a micro-batch, see `Speeds`
        self._trainer_s = 0.0  # for a segment, as measured last
        self._workers_s: dict[str, float] = {}  # the same of each worker, by address
        self._alone = 0  # blocks since a worker has computed a segment

    def trainers_share(self) -> int | None:
        """Returns how many of the first segments of each micro-batch the trainer should compute itself.

        None stands for half of them, while nothing is known.
        """
        if not self._segments:
            return None
        if not self._workers_s:
            return 0
        # Until the trainer has computed a segment: a forward, and a backward of twice its cost.
        trainer_s = self._trainer_s or 3 * self._forward_s / self._segments
        speeds = Speeds(self._forward_s, trainer_s, list(self._workers_s.values()))
        share = trainers_share(self._segments, self._micro_batches, speeds)
        return self._segments - 1 if share == self._segments and self._alone >= RETRY_BLOCKS else share

    def measured(self, block: BlockReport) -> None:
        """Notes what a block took."""
        if not block.segments:
            return
        self._micro_batches, self._segments = block.micro_batches, round(block.segments / block.micro_batches)
        self._forward_s = block.others_s / block.micro_batches
        if block.trainer.segments:
            self._trainer_s = block.trainer.segment_s
        workers_s = {name: worker.segment_s for name, worker in block.workers.items()}
        self._workers_s, self._alone = (workers_s, 0) if workers_s else (self._workers_s, self._alone + 1)

    @property
    def speeds(self) -> dict[str, float]:
        """Segments per second of each worker that has computed any, by its address."""
        return {name: 1 / segment_s for name, segment_s in self._workers_s.items() if segment_s > 0}
