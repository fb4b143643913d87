"""The report of an experiment: results, charts, sentences and pages."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_experiment.conduct.progress import show_seconds, time_left_s
from backhaul_experiment.plan.axes import AXES
from backhaul_experiment.plan.spec import parse
from backhaul_experiment.report.chart import ChartLine, ChartPoint, LineChart, draw, nice_ticks
from backhaul_experiment.report.charts import positions
from backhaul_experiment.report.pages import write_report
from backhaul_experiment.report.results import results

MACHINE = {
    "date": "2026-11-25T00:00:00+00:00",
    "hardware": {"cpu": "A CPU", "usable_cores": 2, "memory_bytes": 2**34},
    "versions": {"python": "3.11", "torch": "2.13"},
}


def experiment_of(table: dict[str, Any]) -> dict[str, Any]:
    """The record of an experiment, as it is read from its file."""
    settings: dict[str, Any] = json.loads(json.dumps(parse(table, "example").settings()))
    return {"settings": settings, "machine": MACHINE}


def visit_of(cell: int, repeat: int, none_s: float, torch_s: float, backhaul_s: float, **others: Any) -> dict[str, Any]:
    """The record of a visit of two rounds with a timed step each."""
    steps = {"none": none_s, "torch": torch_s, "backhaul": backhaul_s}
    record: dict[str, Any] = {
        "cell": cell,
        "repeat": repeat,
        "status": "ok",
        "shares": {"trainer": 0.5, "worker": 0.5, "is_core_bound": False, "why": ""},
        "step_s": {name: [[step_s, step_s]] for name, step_s in steps.items()},
        "peak_bytes": {"none": 100_000_000, "torch": 40_000_000, "backhaul": 20_000_000},
        "carried": {
            "up_bytes": 10e6, "down_bytes": 30e6, "steps": 4, "turn_s": 2.0, "fallbacks": 0,
            "trainers_link_bytes": 0, "workers_link_bytes": 0, "trainers_ran_s": 0.5, "workers_ran_s": 0.25,
        },
        "trainer_used": 0.5,
        "foreign_share": 0.1,
        "throttled_by": "the kernel's CPU quota",
    }  # fmt: skip
    return record | others


WORKERS = {"steps": 2, "rounds": 2, "matrix": {"workers": [1, 2, 4]}, "title": "Workers <1> & more"}


def test_a_ratio_is_of_steps_in_the_same_round() -> None:
    visit = visit_of(0, 0, 1.0, 1.0, 1.0)
    visit["step_s"] = {"none": [[1.0, 10.0]], "torch": [[2.0, 20.0]], "backhaul": [[1.5, 15.0]]}
    (result, *others) = results(experiment_of(WORKERS), [visit], {})
    assert result.over_none is not None
    assert result.over_none.low == result.over_none.high == 1.5
    assert result.over_torch is not None
    assert result.over_torch.value == 0.75
    assert (result.step_bytes, result.carried_bytes_per_s) == (10e6, 20e6)
    assert [other.state for other in others] == ["missing", "missing"]


def test_a_cell_with_unequal_gradients_has_no_result() -> None:
    bad = {"cell": 0, "repeat": 1, "status": "unequal", "why": "3 gradients differ", "shares": {"trainer": 1.0}}
    result = results(experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.5, 1.2), bad], {})[0]
    assert (result.state, result.why, result.is_measured) == ("unequal", "3 gradients differ", False)


def test_the_report_says_where_it_breaks_even(tmp_path: Path) -> None:
    visits = [visit_of(0, 0, 1.0, 1.4, 2.0), visit_of(1, 0, 1.0, 1.4, 1.5), visit_of(2, 0, 1.0, 1.4, 1.1)]
    page, markdown = write_report(experiment_of(WORKERS), visits, {}, tmp_path)
    for text in (page.read_text(), markdown.read_text()):
        assert "breaks even with torch.utils.checkpoint between 2 workers and 4 workers" in text
        assert "50% to 80%" not in text
        assert "80% below that without checkpointing" in text
        assert "0.50 times that with torch.utils.checkpoint" in text


def test_a_report_of_a_busy_machine_calls_its_numbers_hints(tmp_path: Path) -> None:
    for share, is_busy in ((0.1, False), (0.6, True)):
        _, markdown = write_report(
            experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.4, 2.0, foreign_share=share)], {}, tmp_path
        )
        assert ("hints rather than results" in markdown.read_text()) == is_busy


def test_core_bound_cells_are_kept_out_of_sentences(tmp_path: Path) -> None:
    bound = {"trainer": 1.0, "worker": 1.0, "is_core_bound": True, "why": "no cgroup"}
    visits = [visit_of(0, 0, 1.0, 1.4, 1.2), visit_of(1, 0, 1.0, 1.4, 1.2), visit_of(2, 0, 1.0, 1.4, 9.0, shares=bound)]
    _, markdown = write_report(experiment_of(WORKERS), visits, {}, tmp_path)
    assert "6.43 times" not in markdown.read_text()
    assert "faster than torch.utils.checkpoint everywhere" in markdown.read_text()
    assert "core-bound" in markdown.read_text()


def test_a_failed_cell_shows_the_end_of_its_log(tmp_path: Path) -> None:
    failed = {
        "cell": 2, "repeat": 0, "status": "failed", "why": "worker 1 has ended with code 2", "log": "<bad> option",
        "shares": {"trainer": 0.5, "worker": 0.5, "is_core_bound": False, "why": ""},
    }  # fmt: skip
    page, _ = write_report(experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.4, 1.2), failed], {}, tmp_path)
    assert "Cell 2 failed: worker 1 has ended with code 2" in page.read_text()
    assert "&lt;bad&gt; option" in page.read_text()
    assert "1 of 3 cells have not run yet" in page.read_text()


class _Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe"}:
            self.loaded.append(tag)
        self.loaded += [name for name, _ in attrs if name in {"src", "href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"path", "rect", "circle", "polyline"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_loads_nothing_and_is_closed(tmp_path: Path) -> None:
    visits = [visit_of(0, 0, 1.0, 1.4, 1.2), visit_of(1, 1, 1.0, 1.4, 1.2)]
    page, markdown = write_report(experiment_of(WORKERS), visits, {}, tmp_path)
    links = _Links()
    links.feed(page.read_text())
    assert (links.loaded, links.open) == ([], [])
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", markdown.read_text())
    assert images
    assert all((tmp_path / image).exists() for image in images)
    assert "<1> &" not in page.read_text()


def test_links_that_carry_more_are_compared_on_both_sides(tmp_path: Path) -> None:
    table = {"steps": 2, "rounds": 2, "matrix": {"workers": [1, 8], "bandwidth": "100Mbit"}}
    visits = []
    for cell, megabytes in ((0, 10), (1, 75)):
        visit = visit_of(cell, 0, 1.0, 1.4, 3.0)
        visit["carried"] |= {"trainers_link_bytes": megabytes * 1e6, "workers_link_bytes": megabytes * 1.01e6}
        visits.append(visit)
    _, markdown = write_report(experiment_of(table), visits, {}, tmp_path)
    assert (
        "7.50 times as many bytes per second as the trainers' devices count them, and 7.50 times"
        in markdown.read_text()
    )


def test_a_killed_worker_is_marked_in_a_chart_of_steps(tmp_path: Path) -> None:
    table = {"steps": 2, "rounds": 2, "matrix": {"workers": 2}, "events": [{"kill_worker": 0, "at_step": 1}]}
    visit = visit_of(0, 0, 1.0, 1.4, 1.2)
    visit["step_s"]["backhaul"] = [[1.2, 3.6]]
    _, markdown = write_report(experiment_of(table), [visit], {}, tmp_path)
    assert "killed in the middle of step 1, which then takes 3.60 times" in markdown.read_text()
    assert "worker 0 is killed" in (tmp_path / "example-steps-cell-0.svg").read_text()


@given(st.floats(1e-6, 1e12))
def test_ticks_cover_the_values_and_are_few(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), min_size=1, max_size=12), st.text(max_size=40))
def test_a_chart_is_xml_and_nothing_is_outside(points: list[tuple[float, float]], name: str) -> None:
    name = re.sub(r"[^\x20-\x7e]", "?", name)
    line = ChartLine(name, "#000", [ChartPoint(x, y, y, y * 1.5) for x, y in sorted(points)])
    ticks = [(x, f"{x:g}") for x, _ in sorted(points)]
    root = ElementTree.fromstring(draw(LineChart(name, name, "y", ticks, [line], [(points[0][0], "here")])))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for key, most in (("cx", width), ("cy", height), ("x", width), ("y", height)):
            if key in element.attrib:
                assert -1e-6 <= float(element.attrib[key]) <= most + 1e-6


@pytest.mark.parametrize("name", list(AXES))
def test_positions_follow_the_order_of_the_values(name: str) -> None:
    axis = AXES[name]
    values: list[Any] = [1.0, 2.0, 8.0] if axis.scale != "names" else ["a", "b"]
    if axis.unlimited_last:
        values.append(0.0)
    at = positions(axis, values)
    ordered = [at[value] for value in values]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == len(values)


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0, 1e5))
def test_the_time_left_follows_the_visits_that_are_done(total: int, done: int, took_s: float) -> None:
    left_s = time_left_s(min(done, total), total, took_s)
    assert (left_s is None) == (done == 0)
    assert left_s is None or left_s >= 0
    assert show_seconds(125) == "2 min 05 s"
