"""The costs of a segment that `backhaul simulate` and `backhaul plan` take from a measured model."""

import pytest

from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul.doctor.profile.measurement import ModelMeasurement, WorkerProfile
from backhaul_lab.simulate.layer_costs import layer_costs, segment_costs
from backhaul_runtime.replay.schedule import Footprint

PLAIN = PlainProfile(3, 1.0, 2.0, 0.0, 0.0, 10, 20, 0, 5, 30, 0, 90, 90, 9, 4, Footprint(7, 8, 9))
TIMES = SegmentTimes(1, 3, 0.1, 2.0, 4.0, 0.2, 0.3, 3, {})
MEASURED = ModelMeasurement(PLAIN, (WorkerProfile("a:1", "0.1.0", 0, {}, None, (TIMES,)),))


def test_a_segment_costs_a_worker_what_it_took() -> None:
    costs = segment_costs(MEASURED)
    assert (costs.forward_s, costs.backward_s) == (1.0, 2.0)
    assert (costs.replay_s, costs.replay_backward_s) == pytest.approx((2.0, 4.0))
    assert (costs.record_s, costs.upload_s, costs.ingest_s) == pytest.approx((0.1, 0.2, 0.2))
    assert (costs.finish_s, costs.answer_s) == pytest.approx((0.3, 0.3))
    assert (costs.weight_bytes, costs.boundary_bytes, costs.footprint.execution_bytes) == (30, 10, 9)


def test_a_plan_divides_them_by_the_speed_of_the_worker() -> None:
    costs = layer_costs(MEASURED).at(1)
    assert MEASURED.workers[0].speed(PLAIN) == pytest.approx(0.5)
    assert (costs.replay_s, costs.replay_backward_s) == pytest.approx((1.0, 2.0))
