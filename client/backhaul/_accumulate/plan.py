"""Which segments of each micro-batch the trainer recomputes itself while workers recompute the others. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block as it is expected.

    Attributes:
        took_s: Seconds that it takes.
        last: The number of `last_segments`.
    """

    took_s: float
    last: int


def planned(
    share: int, segments: int, micro_batches: int, speeds: Speeds, *, may_take_last: bool = True
) -> PlannedBlock:
    """Returns what to expect of a block.

    The workers' part of a micro-batch begins after its forward, and the trainer's part after the workers'. Otherwise
    both compute side by side.

    Args:
        share: The number of first segments of each micro-batch that the trainer computes itself.
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of the block.
        speeds: What trainer and workers take.
        may_take_last: Whether the trainer also computes the `last_segments`.
    """
    parts = parts_by_speed(segments - share, [1 / seconds for seconds in speeds.workers_s])
    remote_s, most_open = _remote_s(parts, speeds), MORE_OPEN + len(parts)
    now_s = remote_end_s = 0.0
    last = 0
    unfinished: deque[tuple[float, float]] = deque()
    for number in range(micro_batches):
        own_s = share * speeds.trainer_s
        now_s += speeds.forward_s
        if may_take_last and 0 < number == micro_batches - 1:
            own_before_s = sum(before_s for _, before_s in unfinished)
            last = last_segments(parts, speeds, remote_end_s - now_s, own_before_s)
            now_s += last * speeds.trainer_s
        if share + last == segments:  # nothing is deferred
            now_s += own_s
            unfinished.append((0.0, 0.0))
        else:
            remote_end_s = max(remote_end_s, now_s) + remote_s[segments - share - last]
            unfinished.append((remote_end_s, own_s))
        if len(unfinished) > most_open:
            ended_s, own_s = unfinished.popleft()
            now_s = max(now_s, ended_s) + own_s
    for ended_s, own_s in unfinished:
        now_s = max(now_s, ended_s) + own_s
    return PlannedBlock(now_s, last)


def _remote_s(parts: Sequence[int], speeds: Speeds) -> list[float]:
    """Returns what workers take for none, one, two and so on up to all of their segments, side by side, in seconds.

    Args:
        parts: The number of segments of each worker.
        speeds: What trainer and workers take.
    """
    taken_s = [0.0]
    for part, worker_s in zip(parts, speeds.workers_s, strict=True):
        others_s = taken_s[-1]
        taken_s += [max(others_s, count * worker_s) for count in range(1, part + 1)]
    return taken_s


def last_segments(parts: Sequence[int], speeds: Speeds, remote_s: float, own_s: float) -> int:
    """Returns how many of the last segments of a block's last micro-batch the trainer computes, so that it ends early.

    It computes them right after the forward, while workers are busy with earlier micro-batches, and its first segments
    after the workers have finished theirs. It holds back the gradients of such a segment until the block ends.

    Args:
        parts: The number of segments of each worker, in the order of the segments.
        speeds: What trainer and workers take.
        remote_s: Seconds after the forward that workers will take for earlier micro-batches.
        own_s: Seconds that the trainer will take for its own segments of earlier micro-batches.
    """
    ends_s = []
    for last, rest_s in enumerate(reversed(_remote_s(parts, speeds))):
        head_s = last * speeds.trainer_s
        ends_s.append(max(head_s + own_s, max(remote_s, head_s) + rest_s))
    return ends_s.index(min(ends_s))


def trainers_share(segments: int, micro_batches: int, speeds: Speeds, most_pending: int | None = None) -> int:
    """Returns how many of the first segments of each micro-batch the trainer computes itself, so that a block is short.

    It is the same number for all micro-batches, so that the gradients of a segment are summed up in one place.

    Args:
        segments: The number of segments of a micro-batch.
        micro_batches: The number of micro-batches of a block.
        speeds: What trainer and workers take.
        most_pending: The most segments whose gradients may be pending on the trainer; None for any number.
    """
    most = segments if most_pending is None else min(most_pending, segments)
    may_take_last = most_pending is None
    return min(
        range(most + 1),
        key=lambda share: expected_s(share, segments, micro_batches, speeds, may_take_last=may_take_last),
    )


def expected_s(share: int, segments: int, micro_batches: int, speeds: Speeds, *, may_take_last: bool) -> float:
    """Returns the mean of `planned` if the workers' speeds vary by `SPREAD`. The arguments are those of `planned`."""
    likely = [replace(speeds, workers_s=[factor * one_s for one_s in speeds.workers_s]) for factor in SPREAD]
    blocks = [planned(share, segments, micro_batches, one, may_take_last=may_take_last) for one in likely]
    return sum(block.took_s for block in blocks) / len(blocks)


