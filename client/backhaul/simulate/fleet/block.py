"""What an accumulation block asks for: trainer and workers compute different micro-batches. Imports no torch."""

import math
from functools import lru_cache
from itertools import accumulate, pairwise

from backhaul._accumulate.plan import MORE_OPEN, Speeds, planned, trainers_share
from backhaul._dispatch.placement import parts_by_speed
from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.phases import Demand, StepPhase, WorkerShare
from backhaul.simulate.fleet.rates import rates_of
from backhaul.simulate.fleet.setup import FleetSetup


def demand_of_block(costs: Costs, setup: FleetSetup, contention: float) -> Demand:
    """Returns the demand of an accumulation block, in which trainer and workers compute different micro-batches."""
    rates, boundary, count = rates_of(costs, setup), costs.boundary_bytes, setup.workers_per_session
    # The rule of `boundaries="auto"`: derive where sending a boundary takes longer than computing it.
    is_derived = setup.boundaries == "derive" or (
        setup.boundaries == "auto" and boundary / rates.link > rates.forward_s
    )
    moved = 0.0 if is_derived else boundary
    forward_s = setup.segments * (rates.forward_s + moved * rates.send_s)
    segment_s = rates.replay_s + rates.backward_s + moved * (rates.ingest_s + rates.answer_s)
    share, last = _chosen(setup, forward_s, rates.own_s, segment_s * contention)
    own_calls = share * setup.micro_batches + last
    calls = setup.segments * setup.micro_batches - own_calls
    remote = setup.segments - share
    optimizer_s = setup.segments * costs.optimizer_s / setup.trainer_speed
    parts = parts_by_speed(remote, [1.0] * count)
    ends = list(accumulate(parts, initial=0))
    computed = [
        [*[end - begin] * (setup.micro_batches - 1), max(0, min(end, remote - last) - begin)]
        for begin, end in pairwise(ends)
    ]  # by worker and micro-batch
    begin_s = forward_s + setup.latency_s
    # When workers have finished a micro-batch, the trainer computes its share of it.
    end_s = setup.latency_s + (share if remote else 0) * rates.own_s + boundary / rates.link
    asked = []
    for number, parts_of_one in enumerate(computed):
        if not parts_of_one[0]:
            continue
        used = sum(part > 0 for part in parts_of_one)
        trained_bytes = parts_of_one[0] * rates.trained_bytes
        up = trained_bytes + (2 * used if is_derived else sum(parts_of_one) + used) * boundary
        down = trained_bytes + (used if is_derived else sum(parts_of_one)) * boundary
        # A micro-batch passes the workers one after the other: the first one reaches this worker after the parts
        # before, and the last one is complete after the parts that follow.
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
    # After its last forward the trainer computes its share of unfinished micro-batches while workers finish the last.
    unfinished = min(setup.micro_batches, MORE_OPEN + count)
    last_s = sum(parts_of_one[-1] for parts_of_one in computed) * segment_s + 2 * setup.latency_s
    idle_s = max(0.0, last_s - (unfinished - 1) * share * rates.own_s)
    trainer_s = max(busy_s + idle_s, max(up, down) / rates.trainer_link)
    block_bytes = costs.weight_bytes + rates.trained_bytes + unfinished * 2 * boundary + costs.footprint.ready_bytes
    return Demand(
        (StepPhase(trainer_s, tuple(asked)), StepPhase(optimizer_s, ())),
        remote,
        calls,
        busy_s + optimizer_s,
        rates.own_s,
        math.inf,
        2 * remote * rates.trained_bytes,
        remote * (costs.weight_bytes - rates.trained_bytes),
        remote * block_bytes,
    )


@lru_cache(maxsize=4096)
def _chosen(setup: FleetSetup, forward_s: float, own_s: float, worker_s: float) -> tuple[int, int]:
    """Returns the trainer's share of each micro-batch, and how many further segments of the last one it computes."""
    speeds = Speeds(forward_s, own_s, [worker_s] * setup.workers_per_session)
    share = trainers_share(setup.segments, setup.micro_batches, speeds)
    return share, planned(share, setup.segments, setup.micro_batches, speeds).last
