"""Tests of predictions from known costs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from backhaul._cli.main import main
from backhaul_lab.simulate.costs import (
    Costs,
    KnownCosts,
    Setup,
    step_of_torch_s,
    step_without_checkpointing_s,
)
from backhaul_lab.simulate.deferred import BlockSetup, predict_block
from backhaul_lab.simulate.engine import Compute, Event, SimulatedCore, SimulatedLink, Simulation, Thread, Transfer
from backhaul_lab.simulate.model import predict
from backhaul_runtime.replay.schedule import Footprint

FREE = Costs(
    forward_s=1.0,
    backward_s=2.0,
    optimizer_s=0.0,
    record_s=0.0,
    upload_s=0.0,
    ingest_s=0.0,
    replay_s=1.0,
    replay_backward_s=2.0,
    answer_s=0.0,
    finish_s=0.0,
    weight_bytes=12,
    boundary_bytes=2,
    footprint=Footprint(90, 88, 100),
)
"""Costs with which backward takes twice as long as forward and everything else takes no time."""


def over_none(setup: Setup, costs: Costs = FREE) -> float:
    return predict(costs, setup).step_s / step_without_checkpointing_s(costs, setup.segments)


def test_a_core_is_shared_by_those_who_work_on_it() -> None:
    simulation, core, ends = Simulation(), SimulatedCore(speed=2.0), []

    def work(seconds: float) -> Thread:
        yield Compute(core, seconds)
        ends.append(simulation.now_s)

    simulation.start(work(2.0))
    simulation.start(work(6.0))
    simulation.run()
    assert ends == [2.0, 4.0]


def test_a_link_carries_one_after_the_other() -> None:
    simulation, link, ends = Simulation(), SimulatedLink(bytes_per_s=10.0, latency_s=1.0), []

    def carry() -> Thread:
        yield Transfer(link, 20)
        ends.append(simulation.now_s)

    simulation.start(carry())
    simulation.start(carry())
    simulation.run()
    assert ends == [3.0, 5.0]


def test_an_event_lets_go_on_who_waits_and_who_comes_later() -> None:
    simulation, event, woken = Simulation(), Event(), []

    def wait(name: str) -> Thread:
        yield event
        woken.append(name)

    def happen() -> Thread:
        yield from ()
        simulation.happens(event)
        yield wait("later")
        woken.append("last")

    simulation.start(wait("first"))
    simulation.start(happen())
    simulation.run()
    assert woken == ["first", "later", "last"]


@pytest.mark.parametrize("segments", [4, 8, 16])
def test_the_limits_of_a_step(segments: int) -> None:
    usual = Setup(segments)
    assert over_none(usual) == pytest.approx(1.0)
    assert over_none(replace(usual, is_predicted=False)) == pytest.approx(1 + 1 / (3 * segments))
    assert step_of_torch_s(FREE, segments) == pytest.approx(4 * segments)


@pytest.mark.parametrize("ready", [1, 2, 4, 6, 8])
def test_room_for_some_of_the_segments(ready: int) -> None:
    memory = FREE.budget_bytes(8, ready)
    setup = Setup(8, memory_bytes=memory)
    predicted = predict(FREE, setup)
    assert over_none(setup) == pytest.approx(1 + (1 - ready / 8) / 3)
    assert predicted.replays == 8  # No replay was discarded.


def test_no_number_of_workers_makes_one_batch_faster() -> None:
    assert over_none(Setup(8, workers=2)) == pytest.approx(1.0)


def test_a_narrow_network_bounds_a_step() -> None:
    narrow = Setup(8, bytes_per_s=1.0)
    assert predict(FREE, narrow).step_s > 8 * FREE.result_bytes / 1.0
    assert over_none(replace(narrow, bytes_per_s=1e9)) == pytest.approx(over_none(Setup(8)), rel=1e-3)


def test_a_limited_network_has_costs_of_its_own() -> None:
    costly = replace(FREE, upload_s=1.0)
    costs = KnownCosts(FREE, costly, FREE)
    assert costs.of(Setup(8)) == FREE
    assert costs.of(Setup(8, bytes_per_s=1e9)) == costly
    assert KnownCosts.read(costs.as_json()) == costs


def test_a_faster_worker_helps_and_a_slower_one_hurts() -> None:
    fast, usual, slow = (over_none(Setup(8, worker_speed=speed)) for speed in (2.0, 1.0, 0.5))
    assert fast < usual < slow


@pytest.mark.slow
def test_predictions_are_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, written, drawn = (tmp_path / name for name in ("costs.json", "results.json", "results.svg"))
    costs.write_text(json.dumps({"costs": asdict(FREE), "block_costs": asdict(FREE)}))
    assert main(["simulate", "--costs", str(costs), "--json", str(written), "--svg", str(drawn)]) == 0
    assert "room for 4 of 8" in capsys.readouterr().out
    results = json.loads(written.read_text())
    assert results["costs"] == results["link_costs"] == results["block_costs"] == asdict(FREE)
    assert {step["name"]: step["replays"] for step in results["steps"]}["12 blocks"] == 12
    assert len(ElementTree.parse(drawn).findall(".//{*}polyline")) == 9


@pytest.mark.parametrize("text", ["", "{}", '{"costs": {"forward_s": 1}}'])
def test_costs_that_can_not_be_read(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.json").write_text(text)
    assert main(["simulate", "--costs", str(tmp_path / "costs.json")]) == 2
    assert "--costs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"forward_s": "1"}, "forward_s is '1'"),
        ({"forward_s": float("nan")}, "forward_s is nan"),
        ({"upload_s": -1}, "upload_s is -1"),
        ({"replay_backward_s": 0}, "replay_backward_s is 0, but every segment takes some"),
        ({"boundary_bytes": 0}, "boundary_bytes is 0"),
        ({"footprint": {"replay_bytes": 0, "ready_bytes": float("inf"), "backward_bytes": 0}}, "ready_bytes is inf"),
    ],
)
def test_costs_from_which_nothing_follows_are_refused(
    changed: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {**asdict(FREE), **changed}}))
    assert main(["simulate", "--costs", str(tmp_path / "costs.json")]) == 2
    assert named in capsys.readouterr().err


def test_the_committed_costs_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    committed = Path(__file__).parents[2] / "docs/simulation.json"
    assert main(["simulate", "--costs", str(committed)]) == 0
    assert "32 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("speeds", [[0.1], [1.0], [3.0], [0.5, 0.25], [0.3] * 8])
def test_blocks_of_many_micro_batches_keep_to_the_law(speeds: list[float]) -> None:
    predicted = predict_block(FREE, BlockSetup(segments=240, micro_batches=600, speeds=speeds))
    assert predicted.law == min(1 + sum(speeds), 4)
    assert predicted.speed_up == pytest.approx(predicted.law, rel=0.05)
    assert predicted.speed_up <= predicted.whole_units * (1 + 1e-9) <= predicted.law * (1 + 1e-6)


def test_few_segments_cannot_be_divided_evenly() -> None:
    predicted = predict_block(FREE, BlockSetup(segments=8, micro_batches=8, speeds=[1.0]))
    assert (predicted.law, predicted.shares) == (2.0, [3] * 8)
    assert predicted.whole_units == pytest.approx(32 / 17)  # 8 forwards and 3 of 8 segments, each of three forwards
    assert 1.8 < predicted.speed_up < predicted.whole_units


def test_the_trainer_takes_last_segments_where_whole_ones_fit_badly() -> None:
    predicted = predict_block(FREE, BlockSetup(segments=4, micro_batches=16, speeds=[1.0]))
    assert predicted.shares[0] < predicted.shares[-1]
    assert predicted.speed_up > predicted.whole_units
