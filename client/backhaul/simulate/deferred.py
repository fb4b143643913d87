"""Simulates an accumulation block: the trainer, which goes on while workers finish the backward of micro-batches.

The trainer's share is chosen by the function that a session uses, `trainers_shares`, and the workers' parts by the one
that places segments, `parts_by_speed`. Imports no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from backhaul._accumulate.plan import MORE_OPEN, Speeds, trainers_shares
from backhaul._dispatch.placement import parts_by_speed
from backhaul.simulate.costs import Costs
from backhaul.simulate.engine import Compute, Event, SimulatedCore, Simulation, Thread


@dataclass(frozen=True, slots=True)
class BlockSetup:
    """An accumulation block and its workers.

    Attributes:
        segments: Number of segments of a micro-batch.
        micro_batches: Number of micro-batches in the block.
        speeds: Speed of each worker's core relative to the trainer's.
    """

    segments: int
    micro_batches: int
    speeds: Sequence[float]


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
    # Weights travel once in a block, and so do the sums of their gradients.
    boundaries = costs.boundary_bytes / costs.result_bytes
    forward_s = setup.segments * (costs.forward_s + costs.record_s + boundaries * costs.upload_s)
    segment_s = costs.replay_s + costs.replay_backward_s
    workers_s = [(segment_s + boundaries * (costs.ingest_s + costs.answer_s)) / speed for speed in setup.speeds]
    once_s = (1 - boundaries) * (costs.upload_s + costs.ingest_s + costs.answer_s + costs.finish_s)
    shares = trainers_shares(setup.segments, setup.micro_batches, Speeds(forward_s, segment_s, workers_s))
    parts = parts_by_speed(setup.segments - shares[0], setup.speeds)
    ends = list(accumulate(parts, initial=shares[0]))
    simulation, trainer = Simulation(), SimulatedCore()
    queues: list[deque[tuple[Event, Event, int]]] = [deque() for _ in setup.speeds]
    arrived = [Event() for _ in setup.speeds]

    def work(number: int) -> Thread:
        """Runs a worker's part of each micro-batch, after the part of the worker before."""
        core = SimulatedCore()
        while True:
            while not queues[number]:
                arrived[number] = Event()
                yield arrived[number]
            before, done, part = queues[number].popleft()
            yield before
            yield Compute(core, part * workers_s[number])
            simulation.happens(done)

    def train() -> Thread:
        unfinished: deque[tuple[Event, int]] = deque()

        def finish() -> Thread:
            done, own = unfinished.popleft()
            yield done
            yield Compute(trainer, own * segment_s)

        yield Compute(trainer, (setup.segments - shares[0]) * once_s)
        for share in shares:
            yield Compute(trainer, forward_s + (setup.segments - share) * boundaries * costs.finish_s)
            before = Event(has_happened=True)
            for number, (begin, end) in enumerate(pairwise(ends)):
                if (part := end - max(begin, share)) > 0:
                    done = Event()
                    queues[number].append((before, done, part))
                    simulation.happens(arrived[number])
                    before = done
            if share == setup.segments:  # nothing is deferred
                yield Compute(trainer, share * segment_s)
            unfinished.append((before, share if share < setup.segments else 0))
            if len(unfinished) > MORE_OPEN + len(setup.speeds):
                yield from finish()
        while unfinished:
            yield from finish()
        took_s.append(simulation.now_s)

    took_s: list[float] = []
    for number in range(len(setup.speeds)):
        simulation.start(work(number))
    simulation.start(train())
    simulation.run()
    torch_s = setup.micro_batches * setup.segments * (2 * costs.forward_s + costs.backward_s)
    return PredictedBlock(took_s[0], shares, torch_s, law(costs, setup.speeds), _whole_units(costs, setup))


def law(costs: Costs, speeds: Sequence[float]) -> float:
    """Returns min(1 + sum of the speeds, T / F), where T is a segment's time with torch's checkpoint and F its forward.

    The trainer runs all forwards, so it cannot become faster than these.
    """
    torch_s = 2 * costs.forward_s + costs.backward_s
    return min(1 + sum(speeds), torch_s / costs.forward_s)


def _whole_units(costs: Costs, setup: BlockSetup) -> float:
    """Returns the limit of the speed-up for many micro-batches, when each segment is computed in one place."""
    segment_s = costs.forward_s + costs.backward_s

    def slowest_s(share: int) -> float:
        parts = parts_by_speed(setup.segments - share, setup.speeds)
        workers_s = [part * segment_s / speed for part, speed in zip(parts, setup.speeds, strict=True)]
        return max(setup.segments * costs.forward_s + share * segment_s, *workers_s)

    torch_s = setup.segments * (2 * costs.forward_s + costs.backward_s)
    return torch_s / min(map(slowest_s, range(setup.segments + 1)))
