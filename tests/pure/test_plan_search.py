"""The search for a plan, with costs that are known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul import _arithmetic as arithmetic
from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul_lab.plan.candidates import Candidate, candidates, lengths
from backhaul_lab.plan.memory import peak_of
from backhaul_lab.plan.search import PredictedPlan, predict_plan, search
from backhaul_lab.plan.text import leanest, memory_text
from backhaul_lab.plan.workers import PlannedWorker
from backhaul_lab.simulate.layer_costs import LayerCosts
from backhaul_runtime.process.units import size_text
from backhaul_runtime.replay.schedule import Footprint

MIB = 1 << 20
PLAIN = PlainProfile(
    layers=16,
    forward_s=1.0,
    backward_s=2.0,
    outside_forward_s=0.0,
    outside_backward_s=0.0,
    boundary_bytes=MIB,
    saved_bytes=16 * MIB,
    outside_bytes=0,
    transient_bytes=2 * MIB,
    trained_bytes=0,
    frozen_bytes=4 * MIB,
    model_bytes=64 * MIB,
    gradient_bytes=0,
    trained_parameters=0,
    tokens=1,
    footprint=Footprint(17 * MIB, 17 * MIB, 20 * MIB),
)
TIMES = SegmentTimes(1, 16, 0.0, 1.0, 2.0, 0.0, 0.0, 16, {})
FREE = LayerCosts(PLAIN, (TIMES,), has_free_transport=True)
"""Sixteen layers whose backward takes twice as long as their forward. Everything else takes no time."""
EQUAL = PlannedWorker("a:1", 1.0, 0)
PLENTY = 1 << 40


def step_s(candidate: Candidate, costs: LayerCosts = FREE, micro_batches: int = 1) -> float:
    return predict_plan(costs, candidate, micro_batches).step_s


def test_without_a_worker_predictions_are_sums() -> None:
    assert step_s(Candidate("plain"), micro_batches=2) == 2 * 16 * 3
    assert step_s(Candidate("torch")) == 16 * 4
    assert step_s(Candidate("torch", kept_layers=4)) == 16 * 4 - 4


def test_a_free_worker_recomputes_beside_forward() -> None:
    blocking = Candidate("blocking", 2, workers=(EQUAL,))
    assert step_s(blocking) == pytest.approx(16 * 3)
    half = replace(EQUAL, speed=0.5)
    expected = arithmetic.blocking_ratio(0.5, 2, 0) * 16 * 4
    assert step_s(replace(blocking, workers=(half,))) == pytest.approx(expected, rel=0.05)


def test_deferred_plans_approach_the_limit() -> None:
    deferred = Candidate("deferred", 1, workers=(EQUAL,))
    assert step_s(deferred, micro_batches=32) == pytest.approx(32 * 16 * 4 / 2, rel=0.1)
    kept = replace(deferred, local="keep")
    assert step_s(kept, micro_batches=32) < step_s(deferred, micro_batches=32)


def test_deriving_boundaries_helps_over_a_thin_link() -> None:
    thin = replace(EQUAL, bytes_per_s=MIB / 4)  # a boundary takes as long as four layers' forward
    sent, derived = (Candidate("deferred", 1, boundaries=way, workers=(thin,)) for way in ("send", "derive"))
    assert step_s(derived, micro_batches=8) < 0.8 * step_s(sent, micro_batches=8)
    long = replace(sent, segment_layers=8)
    assert step_s(long, micro_batches=8) < step_s(sent, micro_batches=8)


def test_activations_need_a_fast_link() -> None:
    activations = Candidate("blocking", 1, returns="activations", workers=(EQUAL,))
    assert step_s(activations) == pytest.approx(16 * 3, rel=0.1)
    thin = replace(EQUAL, bytes_per_s=MIB)
    assert step_s(replace(activations, workers=(thin,))) > 16 * 16


def test_recording_and_transfers_take_time() -> None:
    costs = replace(
        FREE,
        segments=tuple(
            replace(TIMES, layers=layers, record_s=0.5 * layers, upload_s=0.25, finish_s=0.125) for layers in (1, 3)
        ),
    )
    of_two = costs.at(2)
    assert (of_two.record_s, of_two.upload_s, of_two.finish_s) == pytest.approx((1.0, 0.25, 0.125))
    blocking = Candidate("blocking", 1, workers=(EQUAL,))
    assert step_s(blocking, costs) >= 16 * 3.5


def test_a_long_segment_needs_more_memory_if_its_worker_is_lost() -> None:
    peaks = [peak_of(FREE, Candidate("blocking", length, workers=(EQUAL,)), 1) for length in (1, 4, 16)]
    assert peaks[0].lost_bytes < peaks[1].lost_bytes < peaks[2].lost_bytes
    assert all(peak.trainer_bytes <= peak.lost_bytes for peak in peaks)
    assert peaks[0].trainer_bytes < peak_of(FREE, Candidate("torch"), 1).trainer_bytes


def test_the_fastest_plan_that_fits_is_chosen() -> None:
    best, plans = search(FREE, [EQUAL], 8, PLENTY)
    assert best is not None
    fitting = [plan.step_s for plan in plans if plan.fits(PLENTY)]
    assert best.step_s <= 1.01 * min(fitting)
    tight, _ = search(FREE, [EQUAL], 8, 40 * MIB)
    assert tight is not None
    assert max(tight.peak.trainer_bytes, tight.peak.lost_bytes) <= 40 * MIB
    assert search(FREE, [EQUAL], 8, MIB)[0] is None


def test_without_gain_no_worker_is_used() -> None:
    useless = replace(EQUAL, bytes_per_s=1.0)
    best, _ = search(FREE, [useless], 1, PLENTY)
    assert best is not None
    assert best.candidate == Candidate("plain")


def test_a_worker_without_memory_is_not_used() -> None:
    small = replace(EQUAL, memory_bytes=8 * MIB)
    _, plans = search(FREE, [small], 8, PLENTY)
    assert not any(plan.fits(PLENTY) for plan in plans if plan.candidate.is_remote)


def test_two_workers_are_used_if_that_is_faster() -> None:
    best, _ = search(FREE, [EQUAL, replace(EQUAL, address="b:1")], 32, 400 * MIB)
    assert best is not None
    assert best.candidate.settings["worker"] == "a:1,b:1"


def test_lengths_divide_the_layers_differently() -> None:
    assert lengths(6) == [1, 2, 3, 6]
    assert lengths(1) == [1]
    assert len(lengths(80)) <= 8
    assert {1, 80} <= {*lengths(80)}


@settings(max_examples=30)
@given(st.integers(1, 40), st.floats(0.1, 4), st.integers(1, 8), st.floats(1e5, 1e9))
def test_every_plan_has_finite_values(layers: int, speed: float, micro_batches: int, rate: float) -> None:
    costs = replace(FREE, plain=replace(PLAIN, layers=layers))
    worker = PlannedWorker("a:1", speed, PLENTY, rate, 1e-3)
    some = list(candidates(costs, [worker], micro_batches))[::7]
    plans: list[PredictedPlan] = [predict_plan(costs, candidate, micro_batches) for candidate in some]
    for plan in plans:
        # Nothing is faster than the forward of all layers on the trainer.
        assert plan.step_s >= micro_batches * layers * costs.plain.forward_s * (1 - 1e-9)
        assert 0 < plan.peak.trainer_bytes < PLENTY
        assert str(plan.candidate)


def test_the_memory_of_a_plan_is_set_beside_that_without_checkpointing_and_the_least() -> None:
    candidate = Candidate("blocking", 4, workers=(EQUAL,))
    plans = [predict_plan(FREE, one, 1) for one in (Candidate("plain"), Candidate("torch"), candidate)]
    alone, torchs, chosen = plans
    assert leanest(plans) is torchs  # the other one needs more if its worker is lost
    assert memory_text(plans, torchs, 0.0).endswith("No plan takes less.")
    assert "less than without checkpointing" in memory_text(plans, chosen, 0.0)
    assert "The leanest plan, " in memory_text(plans, alone, 0.0)
    more = replace(torchs, peak=replace(alone.peak, trainer_bytes=alone.peak.trainer_bytes + 242 * MIB))
    assert f", 242 MiB more than without checkpointing ({size_text(alone.peak.trainer_bytes)})" in memory_text(
        plans, more, 0.0
    )
