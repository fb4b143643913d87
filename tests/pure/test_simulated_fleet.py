"""Tests of the models of fleets: what they conserve, their limits, and that they agree with each other."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.simulate.costs import Setup
from backhaul.simulate.deferred import BlockSetup, law, predict_block
from backhaul.simulate.fleet.demand import demand
from backhaul.simulate.fleet.events import simulate
from backhaul.simulate.fleet.flow import break_even_workers, enough_workers, flow, torch_step_s
from backhaul.simulate.fleet.loss import loss_of_racks
from backhaul.simulate.fleet.phases import per_second
from backhaul.simulate.fleet.setup import FleetSetup
from backhaul.simulate.fleet.shared_resource import NOBODY, SharedResource
from backhaul.simulate.model import predict
from backhaul_runtime.errors import SettingError
from support.costs import COSTS

FREE = replace(
    COSTS, forward_s=1.0, backward_s=2.0, optimizer_s=0.0, record_s=0.0, upload_s=0.0, ingest_s=0.0, replay_s=1.0,
    replay_backward_s=2.0, answer_s=0.0, finish_s=0.0,
)  # fmt: skip
"""Costs with which backward takes twice as long as forward and everything else takes no time."""
ONE = FleetSetup(1, 1)
LINKS = st.sampled_from([0.0, 1e6, 1e7, 1e8, 1e9])


def setups(*, is_deferred: bool | None = None) -> st.SearchStrategy[FleetSetup]:
    """Returns small fleets of all kinds."""

    def build(deferred: bool, size: int, **values: int | float) -> FleetSetup:
        workers = max(size, int(values.pop("workers")))
        return FleetSetup(workers=workers, workers_per_session=size, is_deferred=deferred, **values)  # type: ignore[arg-type]

    return st.builds(
        build,
        deferred=st.booleans() if is_deferred is None else st.just(is_deferred),
        size=st.integers(1, 3),
        sessions=st.integers(1, 30),
        workers=st.integers(1, 12),
        segments=st.integers(3, 9),
        micro_batches=st.integers(1, 5),
        trainable_share=st.floats(0, 1),
        worker_speed=st.floats(0.2, 3),
        worker_link_bytes_per_s=LINKS,
        trainer_link_bytes_per_s=LINKS,
        latency_s=st.sampled_from([0.0, 1e-4, 1e-2]),
        rack_size=st.integers(1, 5),
    )


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5), st.booleans()), min_size=1, max_size=20))
def test_a_resource_conserves_work(arrivals: list[tuple[float, float, bool]]) -> None:
    core, ended, now_s = SharedResource(2.0), [], 0.0
    for session, (at_s, work, is_ahead) in enumerate(sorted(arrivals)):
        while (end_s := core.next_end_s()) is not None and end_s <= at_s:
            ended.append(core.end(end_s)[0])
        if is_ahead:
            core.arrive_ahead(at_s, work, session)
        else:
            core.arrive(at_s, work, session, 0.0)
    while (end_s := core.next_end_s()) is not None:
        ended.append(core.end(end_s)[0])
        assert end_s >= now_s
        now_s = end_s
    assert core.busy_s * 2.0 == pytest.approx(sum(work for _, work, _ in arrivals))
    waited = [number for number, (*_, is_ahead) in enumerate(sorted(arrivals)) if not is_ahead]
    assert sorted(session for session in ended if session != NOBODY) == waited


def test_jobs_share_a_resource_and_those_that_are_waited_for_come_first() -> None:
    core = SharedResource(1.0)
    core.arrive_ahead(0.0, 5.0, session=0)
    core.arrive(1.0, 2.0, session=1, tail_s=0.0)
    core.arrive(1.0, 1.0, session=2, tail_s=0.5)
    assert core.next_end_s() == 3.0
    assert core.end(3.0) == (2, 0.5)
    assert core.next_end_s() == 4.0
    assert core.end(4.0) == (1, 0.0)
    assert core.take_ahead(5.0, session=0) == 3.0  # one second before, and one after the others
    assert core.next_end_s() is None


@pytest.mark.parametrize("bytes_per_s", [0.0, 30e6, 100e6, 1e9])
@pytest.mark.parametrize("latency_s", [0.0, 0.02])
@pytest.mark.parametrize(("segments", "workers", "speed"), [(4, 1, 1), (8, 1, 0.5), (8, 1, 3), (8, 2, 1), (16, 4, 1)])
def test_one_session_agrees_with_the_simulation_of_tensors(
    segments: int, workers: int, speed: float, bytes_per_s: float, latency_s: float
) -> None:
    setup = FleetSetup(
        1,
        workers,
        workers_per_session=workers,
        segments=segments,
        worker_speed=speed,
        worker_link_bytes_per_s=bytes_per_s,
        latency_s=latency_s,
    )
    exact = predict(COSTS, Setup(segments, workers, 0, bytes_per_s, latency_s, speed)).step_s
    assert simulate(COSTS, setup).step_s == pytest.approx(exact, rel=0.05)
    assert flow(COSTS, setup).step_s == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(("segments", "micro_batches"), [(4, 4), (8, 8), (8, 32)])
@pytest.mark.parametrize("speeds", [[0.1], [0.3], [1.0], [3.0], [1.0] * 2, [0.3] * 4])
def test_one_block_agrees_with_the_simulation_of_micro_batches(
    segments: int, micro_batches: int, speeds: list[float]
) -> None:
    setup = FleetSetup(
        1,
        len(speeds),
        workers_per_session=len(speeds),
        segments=segments,
        micro_batches=micro_batches,
        is_deferred=True,
        boundaries="send",
        worker_speed=speeds[0],
    )
    exact = predict_block(COSTS, BlockSetup(segments, micro_batches, speeds)).took_s + segments * COSTS.optimizer_s
    assert simulate(COSTS, setup).step_s == pytest.approx(exact, rel=0.08)


@given(setups())
def test_bytes_are_conserved(setup: FleetSetup) -> None:
    asked = demand(COSTS, setup)
    trained = COSTS.weight_bytes * setup.trainable_share
    if not setup.is_deferred:
        boundaries = setup.micro_batches * (setup.segments + setup.workers_per_session) * COSTS.boundary_bytes
        assert asked.up_bytes == pytest.approx(boundaries + setup.segments * trained)
        returned = setup.micro_batches * setup.segments * (COSTS.boundary_bytes + trained)
        assert asked.down_bytes == pytest.approx(returned)
        return
    assert asked.parameter_bytes == pytest.approx(2 * asked.remote_segments * trained)
    # Parameters travel once in a block, and each call needs at most its input, and the gradients of input and output.
    once = asked.remote_segments * trained
    assert once <= asked.up_bytes + 1e-3 <= once + 2 * asked.remote_calls * COSTS.boundary_bytes + 1
    assert once <= asked.down_bytes + 1e-3 <= once + asked.remote_calls * COSTS.boundary_bytes + 1


@given(setups())
def test_work_is_conserved(setup: FleetSetup) -> None:
    asked = demand(FREE, setup)
    each_s = 3.0 / setup.worker_speed
    assert asked.worker_s == pytest.approx(asked.remote_calls * each_s)
    own_calls = setup.segments * setup.micro_batches - asked.remote_calls
    forwards = setup.segments * setup.micro_batches
    assert asked.trainer_compute_s == pytest.approx(forwards * 1.0 + own_calls * 3.0)


@settings(max_examples=20, deadline=None)
@given(setups(is_deferred=True))
def test_what_workers_compute_is_what_sessions_asked_for(setup: FleetSetup) -> None:
    simulated = simulate(COSTS, setup, steps=4)
    asked = flow(COSTS, setup).demand
    served_s = simulated.busy_s["worker compute"] * setup.workers
    done = len(simulated.ends_s)
    assert done * asked.worker_s * (1 - 1e-9) <= served_s <= (done + setup.sessions) * asked.worker_s * (1 + 1e-9)


# Without blocks: in a block, sessions choose their share from how long workers take. They may leave more to a slow
# worker whose link has become faster, although they would have been done sooner alone.
@settings(deadline=None)
@given(setups(is_deferred=False), st.sampled_from([1.5, 4.0, 100.0]))
def test_faster_links_never_make_a_step_longer(setup: FleetSetup, factor: float) -> None:
    faster = replace(
        setup,
        boundaries="send",  # "auto" may choose another way for another link
        worker_link_bytes_per_s=setup.worker_link_bytes_per_s * factor,
        trainer_link_bytes_per_s=setup.trainer_link_bytes_per_s * factor,
    )
    assert flow(COSTS, faster).step_s <= flow(COSTS, replace(setup, boundaries="send")).step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(setups())
def test_the_balance_of_flows_keeps_every_resource_within_its_limit(setup: FleetSetup) -> None:
    balance = flow(COSTS, setup)
    assert all(0 <= balance.utilization(name) <= 1 + 1e-9 for name in balance.needs_s)
    assert balance.step_s >= balance.demand.alone_s(per_second(setup.worker_link_bytes_per_s)) * (1 - 1e-9)


@pytest.mark.parametrize("bytes_per_s", [0.0, 125e6])
@pytest.mark.parametrize(("sessions", "workers", "size"), [(8, 4, 1), (40, 4, 1), (40, 4, 2), (120, 4, 4), (3, 30, 3)])
@pytest.mark.parametrize("micro_batches", [1, 16])
def test_the_simulation_reaches_the_balance_of_flows(
    sessions: int, workers: int, size: int, bytes_per_s: float, micro_batches: int
) -> None:
    setup = FleetSetup(
        sessions,
        workers,
        workers_per_session=size,
        micro_batches=micro_batches,
        is_deferred=micro_batches > 1,
        worker_link_bytes_per_s=bytes_per_s,
    )
    assert simulate(COSTS, setup).step_s == pytest.approx(flow(COSTS, setup).step_s, rel=0.08)


def test_sessions_with_a_worker_each_keep_to_the_limits_of_a_step() -> None:
    setup = FleetSetup(50, 50)
    assert flow(FREE, setup).step_s == simulate(FREE, setup).step_s == pytest.approx(8 * 3.0)
    assert flow(FREE, setup).needs_s["worker link up"] == 0.0


def test_two_sessions_on_a_worker_take_twice_as_long() -> None:
    assert flow(FREE, FleetSetup(100, 50)).step_s == pytest.approx(2 * 8 * 3.0)
    assert simulate(FREE, FleetSetup(100, 50)).step_s == pytest.approx(2 * 8 * 3.0, rel=0.03)


def test_trainers_do_not_wait_for_workers_that_are_far_too_few() -> None:
    setup = FleetSetup(1_000, 2)
    assert flow(FREE, setup).step_s == pytest.approx(torch_step_s(FREE, setup), rel=0.02)
    simulated = simulate(FREE, setup)
    assert simulated.step_s == pytest.approx(torch_step_s(FREE, setup), rel=0.02)
    assert simulated.busy_calls > 0.9 * 8 * len(simulated.ends_s)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_blocks_of_many_sessions_keep_to_the_law(ratio: float) -> None:
    size = max(1, round(ratio))
    setup = FleetSetup(
        16, round(16 * ratio), workers_per_session=size, segments=48, micro_batches=200, is_deferred=True
    )
    speed_up = torch_step_s(FREE, setup) / flow(FREE, setup).step_s
    assert speed_up == pytest.approx(law(FREE, [1.0] * size if ratio >= 1 else [ratio]), rel=0.05)


def test_further_workers_help_until_each_session_has_one_and_none_makes_up_for_thin_links() -> None:
    setup = FleetSetup(100, 10)
    assert enough_workers(FREE, setup) == pytest.approx(100, abs=2)
    assert break_even_workers(FREE, setup) == pytest.approx(75, abs=2)
    assert break_even_workers(FREE, replace(setup, trainer_link_bytes_per_s=1e6)) == math.inf


def test_what_binds_is_named() -> None:
    fast = FleetSetup(100, 50, worker_link_bytes_per_s=1e12, trainer_link_bytes_per_s=1e12)
    assert flow(COSTS, fast).binds == "worker compute"
    assert flow(COSTS, replace(fast, sessions=400, worker_link_bytes_per_s=1e7)).binds.startswith("worker link")
    block = replace(fast, workers=1_000, micro_batches=16, is_deferred=True, boundaries="send")
    assert flow(COSTS, replace(block, trainer_link_bytes_per_s=1e6)).binds.startswith("trainer link")
    assert flow(COSTS, replace(fast, rack_link_bytes_per_s=1e7)).binds.startswith("rack link")
    assert flow(COSTS, replace(fast, workers=1_000)).binds == "order of the segments"


@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_loss_of_a_rack_costs_what_the_arithmetic_says(is_deferred: bool) -> None:
    setup = FleetSetup(
        20,
        20,
        micro_batches=4 if is_deferred else 1,
        is_deferred=is_deferred,
        trainable_share=0.01,
        rack_size=5,
        racks_lost=2,
        worker_link_bytes_per_s=1e9,
    )
    loss, simulated = loss_of_racks(COSTS, setup), simulate(COSTS, setup, steps=8)
    assert (loss.workers, loss.sessions) == (10, 10)
    assert simulated.resent_bytes == pytest.approx(loss.resent_bytes)
    assert 0 < simulated.recomputed_calls <= 10 * flow(COSTS, setup).demand.remote_calls
    lost_at_s = simulated.lost_at_s or 0.0
    steps = [(end_s - took_s, took_s) for end_s, took_s in zip(simulated.ends_s, simulated.durations_s, strict=True)]
    hit = [took_s for began_s, took_s in steps if began_s < lost_at_s < began_s + took_s]
    assert max(hit) <= loss.before_s + loss.recomputed_s + 1e-6
    # Each of the ten workers that are left has two sessions then.
    after = [
        took_s for began_s, took_s in steps if began_s > lost_at_s + loss.before_s + loss.recomputed_s + loss.after_s
    ]
    assert fmean(after) == pytest.approx(loss.after_s, rel=0.1)
    assert simulate(COSTS, replace(setup, racks_lost=0), steps=8).recomputed_calls == 0


def test_without_any_worker_left_trainers_go_on_alone() -> None:
    setup = FleetSetup(20, 10, rack_size=5, racks_lost=2)
    simulated = simulate(COSTS, setup, steps=8)
    assert simulated.durations_s[-1] == pytest.approx(torch_step_s(COSTS, setup))
    assert loss_of_racks(COSTS, setup).after_s == torch_step_s(COSTS, setup)


def test_a_seed_gives_the_same_result_and_chance_does_not_divide_sessions_better() -> None:
    setup = FleetSetup(200, 100, placement="random")
    first, again, even = simulate(COSTS, setup), simulate(COSTS, setup), simulate(COSTS, FleetSetup(200, 100))
    assert first == again
    assert first.percentile_s(99) > even.percentile_s(99)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"sessions": 0}, "sessions is 0"),
        ({"segments": -1}, "segments is -1"),
        ({"worker_speed": 0.0}, "worker_speed is 0"),
        ({"trainable_share": 1.5}, "trainable_share is 1.5"),
        ({"latency_s": math.nan}, "latency_s is nan"),
        ({"rack_link_bytes_per_s": -1.0}, "rack_link_bytes_per_s is -1"),
        ({"workers_per_session": 3}, "there are 2 workers and 8 segments"),
        ({"racks_lost": 2}, "the 2 workers fill 1 racks"),
    ],
)
def test_an_impossible_fleet_is_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        replace(FleetSetup(10, 2), **values)  # type: ignore[arg-type]
