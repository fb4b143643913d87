"""Simulates an accumulation block: the trainer, which goes on while workers finish the backward of micro-batches.

The trainer's share is chosen by the functions that a session uses, `trainers_share` and `last_segments`, and the
workers' parts by the one that places segments, `parts_by_speed`. Imports no torch.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from backhaul._accumulate.plan import MORE_OPEN, Speeds, last_segments, trainers_share
from backhaul._arithmetic import deferred_limit
from backhaul._dispatch.placement import parts_by_speed
from backhaul_lab.simulate.costs import Costs
from backhaul_lab.simulate.engine import Compute, Event, SimulatedCore, SimulatedLink, Simulation, Thread, Transfer


@dataclass(frozen=True, slots=True)
class BlockSetup:
    """An accumulation block and its workers.

    Attributes:
        segments: Number of segments of a micro-batch.
        micro_batches: Number of micro-batches in the block.
        speeds: Speed of each worker's core relative to the trainer's.
        bytes_per_s: Bandwidth of the network in each direction. 0: unlimited.
        latency_s: Latency of the network in one direction, in seconds.
        derives: Whether workers compute the boundaries between their segments themselves.
        keeps: Whether the trainer keeps the activations of its share, and recomputes nothing.
        outside_s: Time that the trainer computes outside of the segments for each micro-batch, in seconds.
        has_free_transport: Whether sending and receiving leave the trainer's core free, because it has other cores.
    """

    segments: int
    micro_batches: int
    speeds: Sequence[float]
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    derives: bool = False
    keeps: bool = False
    outside_s: float = 0.0
    has_free_transport: bool = False


@dataclass(frozen=True, slots=True)
class PredictedBlock:
    """A predicted block.

    Attributes:
        took_s: Seconds from its beginning to its end, without the optimizer.
        shares: The number of segments of each micro-batch that the trainer computes.
        torch_s: Seconds of the same micro-batches with torch's checkpoint.
        law: The speed-up over torch's checkpoint for many micro-batches, if segments could be divided.
        whole_units: The same with whole segments.
    """

    took_s: float
    shares: Sequence[int]
    torch_s: float
    law: float
    whole_units: float

    @property
    def speed_up(self) -> float:
        """The predicted speed-up over torch's checkpoint."""
        return self.torch_s / self.took_s


def predict_block(costs: Costs, setup: BlockSetup) -> PredictedBlock:
    """Predicts a block of a training that has run for many blocks."""
    block = _Block(costs, setup)
    torch_s = setup.micro_batches * (setup.segments * (2 * costs.forward_s + costs.backward_s) + setup.outside_s)
    limit = deferred_limit(sum(setup.speeds), costs.backward_s / costs.forward_s)
    return PredictedBlock(block.run(), block.shares, torch_s, limit, _whole_units(costs, setup))


