"""The durations of a fleet's setup, from measured costs. Imports no torch."""

from dataclasses import dataclass

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.phases import per_second
from backhaul.simulate.fleet.setup import FleetSetup


@dataclass(frozen=True, slots=True)
class SegmentRates:
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


def rates_of(costs: Costs, setup: FleetSetup) -> SegmentRates:
    """Returns the durations and sizes of a setup's segments."""
    trainer, worker = setup.trainer_speed, setup.trainer_speed * setup.worker_speed
    trainer_link = per_second(setup.trainer_link_bytes_per_s)
    return SegmentRates(
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
