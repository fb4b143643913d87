"""What a step asks for in which the trainer waits for the backward of each micro-batch. Imports no torch."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from backhaul._dispatch.placement import parts_by_speed
from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.phases import Demand, StepPhase, WorkerShare
from backhaul.simulate.fleet.rates import SegmentRates, rates_of
from backhaul.simulate.fleet.setup import FleetSetup


def patience_s(expected_s: float) -> float:
    """Returns the queue that a trainer accepts before a segment that takes so long, in seconds (`deadlines.py`)."""
    return max(1.0, 2 * expected_s)


def demand_of_waiting(costs: Costs, setup: FleetSetup) -> Demand:
    """Returns the demand of a step in which the trainer waits for the backward of each micro-batch."""
    rates, boundary = rates_of(costs, setup), costs.boundary_bytes
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
    phases.append(StepPhase(optimizer_s, ()))
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
        (1 + setup.micro_batches) * setup.segments * rates.trained_bytes,
        setup.segments * (costs.weight_bytes - rates.trained_bytes),
        setup.segments * (costs.weight_bytes + boundary + rates.trained_bytes + boundary + costs.footprint.ready_bytes),
    )


def _forward_phase(
    rates: SegmentRates, setup: FleetSetup, runs: Sequence[tuple[int, tuple[int, int]]], sent_bytes: float
) -> StepPhase:
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
    return StepPhase(trainer_s, tuple(shares))


def _backward_phase(
    rates: SegmentRates, setup: FleetSetup, worker: int, size: int, boundary: int, returned_bytes: float
) -> StepPhase:
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
    return StepPhase(trainer_s, (share,))
