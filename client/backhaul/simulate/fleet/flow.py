"""Which resource binds a fleet, from what all sessions together ask of each. Imports no torch.

For S sessions, W workers and a step that takes t seconds, each resource must do in t what one step of every session
asks of it. So t is at least

    alone                               a session that shares its workers with nobody
    S x worker_s / W                    the workers' cores
    S x up_bytes / (W x bandwidth)      the workers' links, and the same for down_bytes
    S x up_bytes / (R x bandwidth)      the links of R racks, and the same for down_bytes

The largest of these is the step, and its resource binds. It is reached if the sessions never all wait at once.
Trainers bound the second line, because they compute a segment themselves if the queue before it is too long
(`_of_busy_workers`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from backhaul.simulate.costs import Costs, step_of_torch_s
from backhaul.simulate.fleet.demand import demand
from backhaul.simulate.fleet.phases import Demand, per_second
from backhaul.simulate.fleet.setup import FleetSetup

HELPS = 0.01
"""Further workers help if infinitely many of them would shorten the step by more than this part of it."""

CHAIN = "order of the segments"
"""What binds if no resource does: backward is a chain, in which one segment waits for the next."""

_CONTENTIONS = 25
"""Number of guesses between a session alone and one that gets nothing more than its part of the workers."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A fleet in the balance of its flows.

    Attributes:
        step_s: Duration of a step, in seconds.
        binds: The resource that binds.
        needs_s: For each resource the seconds that it needs for one step of every session.
        demand: What a session's step asks for.
        contention: The factor by which segments take longer on a worker than for a session alone, in the view of a
            trainer that chooses its share of an accumulation block. 1 without blocks.
        kept: The part of the remote segments that workers compute. Trainers compute the others, because the workers'
            queues are too long. 1 in a block.
    """

    step_s: float
    binds: str
    needs_s: Mapping[str, float]
    demand: Demand
    contention: float
    kept: float

    def utilization(self, resource: str) -> float:
        """Returns the part of a step during which a resource is in use, from 0 to 1."""
        return self.needs_s[resource] / self.step_s


def torch_step_s(costs: Costs, setup: FleetSetup) -> float:
    """Returns the duration of a step with torch's checkpoint, which needs no worker."""
    computed_s = step_of_torch_s(costs, setup.segments) - setup.segments * costs.optimizer_s
    return (setup.micro_batches * computed_s + setup.segments * costs.optimizer_s) / setup.trainer_speed


def flow(costs: Costs, setup: FleetSetup, workers: int | None = None) -> Flow:
    """Predicts a fleet whose sessions are divided evenly among its workers.

    Args:
        costs: Costs of one segment with one micro-batch.
        setup: The fleet. `racks_lost` does not count.
        workers: Number of workers, if it is another one than that of the setup.
    """
    workers = setup.workers if workers is None else workers
    if not setup.is_deferred:
        return _balance(costs, setup, workers, 1.0)
    # In a block the trainer computes the more itself the longer it waits for workers, until both take equally long.
    most = max(1.0, setup.sessions * setup.workers_per_session / workers) * 2
    before: Flow | None = None
    for guess in range(_CONTENTIONS):
        balance = _balance(costs, setup, workers, most ** (guess / (_CONTENTIONS - 1)))
        if not balance.binds.startswith(("worker", "rack")):
            break
        before = balance
    return balance if before is None or balance.step_s <= before.step_s else before


def _balance(costs: Costs, setup: FleetSetup, workers: int, contention: float) -> Flow:
    asked = demand(costs, setup, contention)
    link, rack_link = per_second(setup.worker_link_bytes_per_s), per_second(setup.rack_link_bytes_per_s)
    racks = workers / setup.rack_size  # a partly filled rack gets a part of the sessions
    alone_s = asked.alone_s(link)
    worker_s, kept = _of_busy_workers(setup, workers, asked)
    up, down = setup.sessions * asked.up_bytes, setup.sessions * asked.down_bytes * kept
    needs_s = {
        "worker compute": worker_s,
        "worker link up": up / workers / link,
        "worker link down": down / workers / link,
        "rack link up": up / racks / rack_link,
        "rack link down": down / racks / rack_link,
        "trainer compute": asked.trainer_compute_s,
        "trainer link up": asked.up_bytes / per_second(setup.trainer_link_bytes_per_s),
        "trainer link down": asked.down_bytes / per_second(setup.trainer_link_bytes_per_s),
    }
    busiest = max(needs_s, key=lambda name: needs_s[name])
    step_s = max(alone_s, needs_s[busiest])
    binds = busiest if needs_s[busiest] >= (1 - HELPS) * step_s else CHAIN
    return Flow(step_s, binds, needs_s, asked, contention, kept)


def _of_busy_workers(setup: FleetSetup, workers: int, asked: Demand) -> tuple[float, float]:
    """Returns the seconds that the workers' cores need for a step, and the part of the segments that they compute.

    A trainer that would wait too long for a segment computes it itself. Let m sessions wait for each worker at most,
    and w be the seconds of a worker's core for a segment. A segment then takes m x w on a worker, and own_s on the
    trainer. The workers compute a part p of all segments, and are always busy, so

        step = base + segments x (p x m x w + (1 - p) x own_s),    p = workers x step / (sessions x segments x w)

    where base is what the trainer does besides. Solved for the step this is the first number below.
    """
    needed_s = setup.sessions * asked.worker_s / workers
    if asked.most_waiting == math.inf:
        return needed_s, 1.0
    segments, each_s = asked.remote_calls, asked.worker_s / asked.remote_calls
    base_s = sum(phase.trainer_s for phase in asked.phases if not any(share.down_bytes for share in phase.shares))
    gained = workers / setup.sessions * (asked.most_waiting * each_s - asked.own_s) / each_s
    if gained >= 1:
        return needed_s, 1.0
    step_s = (base_s + segments * asked.own_s) / (1 - gained)
    return (step_s, step_s / needed_s) if step_s < needed_s else (needed_s, 1.0)


def enough_workers(costs: Costs, setup: FleetSetup) -> int:
    """Returns the number of workers beyond which more shorten the step by less than `HELPS` of it.

    Without blocks this is S x (worker_s or bytes / bandwidth) / alone, for the resource that asks for most workers.
    """
    unlimited_s = flow(
        costs, setup, workers=max(setup.workers_per_session, setup.sessions * setup.workers_per_session * 64)
    ).step_s
    low, high = setup.workers_per_session - 1, setup.sessions * setup.workers_per_session * 64
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        if flow(costs, setup, workers=middle).step_s <= unlimited_s * (1 + HELPS):
            high = middle
        else:
            low = middle
    return high


def break_even_workers(costs: Costs, setup: FleetSetup) -> float:
    """Returns the number of workers at which a step takes as long as with torch's checkpoint; infinity for none."""
    torch_s = torch_step_s(costs, setup)
    low, high = setup.workers_per_session - 1, setup.sessions * setup.workers_per_session * 64
    if flow(costs, setup, workers=high).step_s > torch_s:
        return math.inf
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if flow(costs, setup, workers=middle).step_s <= torch_s else (middle, high)
    return float(high)


def without_lost_racks(setup: FleetSetup) -> FleetSetup:
    """Returns the fleet that remains when the lost racks' sessions have moved to the other workers."""
    return replace(setup, workers=setup.workers - setup.workers_lost, racks_lost=0)