class _Block:
    """A simulated block: the trainer, its workers, and a link to each of them.

    Args:
        costs: The costs of a segment.
        setup: The block and its workers.

    Attributes:
        shares: The number of segments of each micro-batch that the trainer computes.
    """

    def __init__(self, costs: Costs, setup: BlockSetup) -> None:
        self._costs, self._setup = costs, setup
        # Weights travel once in a block, and so do the sums of their gradients.
        boundaries = costs.boundary_bytes / costs.result_bytes
        charged = 0.0 if setup.has_free_transport else 1.0
        sent = 0.0 if setup.derives else boundaries
        segment_s = costs.replay_s + costs.replay_backward_s
        self._forward_s = setup.segments * costs.forward_s + setup.outside_s
        self._own_s = costs.backward_s if setup.keeps else segment_s
        # What the trainer does besides the forward of a segment. Segments that it keeps are not recorded.
        self._recorded_s = costs.record_s + charged * sent * costs.upload_s
        self._received_s = charged * boundaries * costs.finish_s
        self._workers_s = [
            (segment_s + sent * costs.ingest_s + boundaries * costs.answer_s) / speed for speed in setup.speeds
        ]
        self._once_s = (1 - boundaries) * (
            charged * (costs.upload_s + costs.finish_s) + costs.ingest_s + costs.answer_s
        )
        self._speeds = Speeds(self._forward_s + setup.segments * self._recorded_s, self._own_s, self._workers_s)
        self._share = trainers_share(setup.segments, setup.micro_batches, self._speeds)
        self.shares = [self._share] * setup.micro_batches
        self._parts = parts_by_speed(setup.segments - self._share, setup.speeds)
        # When each worker has computed what it was asked for, at the earliest.
        self._until_s = [0.0] * len(setup.speeds)
        self._simulation, self._trainer = Simulation(), SimulatedCore()
        self._queues: list[deque[_Task]] = [deque() for _ in setup.speeds]
        self._arrived = [Event() for _ in setup.speeds]
        rate = setup.bytes_per_s or float("inf")
        self._up, self._down = ([SimulatedLink(rate, setup.latency_s) for _ in setup.speeds] for _ in range(2))
        self._took_s = 0.0

    def run(self) -> float:
        """Returns the seconds that the block takes. Call it once."""
        for number in range(len(self._setup.speeds)):
            self._simulation.start(self._work(number))
        self._simulation.start(self._train())
        self._simulation.run()
        return self._took_s

    def _train(self) -> Thread:
        setup, unfinished = self._setup, deque[tuple[Event, int]]()
        for number, part in enumerate(self._parts):
            self._send(self._up[number], part * self._costs.weight_bytes)
        yield Compute(self._trainer, (setup.segments - self._share) * self._once_s)
        for number in range(setup.micro_batches):
            last = self._last_segments(unfinished) if 0 < number == setup.micro_batches - 1 else 0
            remote = setup.segments - self._share - last
            self.shares[number] += last
            recorded = remote if setup.keeps else setup.segments
            besides_s = recorded * self._recorded_s + remote * self._received_s
            yield Compute(self._trainer, self._forward_s + besides_s + last * self._own_s)
            done = self._request(last)
            if not remote:  # nothing is deferred
                yield Compute(self._trainer, self._share * self._own_s)
            unfinished.append((done, self._share if remote else 0))
            if len(unfinished) > MORE_OPEN + len(setup.speeds):
                yield from self._finish(*unfinished.popleft())
        while unfinished:
            yield from self._finish(*unfinished.popleft())
        sums = [self._send(self._down[i], part * self._costs.weight_bytes) for i, part in enumerate(self._parts)]
        yield from sums
        self._took_s = self._simulation.now_s

    def _finish(self, done: Event, own: int) -> Thread:
        """Computes the trainer's own segments of a micro-batch, after those of the workers."""
        yield done
        yield Compute(self._trainer, own * self._own_s)

    def _last_segments(self, unfinished: Iterable[tuple[Event, int]]) -> int:
        """Returns how many of the last segments of the last micro-batch the trainer computes."""
        remote_s = max(self._until_s) - self._simulation.now_s
        own_s = sum(own for _, own in unfinished) * self._own_s
        return last_segments(self._parts, self._speeds, remote_s - self._speeds.forward_s, own_s)

    def _request(self, last: int) -> Event:
        """Gives workers their parts of a micro-batch. Returns what happens when all of them are done.

        Args:
            last: How many of the last segments of the micro-batch they do not get.
        """
        before, ends = Event(has_happened=True), list(accumulate(self._parts, initial=0))
        for number, (begin, end) in enumerate(pairwise(ends)):
            if (part := min(end, ends[-1] - last) - begin) > 0:
                # One gradient, and the boundaries that the worker cannot compute itself.
                tensors = 1 + (1 if self._setup.derives else part)
                received = self._send(self._up[number], tensors * self._costs.boundary_bytes)
                task = _Task(before, received, Event(), part)
                self._queues[number].append(task)
                begin_s = max(self._until_s[number], self._simulation.now_s)
                self._until_s[number] = begin_s + part * self._workers_s[number]
                self._simulation.happens(self._arrived[number])
                before = task.done
        return before

    def _work(self, number: int) -> Thread:
        """Runs a worker's part of each micro-batch, after the part of the worker before."""
        core = SimulatedCore()
        while True:
            while not self._queues[number]:
                self._arrived[number] = Event()
                yield self._arrived[number]
            task = self._queues[number].popleft()
            yield task.before
            yield task.received
            yield Compute(core, task.part * self._workers_s[number])
            # The worker goes on with the next micro-batch while the gradient is on its way.
            self._send(self._down[number], self._costs.boundary_bytes, task.done)

    def _send(self, link: SimulatedLink, size_bytes: float, arrived: Event | None = None) -> Event:
        """Starts a transfer. Returns an event that happens when it ends, besides the given one."""

        def carry() -> Thread:
            yield Transfer(link, size_bytes)
            if arrived is not None:
                self._simulation.happens(arrived)

        return self._simulation.start(carry())


@dataclass(frozen=True, slots=True)
class _Task:
    """A worker's part of a micro-batch.

    Attributes:
        before: Happens when the worker before has finished its part.
        received: Happens when the boundaries and the first gradient have arrived.
        done: Happens when the gradient for the segment before the part has arrived at the trainer.
        part: Number of segments of the part.
    """

    before: Event
    received: Event
    done: Event
    part: int


def _whole_units(costs: Costs, setup: BlockSetup) -> float:
    """Returns the limit of the speed-up for many micro-batches, when each segment is computed in one place."""
    segment_s = costs.forward_s + costs.backward_s

    def slowest_s(share: int) -> float:
        parts = parts_by_speed(setup.segments - share, setup.speeds)
        workers_s = [part * segment_s / speed for part, speed in zip(parts, setup.speeds, strict=True)]
        return max(setup.segments * costs.forward_s + share * segment_s, *workers_s)

    torch_s = setup.segments * (2 * costs.forward_s + costs.backward_s)
    return torch_s / min(map(slowest_s, range(setup.segments + 1)))
