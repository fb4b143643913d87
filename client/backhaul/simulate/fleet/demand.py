"""What one step of a session asks of each resource. Imports no torch.

A step consists of phases, one after the other. In a phase the trainer computes while links carry bytes and workers compute.
The phase ends when all of that has ended, each part with a tail: the time from its end to the end of the phase during
which nothing else overlaps, such as the replay of the last segment after it has arrived.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from backhaul._accumulate.plan import MORE_OPEN, Speeds, trainers_shares
from backhaul._dispatch.placement import parts_by_speed
from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.setup import FleetSetup

Resource = Literal["worker compute", "worker link up", "worker link down"]
"""A shared resource of a worker. Up is the direction from trainers to workers."""


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
class Phase:
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
        remote_segments: Number of a micro-batch's segments that workers compute at first; the trainer computes the others.
        remote_calls: Number of segments that workers compute in the step, over all micro-batches.
        trainer_compute_s: Seconds of the trainer's core.
        own_s: Seconds in which the trainer recomputes a segment and its backward itself.
        most_waiting: Number of sessions that wait for a worker's backward at most. The trainers of further ones compute
            the segment themselves, because the queue takes longer than they wait. Infinity in a block.
        frozen_bytes: Bytes of frozen parameters of the remote segments. They travel once to each new worker.
        held_bytes: Bytes that the session keeps on all of its workers at its peak: parameters, boundaries and results.
    """

    phases: tuple[Phase, ...]
    remote_segments: int
    remote_calls: int
    trainer_compute_s: float
    own_s: float
    most_waiting: float
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


def patience_s(expected_s: float) -> float:
    """Returns the queue that a trainer accepts before a segment that takes so long, in seconds (`deadlines.py`)."""
    return max(1.0, 2 * expected_s)


