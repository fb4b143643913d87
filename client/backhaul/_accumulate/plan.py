"""Which segments of each micro-batch the trainer recomputes itself while workers recompute the others. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from backhaul._dispatch.placement import parts_by_speed
from backhaul._observe.report import BlockReport


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


def block_s(shares: Sequence[int], segments: int, speeds: Speeds) -> float:
    """Returns the seconds that a block takes.

    The workers' part of a micro-batch begins after its forward, and the trainer's part after the workers'. Otherwise
    both compute side by side.

    Args:
        shares: For each micro-batch the number of its first segments that the trainer computes itself.
        segments: The number of segments of a micro-batch.
        speeds: What trainer and workers take.
    """
    parts = parts_by_speed(segments - shares[0], [1 / seconds for seconds in speeds.workers_s])
    ends = list(accumulate(parts, initial=shares[0]))
    remote_s = {
        share: max(
            max(0, end - max(begin, share)) * worker_s
            for (begin, end), worker_s in zip(pairwise(ends), speeds.workers_s, strict=True)
        )
        for share in {*shares}
    }
    most_open = MORE_OPEN + len(parts)
    now_s = remote_end_s = 0.0
    unfinished: deque[tuple[float, int]] = deque()
    for share in shares:
        now_s += speeds.forward_s
        if share == segments:  # nothing is deferred
            now_s += share * speeds.trainer_s
            unfinished.append((0.0, 0))
        else:
            remote_end_s = max(remote_end_s, now_s) + remote_s[share]
            unfinished.append((remote_end_s, share))
        if len(unfinished) > most_open:
            ended_s, own = unfinished.popleft()
            now_s = max(now_s, ended_s) + own * speeds.trainer_s
    for ended_s, own in unfinished:
        now_s = max(now_s, ended_s) + own * speeds.trainer_s
    return now_s


def trainers_shares(segments: int, micro_batches: int, speeds: Speeds, most: int | None = None) -> list[int]:
    """Returns how many of the first segments of each micro-batch the trainer computes itself, so that a block is short.

    The numbers never fall within a block, so a segment's gradients are computed by a worker first and by the trainer
    after that. Thus the sum of the worker's gradients travels once.

    Args:
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of a block.
        speeds: What trainer and workers take.
        most: The largest number that is allowed, which then is the same for all micro-batches; None for any.
    """
    top = segments if most is None else min(most, segments)
    constant = min(range(top + 1), key=lambda share: block_s([share] * micro_batches, segments, speeds))
    shares = [constant] * micro_batches
    if most is not None:
        return shares
    ways = [_grown([first] * micro_batches, segments, speeds) for first in {constant, max(0, constant - 1)}]
    grown = min(ways, key=lambda way: block_s(way, segments, speeds))
    return grown if block_s(grown, segments, speeds) < WORTH * block_s(shares, segments, speeds) else shares


def _grown(shares: list[int], segments: int, speeds: Speeds) -> list[int]:
    """Lets the last numbers grow as long as that makes the block shorter."""
    most = sum(shares) + segments
    starts = {len(shares) * eighth // 8 for eighth in range(1, 8)} | {len(shares) - 1}
    shortest_s = block_s(shares, segments, speeds)
    for _ in range(MOST_CHANGES):
        longer = [
            changed
            for start in starts
            if start > 0
            for more in {1, (segments - shares[start]) // 2, segments - shares[start]}
            if sum(changed := shares[:start] + [min(share + more, segments) for share in shares[start:]]) <= most
        ]
        best = min(longer, key=lambda changed: block_s(changed, segments, speeds), default=shares)
        best_s = block_s(best, segments, speeds)
        if best_s >= shortest_s:
            break
        shares, shortest_s = best, best_s
    return shares


MORE_OPEN = 3
"""A trainer leaves this number of micro-batches unfinished, and one more for each worker: so each worker has one to
compute, and the trainer has work at the end of a block while it waits for the last ones."""

MOST_CHANGES, WORTH = 8, 0.99
"""How often the trainer's share may grow within a block, and the ratio of durations that this must reach in all.

