"""What the loss of racks costs, by arithmetic. Imports no torch."""

from dataclasses import dataclass

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.flow import flow, torch_step_s, without_lost_racks
from backhaul.simulate.fleet.phases import per_second
from backhaul.simulate.fleet.setup import SILENCE_S, FleetSetup


@dataclass(frozen=True, slots=True)
class LossOfRacks:
    """The costs of a loss.

    Attributes:
        workers: Number of workers that are lost.
        sessions: Number of sessions that had segments on them.
        before_s: Duration of a step before the loss, in seconds.
        after_s: Duration of a step when the sessions have moved to the remaining workers, in seconds.
        recomputed_s: The most seconds that the trainer of such a session takes, once, to notice the loss and recompute
            what its lost workers had not returned.
        resent_bytes: Bytes of frozen parameters that all these sessions together send to their new workers, once.
        resending_s: Seconds that the links of the remaining workers need for these bytes. 0 for unlimited links.
    """

    workers: int
    sessions: int
    before_s: float
    after_s: float
    recomputed_s: float
    resent_bytes: float
    resending_s: float


def loss_of_racks(costs: Costs, setup: FleetSetup) -> LossOfRacks:
    """Returns what the loss of a setup's lost racks costs, if its sessions are placed evenly."""
    before = flow(costs, setup)
    lost, count = setup.workers_lost, setup.workers_per_session
    left = setup.workers - lost
    after_s = flow(costs, without_lost_racks(setup)).step_s if left else torch_step_s(costs, setup)
    own_s = (costs.replay_s + costs.replay_backward_s) / setup.trainer_speed
    # A step that waits for each micro-batch loses the segments of one; a block those of all, because their sum is lost.
    calls = before.demand.remote_calls if setup.is_deferred else before.demand.remote_segments
    lost_runs = round(setup.sessions * count * lost / setup.workers)
    resent_bytes = lost_runs * before.demand.frozen_bytes / count if left else 0.0
    return LossOfRacks(
        workers=lost,
        sessions=min(setup.sessions, lost_runs),
        before_s=before.step_s,
        after_s=after_s,
        recomputed_s=SILENCE_S + calls / count * own_s,
        resent_bytes=resent_bytes,
        resending_s=resent_bytes / max(1, left) / per_second(setup.worker_link_bytes_per_s),
    )