MORE_OPEN = 3
"""A trainer leaves this number of micro-batches unfinished, and one more for each worker: so each worker has one to
compute, and the trainer has work at the end of a block while it waits for the last ones."""

SPREAD = (0.9, 1.0, 1.1)
"""By which factors the time of a segment on a worker may differ from the measured one.

`last_segments` makes up for that within a block, but only in one direction, so the share must leave room for it.
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
        pending_gradient_bytes: The most bytes of gradients that may be pending on the trainer; 0 for any number.
    """

    def __init__(self, pending_gradient_bytes: int = 0) -> None:
        self._pending_bytes = pending_gradient_bytes
        self._segments = self._micro_batches = 0  # of the last block; segments for each micro-batch
        self._share: int | None = None  # that was chosen last for such blocks
        self._forward_s = 0.0  # for a micro-batch, see `Speeds`
        self._trainer_s = 0.0  # for a segment, as measured last
        self._workers_s: dict[str, float] = {}  # the same of each worker, by address
        self._alone = 0  # blocks since a worker has computed a segment
        self._blocks = 0  # that were measured
        self._segment_bytes = self._others_bytes = 0  # pending of a segment, and beside segments

    def trainers_share(self) -> int | None:
        """Returns how many of the first segments of each micro-batch the trainer should compute itself.

        None stands for half of the segments, while nothing is known.
        """
        if not self._segments:
            return 0 if self._pending_bytes else None
        if not self._workers_s:
            return 0
        speeds = self._speeds(self._workers_s.values())
        most_pending = None
        if self._pending_bytes and self._segment_bytes:
            most_pending = max(0, self._pending_bytes - self._others_bytes) // self._segment_bytes
        share, before = trainers_share(self._segments, self._micro_batches, speeds, most_pending), self._share
        if before is not None and (most_pending is None or before <= most_pending):
            now_s, then_s = (
                expected_s(one, self._segments, self._micro_batches, speeds, may_take_last=most_pending is None)
                for one in (share, before)
            )
            share = before if now_s > MOVES * then_s else share
        self._share = share
        is_retry = share == self._segments and self._alone >= RETRY_BLOCKS
        return self._segments - 1 if is_retry else share

    def last_segments(self, micro_batch: int, parts: Mapping[str, int], left: Mapping[str, int], own: int) -> int:
        """Returns how many of the last segments of the next micro-batch the trainer should compute itself.

        Args:
            micro_batch: The number of the next micro-batch in the block, from 1.
            parts: The number of segments of each worker in the present one, in the order of the segments.
            left: How many segments of earlier micro-batches each worker has not computed yet.
            own: How many segments of earlier micro-batches the trainer has not computed yet.
        """
        is_known = self._share is not None and parts.keys() <= self._workers_s.keys()
        if micro_batch != self._micro_batches or self._pending_bytes or not is_known:
            return 0
        speeds = self._speeds(self._workers_s[name] for name in parts)
        remote_s = max((count * self._workers_s.get(name, 0.0) for name, count in left.items()), default=0.0)
        own_s = own * speeds.trainer_s
        return last_segments(list(parts.values()), speeds, remote_s - speeds.forward_s, own_s)

    def _speeds(self, workers_s: Iterable[float]) -> Speeds:
        # Until the trainer has computed a segment: a forward, and a backward of twice its cost.
        trainer_s = self._trainer_s or 3 * self._forward_s / self._segments
        return Speeds(self._forward_s, trainer_s, list(workers_s))

    def measured(self, block: BlockReport) -> None:
        """Notes what a block took."""
        if not block.segments:
            return
        if (block.micro_batches, block.chain) != (self._micro_batches, self._segments):
            self._blocks, self._share = 0, None
        self._blocks += 1
        self._micro_batches, self._segments = block.micro_batches, block.chain
        self._forward_s = self._mean(self._forward_s, block.others_s / block.micro_batches)
        if block.trainer.segments:
            self._trainer_s = self._mean(self._trainer_s, block.trainer.segment_s)
        own = block.trainer.segments // block.micro_batches
        self._segment_bytes = max(self._segment_bytes, block.segment_bytes)
        self._others_bytes = max(0, block.pending_gradient_bytes - own * self._segment_bytes)
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