The trainer holds back the gradients of segments that it takes over, one for each micro-batch, so it takes over no more
of them than a micro-batch has.
"""

RETRY_BLOCKS = 16
"""After so many blocks without a worker's help, its speed is measured again with one segment."""


WARM_UP_BLOCKS = 2
"""After so many blocks, what a block took changes the speeds by half only: one disturbed block must not move the split.

The first block sends weights and programs, so what it took is replaced by what the second takes.
"""


MOVES = 0.97
"""The split moves if that makes a block this much shorter: otherwise measured times that differ a little would move it.

The first block after a move has programs to send, and its times are not those of blocks whose split stays.
"""


class Shares:
    """Chooses the trainer's share for each block from what the blocks before took.

    Args:
        held_bytes: The most bytes of gradients that the trainer may hold back; 0 for any number.
    """

    def __init__(self, held_bytes: int = 0) -> None:
        self._held_bytes = held_bytes
        self._segments = self._micro_batches = 0  # of the last block; segments for each micro-batch
        self._shares: Sequence[int] = ()  # that were chosen last for such blocks
        self._forward_s = 0.0  # for a micro-batch, see `Speeds`
        self._trainer_s = 0.0  # for a segment, as measured last
        self._workers_s: dict[str, float] = {}  # the same of each worker, by address
        self._alone = 0  # blocks since a worker has computed a segment
        self._blocks = 0  # that were measured
        self._segment_bytes = self._others_bytes = 0  # gradients of a segment, and what is held back besides these

    def trainers_shares(self) -> Sequence[int] | None:
        """Returns how many of the first segments of each micro-batch the trainer should compute itself.

        The last number counts for all further micro-batches. None stands for half of the segments, while nothing is
        known.
        """
        if not self._segments:
            return (0,) if self._held_bytes else None
        if not self._workers_s:
            return (0,)
        # Until the trainer has computed a segment: a forward, and a backward of twice its cost.
        trainer_s = self._trainer_s or 3 * self._forward_s / self._segments
        speeds = Speeds(self._forward_s, trainer_s, list(self._workers_s.values()))
        most = None
        if self._held_bytes and self._segment_bytes:
            most = max(0, self._held_bytes - self._others_bytes) // self._segment_bytes
        shares: Sequence[int] = trainers_shares(self._segments, self._micro_batches, speeds, most)
        last = self._shares
        is_allowed = bool(last) and (most is None or last[-1] <= most)
        if is_allowed and block_s(shares, self._segments, speeds) > MOVES * block_s(last, self._segments, speeds):
            shares = last
        self._shares = shares
        is_retry = shares[0] == self._segments and self._alone >= RETRY_BLOCKS
        return (self._segments - 1,) if is_retry else shares

    def measured(self, block: BlockReport) -> None:
        """Notes what a block took."""
        if not block.segments:
            return
        if (block.micro_batches, block.chain) != (self._micro_batches, self._segments):
            self._blocks, self._shares = 0, ()
        self._blocks += 1
        self._micro_batches, self._segments = block.micro_batches, block.chain
        self._forward_s = self._mean(self._forward_s, block.others_s / block.micro_batches)
        if block.trainer.segments:
            self._trainer_s = self._mean(self._trainer_s, block.trainer.segment_s)
        own = block.trainer.segments // block.micro_batches
        self._segment_bytes = max(self._segment_bytes, block.segment_bytes)
        self._others_bytes = max(0, block.held_bytes - own * self._segment_bytes)
        known_s = {} if self._alone else self._workers_s
        workers_s = {
            name: self._mean(known_s.get(name, 0.0), worker.segment_s) for name, worker in block.workers.items()
        }
        self._workers_s, self._alone = (workers_s, 0) if workers_s else (self._workers_s, self._alone + 1)

    def _mean(self, before_s: float, last_s: float) -> float:
        """Returns the mean of a duration in the blocks before and in the last one; 0 stands for an unknown one."""
        return (before_s + last_s) / 2 if before_s and self._blocks > WARM_UP_BLOCKS else last_s

    @property
    def speeds(self) -> dict[str, float]:
        """Segments per second of each worker that has computed any, by its address."""
        return {name: 1 / segment_s for name, segment_s in self._workers_s.items() if segment_s > 0}
