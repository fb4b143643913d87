"""Tests of `backhaul simulate-fleet` and `backhaul simulate --validate`."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from backhaul._cli.main import main
from backhaul.simulate.costs import step_without_checkpointing_s
from backhaul.simulate.fleet.dashboard_costs import DashboardCosts
from backhaul.simulate.fleet.events import simulate
from backhaul.simulate.fleet.figure import FigurePanel, draw_figure
from backhaul.simulate.fleet.setup import FleetSetup
from support.costs import COSTS

DASHBOARD = DashboardCosts("2026-11-25", 0.02, 0.0005, 0.0001, 26_000.0, 500.0, 200.0)
USUAL = ["--sessions", "40", "--workers", "20", "--rack-size", "4", "--worker-link", "10Gbit", "--latency", "0.1ms"]
CELL: dict[str, Any] = {
    "bandwidth": 0.0,
    "batch": 4,
    "boundaries": "auto",
    "dtype": "float32",
    "latency": 0.0,
    "micro_batches": 1,
    "returns": "gradients",
    "segment_layers": 1,
    "trainers": 1,
    "worker_speed": 1.0,
    "workers": 1,
}


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """A file with costs of segments and of a dashboard."""
    path = tmp_path / "costs.json"
    fitted = asdict(DASHBOARD)
    dashboard = {"date": fitted.pop("date"), "costs": fitted}
    path.write_text(json.dumps({"costs": asdict(COSTS), "dashboard": dashboard}))
    return str(path)


def test_a_fleet_is_printed_written_and_drawn(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "fleet.json", tmp_path / "fleet.svg"
    options = ["--costs", costs, *USUAL, "--racks-lost", "1", "--json", str(written), "--svg", str(drawn)]
    assert main(["simulate-fleet", *options]) == 0
    shown = capsys.readouterr().out
    assert "worker compute" in shown
    assert "loss of 1 racks with 4 workers and segments of 8 sessions" in shown
    assert "it keeps up" in shown
    content = json.loads(written.read_text())
    assert content["binds"] == "worker compute"
    assert content["simulated"]["step_s"] == pytest.approx(content["step_s"], rel=0.25)  # a rack is lost meanwhile
    assert len(ElementTree.parse(drawn).findall(".//{*}rect[@class='frame']")) == 4


def test_only_the_balance_of_flows_is_computed_if_asked_for(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-fleet", "--costs", costs, "--no-simulate", "--micro-batches", "16"]) == 0
    shown = capsys.readouterr().out
    assert "100,000 sessions on 10,000 workers in 500 racks" in shown
    assert "simulated " not in shown.replace("in use   simulated", "")
    assert "it falls behind" in shown


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers-per-session", "9"], "workers_per_session is 9"),
        (["--racks-lost", "6"], "racks_lost is 6"),
        (["--sessions", "0"], "sessions is 0"),
        (["--svg", "/nowhere/fleet.svg"], "--svg /nowhere/fleet.svg"),
        (["--json", "/tmp"], "--json /tmp: it is a directory"),
        (["--sessions", "1000000000"], "sessions is 1,000,000,000: above 2,000,000 only --no-simulate"),
        (
            ["--workers-per-session", "8", "--workers", "8", "--racks-lost", "1"],
            "which leaves 4 workers, fewer than the 8",
        ),
    ],
)
def test_a_bad_fleet_is_refused(costs: str, options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate-fleet", "--costs", costs, *USUAL, *options]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--worker-link", "10"], '"10" is no bandwidth'),
        (["--worker-link", "0Gbit"], '"0Gbit" carries nothing; "unlimited" means no limit'),
        (["--latency", "1m"], '"1m" is no latency'),
        (["--latency", "unlimited"], '"unlimited" is no latency'),
    ],
)
def test_a_bad_quantity_is_refused(
    costs: str, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate-fleet", "--costs", costs, *options])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '{"costs": {"forward_s": 1}}'])
def test_a_bad_file_of_costs_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs.json").write_text(text)
    assert main(["simulate-fleet", "--costs", str(tmp_path / "costs.json")]) == 2
    assert "--costs" in capsys.readouterr().err


def test_a_dashboard_is_busy_when_one_core_is() -> None:
    assert DASHBOARD.cores(600, 6_000) == pytest.approx(0.92)
    assert DASHBOARD.most_workers(10) == pytest.approx(653.3, abs=0.1)
    assert DASHBOARD.page_bytes_per_s(600, 6_000) == pytest.approx(1_526_000)


@pytest.mark.parametrize("is_log", [True, False])
def test_a_figure_holds_all_that_it_shows(is_log: bool) -> None:
    lines = {"one": [(1.0, 0.5), (1e4, 200.0)], "two": [(1.0, 3.0), (1e4, float("inf"))]}
    panel = FigurePanel("Title", "x", "y", lines, {"dots": [(10.0, 2.0)]}, has_log_x=is_log, has_log_y=is_log)
    drawn = ElementTree.fromstring(draw_figure([panel] * 3, "a < b"))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    rows = [float(group.attrib["transform"][:-1].split()[1]) for group in drawn.findall("{*}g")]
    for group, top in zip(drawn.findall("{*}g"), rows, strict=True):
        for node in [*group.findall("{*}text[@x]"), *group.findall("{*}circle")]:
            x, y = (float(node.attrib.get(key, node.attrib.get(f"c{key}", 0))) for key in "xy")
            assert 0 <= x <= width - 10
            assert 0 <= top + y <= height
    assert drawn.findtext("{*}title") == "a < b"


Records = Callable[..., Path]


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
@pytest.mark.parametrize("command", ["simulate-fleet", "simulate"])
def test_costs_from_which_nothing_follows_are_refused(
    command: str, changed: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {**asdict(COSTS), **changed}}))
    assert main([command, "--costs", str(tmp_path / "costs.json")]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """Writes the records of an experiment with one cell, whose steps take as long as is given."""

    def write(step_s: float, none_s: float, events: tuple[Any, ...] = (), **changed: Any) -> Path:
        cell = CELL | {name: value for name, value in changed.items() if name in CELL}
        directory = tmp_path / f"experiment-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        settings = {"name": "test", "varied": ["workers"], "cells": [cell], "events": events, "model": {"layers": 8}}
        settings["nodes"] = {"one_worker_each": changed.get("one_worker_each", False)}
        (directory / "experiment.json").write_text(json.dumps({"settings": settings, "machine": {}}))
        kind = f"1 layers, {4 // cell['micro_batches']} rows, float32"
        (directory / "costs.json").write_text(json.dumps({"why": "", "costs": {kind: asdict(COSTS)}}))
        record = {
            "cell": 0,
            "repeat": 0,
            "status": "ok",
            "simulated": False,
            "foreign_share": changed.get("foreign_share", 0.0),
            "shares": {"trainer": 0.5, "worker": 0.5, "is_core_bound": changed.get("is_core_bound", False)},
            "step_s": {"none": [[none_s] * 3], "torch": [[none_s] * 3], "backhaul": [[step_s] * 3]},
        }
        (directory / "cell-000-repeat-00.json").write_text(json.dumps(record))
        return directory

    return write


def test_a_cell_that_is_as_predicted_is_valid(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    none_s = 3 * step_without_checkpointing_s(COSTS, 8)
    setup = FleetSetup(1, 2, workers_per_session=2, trainer_speed=1 / 3)
    step_s = simulate(COSTS, setup).step_s
    assert main(["simulate", "--validate", str(records(step_s, none_s, workers=2))]) == 0
    shown = capsys.readouterr().out
    assert "test: workers 2" in shown
    assert "median of the absolute errors of 1 of 1 cells: 0.0%, below 15%" in shown


def test_trainers_with_a_worker_each_are_predicted_as_such(
    records: Records, capsys: pytest.CaptureFixture[str]
) -> None:
    none_s = step_without_checkpointing_s(COSTS, 8)
    step_s = simulate(COSTS, FleetSetup(2, 2)).step_s
    directory = records(step_s, none_s, workers=2, trainers=2, one_worker_each=True)
    assert main(["simulate", "--validate", str(directory)]) == 0
    assert "of 1 of 1 cells: 0.0%" in capsys.readouterr().out


def test_blocks_on_a_link_are_predicted_too(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    none_s = 4 * 8 * (COSTS.forward_s + COSTS.backward_s) + 8 * COSTS.optimizer_s
    setup = FleetSetup(1, 1, micro_batches=4, is_deferred=True, worker_link_bytes_per_s=1e8, latency_s=0.01)
    step_s = simulate(COSTS, setup).step_s
    directory = records(2 * step_s, none_s, micro_batches=4, bandwidth=1e8, latency=0.01)
    assert main(["simulate", "--validate", str(directory)]) == 1
    assert "50.0%, NOT below 15%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"is_core_bound": True}, "core-bound"),
        ({"foreign_share": 0.5}, "disturbed"),
        ({"returns": "activations"}, "activations are not modelled"),
        ({"events": ("worker killed",)}, "events are not modelled"),
        ({"dtype": "bfloat16"}, "its costs were not measured"),
    ],
)
def test_a_cell_that_says_nothing_does_not_count(
    records: Records, changed: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--validate", str(records(1.0, 1.0, **changed))]) == 0
    shown = capsys.readouterr().out
    assert f"({why})" in shown
    assert "No cell counts" in shown


def test_measured_steps_are_compared_without_being_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    committed = Path(__file__).parents[2] / "docs/simulation.json"
    assert main(["simulate", "--validate", str(committed)]) == 0
    shown = capsys.readouterr().out
    assert "of 4 of 5 cells" in shown
    assert "(core-bound)" in shown


@pytest.mark.parametrize("content", [None, "{", "{}", '{"costs": {}, "steps": []}'])
def test_what_holds_no_cells_is_named(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path
    if content is not None:
        path = tmp_path / "records.json"
        path.write_text(content)
    assert main(["simulate", "--validate", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_other_costs_of_a_byte_are_kept_apart_from_those_of_computing() -> None:
    slow = replace(COSTS, answer_s=1.0)
    assert simulate(slow, FleetSetup(1, 1)).step_s > simulate(COSTS, FleetSetup(1, 1)).step_s + 7