@lru_cache(maxsize=4096)
def demand(costs: Costs, setup: FleetSetup, contention: float = 1.0) -> Demand:
    """Returns what a session's step asks for.

    Args:
        costs: Costs of one segment with one micro-batch.
        setup: The fleet.
        contention: The factor by which the worker's segments take longer than for a session alone. In an accumulation
            block the trainer measures it and computes more segments itself the larger it is.
    """
    return _deferred(costs, setup, contention) if setup.is_deferred else _waiting(costs, setup)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds of one segment and of one byte at the speeds of a setup, and sizes.

    Attributes:
        forward_s: Forward with recording on the trainer.
        own_s: Recomputation and backward on the trainer.
        replay_s: Recomputation on a worker.
        backward_s: Backward on a worker.
        send_s: Sending a byte, on the trainer.
        receive_s: Requesting, receiving and checking a byte, on the trainer.
        ingest_s: Receiving a byte, on a worker.
        answer_s: Sending a byte, on a worker.
        trained_bytes: Trained parameters of a segment, in bytes.
        trainer_link: Bandwidth of a trainer's link, in bytes per second.
        link: The smaller bandwidth of a trainer's and a worker's link, in bytes per second.
    """

    forward_s: float
    own_s: float
    replay_s: float
    backward_s: float
    send_s: float
    receive_s: float
    ingest_s: float
    answer_s: float
    trained_bytes: float
    trainer_link: float
    link: float


def _rates(costs: Costs, setup: FleetSetup) -> _Rates:
    trainer, worker = setup.trainer_speed, setup.trainer_speed * setup.worker_speed
    trainer_link = per_second(setup.trainer_link_bytes_per_s)
    return _Rates(
        forward_s=(costs.forward_s + costs.record_s) / trainer,
        own_s=(costs.replay_s + costs.replay_backward_s) / trainer,
        replay_s=costs.replay_s / worker,
        backward_s=costs.replay_backward_s / worker,
        send_s=costs.upload_s / costs.result_bytes / trainer,
        receive_s=costs.finish_s / costs.result_bytes / trainer,
        ingest_s=costs.ingest_s / costs.result_bytes / worker,
        answer_s=costs.answer_s / costs.result_bytes / worker,
        trained_bytes=costs.weight_bytes * setup.trainable_share,
        trainer_link=trainer_link,
        link=min(trainer_link, per_second(setup.worker_link_bytes_per_s)),
    )


def _waiting(costs: Costs, setup: FleetSetup) -> Demand:
    """Returns the demand of a step in which the trainer waits for the backward of each micro-batch."""
    rates, boundary = _rates(costs, setup), costs.boundary_bytes
    ends = list(accumulate(parts_by_speed(setup.segments, [1.0] * setup.workers_per_session), initial=0))
    runs = list(enumerate(pairwise(ends)))
    phases = []
    for micro_batch in range(setup.micro_batches):
        # Trained parameters have changed since the last step, so they travel with the first micro-batch.
        sent_bytes = boundary + (rates.trained_bytes if micro_batch == 0 else 0.0)
        returned_bytes = boundary + rates.trained_bytes
        phases.append(_forward_phase(rates, setup, runs, sent_bytes))
        phases += [
            _backward_phase(rates, setup, number, end - begin, boundary, returned_bytes)
            for number, (begin, end) in reversed(runs)
        ]
    optimizer_s = setup.segments * costs.optimizer_s / setup.trainer_speed
    phases.append(Phase(optimizer_s, ()))
    up = sum(share.up_bytes for phase in phases for share in phase.shares)
    down = sum(share.down_bytes for phase in phases for share in phase.shares)
    computed = setup.micro_batches * setup.segments * rates.forward_s
    return Demand(
        tuple(phases),
        setup.segments,
        setup.segments * setup.micro_batches,
        computed + up * rates.send_s + down * rates.receive_s + optimizer_s,
        rates.own_s,
        1 + patience_s(rates.replay_s + rates.backward_s) // (rates.replay_s + rates.backward_s),
        setup.segments * (costs.weight_bytes - rates.trained_bytes),
        setup.segments * (costs.weight_bytes + boundary + rates.trained_bytes + boundary + costs.footprint.ready_bytes),
    )


def _forward_phase(
    rates: _Rates, setup: FleetSetup, runs: Sequence[tuple[int, tuple[int, int]]], sent_bytes: float
) -> Phase:
    """Returns the phase from the beginning of forward until all of the segments have reached their workers."""
    segment_s = rates.forward_s + sent_bytes * rates.send_s
    arrival_s = max(sent_bytes / rates.link, sent_bytes * rates.ingest_s) + setup.latency_s
    shares = []
    for number, (begin, end) in runs:
        size = end - begin
        shares.append(
            WorkerShare(
                number,
                size,
                ahead_s=size * (rates.replay_s + sent_bytes * rates.ingest_s),
                ahead_from_s=begin * segment_s + arrival_s,
                compute_s=0.0,
                up_bytes=size * sent_bytes,
                down_bytes=0.0,
                compute_tail_s=0.0,
                up_tail_s=begin * segment_s + setup.latency_s + rates.replay_s,
                down_tail_s=0.0,
            )
        )
    trainer_s = max(
        # The last segment is sent before its own forward, so its replay overlaps with that forward.
        setup.segments * segment_s + max(0.0, arrival_s + rates.replay_s - segment_s),
        setup.segments * sent_bytes / rates.trainer_link + setup.latency_s + rates.replay_s,
    )
    return Phase(trainer_s, tuple(shares))


def _backward_phase(
    rates: _Rates, setup: FleetSetup, worker: int, size: int, boundary: int, returned_bytes: float
) -> Phase:
    """Returns the phase in which one worker computes the backward of its run of segments and returns the gradients."""
    request_s = boundary / rates.link + 2 * setup.latency_s
    last_s = max(returned_bytes / rates.link, returned_bytes * rates.receive_s)
    share = WorkerShare(
        worker,
        size,
        ahead_s=0.0,
        ahead_from_s=0.0,
        compute_s=size * (rates.backward_s + returned_bytes * rates.answer_s),
        up_bytes=boundary,
        down_bytes=size * returned_bytes,
        compute_tail_s=request_s + last_s,
        up_tail_s=0.0,
        down_tail_s=request_s + rates.backward_s + (size - 1) * 2 * setup.latency_s,
    )
    # The trainer requests a segment when it has the one after it, so each takes a round trip.
    trainer_s = (
        request_s
        + rates.backward_s
        + (size - 1) * 2 * setup.latency_s
        + size * max(returned_bytes * rates.receive_s, returned_bytes / rates.trainer_link)
    )
    return Phase(trainer_s, (share,))


def _deferred(costs: Costs, setup: FleetSetup, contention: float) -> Demand:
    """Returns the demand of an accumulation block, in which trainer and workers compute different micro-batches."""
    rates, boundary, count = _rates(costs, setup), costs.boundary_bytes, setup.workers_per_session
    # The rule of `boundaries="auto"`: derive where sending a boundary takes longer than computing it.
    is_derived = setup.boundaries == "derive" or (
        setup.boundaries == "auto" and boundary / rates.link > rates.forward_s
    )
    moved = 0.0 if is_derived else boundary
    forward_s = setup.segments * (rates.forward_s + moved * rates.send_s)
    segment_s = rates.replay_s + rates.backward_s + moved * (rates.ingest_s + rates.answer_s)
    shares = _shares(setup, forward_s, rates.own_s, segment_s * contention)
    own_calls = sum(shares)
    calls = setup.segments * setup.micro_batches - own_calls
    remote = setup.segments - shares[0]
    optimizer_s = setup.segments * costs.optimizer_s / setup.trainer_speed
    parts = parts_by_speed(remote, [1.0] * count)
    ends = list(accumulate(parts, initial=shares[0]))
    computed = [
        [max(0, end - max(begin, share)) for share in shares] for begin, end in pairwise(ends)
    ]  # by worker and micro-batch
    begin_s = forward_s + setup.latency_s
    # When workers have finished a micro-batch, the trainer computes its share of it.
    last_share = max((share for share in shares if share < setup.segments), default=0)
    end_s = setup.latency_s + last_share * rates.own_s + boundary / rates.link
    asked = []
    for number, parts_of_one in enumerate(computed):
        if not parts_of_one[0]:
            continue
        used = sum(part > 0 for part in parts_of_one)
        trained_bytes = parts_of_one[0] * rates.trained_bytes
        up = trained_bytes + (2 * used if is_derived else sum(parts_of_one) + used) * boundary
        down = trained_bytes + (used if is_derived else sum(parts_of_one)) * boundary
        # A micro-batch passes the workers one after the other: the first one reaches this worker after the parts before,
        # and the last one is complete after the parts that follow.
        before = sum(others[0] for others in computed[:number])
        after = sum(others[-1] for others in computed[number + 1 :])
        others_s = (before + after) * segment_s
        asked.append(
            WorkerShare(
                number,
                sum(parts_of_one),
                ahead_s=0.0,
                ahead_from_s=0.0,
                compute_s=sum(parts_of_one) * (rates.replay_s + rates.backward_s)
                + up * rates.ingest_s
                + down * rates.answer_s,
                up_bytes=up,
                down_bytes=down,
                compute_tail_s=begin_s + others_s + end_s,
                up_tail_s=parts_of_one[-1] * segment_s + others_s + end_s,
                down_tail_s=begin_s + segment_s + others_s + end_s,
            )
        )
    up, down = (sum(share.up_bytes for share in asked), sum(share.down_bytes for share in asked))
    busy_s = (
        setup.micro_batches * setup.segments * rates.forward_s
        + own_calls * rates.own_s
        + up * rates.send_s
        + down * rates.receive_s
    )
    # After its last forward the trainer computes its share of unfinished micro-batches while workers finish the last one.
    unfinished = min(setup.micro_batches, MORE_OPEN + count)
    last_s = sum(parts_of_one[-1] for parts_of_one in computed) * segment_s + 2 * setup.latency_s
    idle_s = max(0.0, last_s - (unfinished - 1) * shares[-1] * rates.own_s)
    trainer_s = max(busy_s + idle_s, max(up, down) / rates.trainer_link)
    block_bytes = costs.weight_bytes + rates.trained_bytes + unfinished * 2 * boundary + costs.footprint.ready_bytes
    return Demand(
        (Phase(trainer_s, tuple(asked)), Phase(optimizer_s, ())),
        remote,
        calls,
        busy_s + optimizer_s,
        rates.own_s,
        math.inf,
        remote * (costs.weight_bytes - rates.trained_bytes),
        remote * block_bytes,
    )


@lru_cache(maxsize=4096)
def _shares(setup: FleetSetup, forward_s: float, own_s: float, worker_s: float) -> tuple[int, ...]:
    speeds = Speeds(forward_s, own_s, [worker_s] * setup.workers_per_session)
    return tuple(trainers_shares(setup.segments, setup.micro_batches, speeds))
