"""How long an accumulation block and its parts take, and how that becomes its report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from backhaul._observe.report import BlockReport, Helper
from backhaul_runtime.tensors.durations import Duration, DurationSum, known_s, wait_s


@dataclass(frozen=True, slots=True, eq=False)
class BlockTimes:
    """What the trainer's device does in a block, see NOTE [Durations].

    Attributes:
        waited: Times for which the trainer waited for workers.
        own: Times in which the trainer computed its share, besides heads.
        heads: What each head with segments of the trainer's share took, and what the last head without such took.
    """

    waited: DurationSum = field(default_factory=DurationSum)
    own: DurationSum = field(default_factory=DurationSum)
    heads: list[tuple[Duration, Duration]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class EndedBlock:
    """A block that has ended for the host, although its device may still be at work.

    Attributes:
        took: What the block took.
        times: What its parts took.
        micro_batches: The number of its micro-batches.
        trainers_segments: The number of segments that the trainer has computed.
        workers: The segments of each worker with their mean time, by its address.
        pending_gradient_bytes: As in `BlockReport`, like what follows.
    """

    took: Duration
    times: BlockTimes
    micro_batches: int
    trainers_segments: int
    workers: Mapping[str, Helper]
    pending_gradient_bytes: int
    chain: int
    segment_bytes: int
    deferred_bytes: int

    @property
    def is_over(self) -> bool:
        """Whether the device has done all of it, so that `report` does not wait."""
        ends = [self.took, *(head for heads in self.times.heads for head in heads)]
        return all(known_s(end) is not None for end in ends) and self.times.waited.is_over and self.times.own.is_over

    def report(self) -> BlockReport:
        """Returns the report of the block, after a wait for the device."""
        took_s, times = wait_s(self.took), self.times
        trainers_s = times.own.wait() + sum(max(0.0, wait_s(head) - wait_s(usual)) for head, usual in times.heads)
        return BlockReport(
            micro_batches=self.micro_batches,
            took_s=took_s,
            others_s=max(0.0, took_s - times.waited.wait() - trainers_s),
            trainer=Helper(self.trainers_segments, trainers_s / max(1, self.trainers_segments)),
            workers=dict(self.workers),
            pending_gradient_bytes=self.pending_gradient_bytes,
            chain=self.chain,
            segment_bytes=self.segment_bytes,
            deferred_bytes=self.deferred_bytes,
        )
