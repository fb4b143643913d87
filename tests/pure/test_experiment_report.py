"""The report of an experiment: results, charts, sentences and pages."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_lab.experiment.conduct.progress import show_seconds, time_left_s
from backhaul_lab.experiment.plan.axes import AXES
from backhaul_lab.experiment.plan.spec import CHARTS, parse
from backhaul_lab.experiment.report.charts import figures, loss_sentence, positions
from backhaul_lab.experiment.report.pages import write_report
from backhaul_lab.experiment.report.results import results

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
    (result, *others) = results(experiment_of(WORKERS), [visit])
    assert result.over_none is not None
    assert result.over_none.low == result.over_none.high == 1.5
    assert result.over_torch is not None
    assert result.over_torch.value == 0.75
    assert (result.step_bytes, result.carried_bytes_per_s) == (10e6, 20e6)
    assert [other.state for other in others] == ["missing", "missing"]


def test_a_cell_with_unequal_gradients_has_no_result() -> None:
    bad = {"cell": 0, "repeat": 1, "status": "unequal", "why": "3 gradients differ", "shares": {"trainer": 1.0}}
    result = results(experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.5, 1.2), bad])[0]
    assert (result.state, result.why, result.is_measured) == ("unequal", "3 gradients differ", False)


def test_the_report_says_where_it_breaks_even(tmp_path: Path) -> None:
    visits = [visit_of(0, 0, 1.0, 1.4, 2.0), visit_of(1, 0, 1.0, 1.4, 1.5), visit_of(2, 0, 1.0, 1.4, 1.1)]
    page, markdown = write_report(experiment_of(WORKERS), visits, tmp_path)
    for text in (page.read_text(), markdown.read_text()):
        assert "breaks even with torch.utils.checkpoint between 2 workers and 4 workers" in text
        assert "50% to 80%" not in text
        assert "80% below that without checkpointing" in text
        assert "0.50 times that with torch.utils.checkpoint" in text


def test_a_report_of_a_busy_machine_calls_its_numbers_hints(tmp_path: Path) -> None:
    for share, is_busy in ((0.1, False), (0.6, True)):
        _, markdown = write_report(
            experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.4, 2.0, foreign_share=share)], tmp_path
        )
        assert ("hints rather than results" in markdown.read_text()) == is_busy


def test_nothing_is_said_of_other_programs_where_they_cannot_be_told_from_workers(tmp_path: Path) -> None:
    visits = [visit_of(number, 0, 1.0, 1.0, 1.0, foreign_share=None) for number in range(3)]
    write_report(experiment_of(WORKERS), visits, tmp_path)
    assert "Other programs" not in (tmp_path / "example.md").read_text()


def test_core_bound_cells_are_kept_out_of_sentences(tmp_path: Path) -> None:
    bound = {"trainer": 1.0, "worker": 1.0, "is_core_bound": True, "why": "no cgroup"}
    visits = [visit_of(0, 0, 1.0, 1.4, 1.2), visit_of(1, 0, 1.0, 1.4, 1.2), visit_of(2, 0, 1.0, 1.4, 9.0, shares=bound)]
    _, markdown = write_report(experiment_of(WORKERS), visits, tmp_path)
    assert "6.43 times" not in markdown.read_text()
    assert "faster than torch.utils.checkpoint everywhere" in markdown.read_text()
    assert "core-bound" in markdown.read_text()


def test_a_failed_cell_shows_the_end_of_its_log(tmp_path: Path) -> None:
    failed = {
        "cell": 2, "repeat": 0, "status": "failed", "why": "worker 1 has ended with code 2", "log": "<bad> option",
        "shares": {"trainer": 0.5, "worker": 0.5, "is_core_bound": False, "why": ""},
    }  # fmt: skip
    page, _ = write_report(experiment_of(WORKERS), [visit_of(0, 0, 1.0, 1.4, 1.2), failed], tmp_path)
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


def sentence_of(ratios: list[float]) -> str:
    """The sentence on step times of an experiment with as many workers as there are ratios to torch's step."""
    visits = [visit_of(number, 0, 1.0, 1.0, ratio) for number, ratio in enumerate(ratios)]
    table = {**WORKERS, "matrix": {"workers": [1, 2, 4][: len(ratios)]}}
    experiment = experiment_of(table)
    cells = results(experiment, visits)
    return next(
        chart.sentence
        for chart in figures(cells, experiment["settings"]["varied"], [], ["step_time"])
        if chart.key == "step-time-workers"
    )


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.5, 0.99], "It is nowhere slower than torch.utils.checkpoint"),
        ([3.0, 1.01], "It is nowhere faster than torch.utils.checkpoint"),
        ([0.99, 1.01], "It stays close to torch.utils.checkpoint"),
        ([0.5, 0.6, 0.7], "It is faster than torch.utils.checkpoint everywhere"),
        ([1.5, 1.6, 1.7], "It is slower than torch.utils.checkpoint everywhere"),
        ([0.5, 1.5], "It breaks even with torch.utils.checkpoint between 1 worker and 2 workers"),
    ],
)
def test_a_sentence_does_not_call_far_ratios_close(ratios: list[float], said: str) -> None:
    assert said in sentence_of(ratios)


def test_a_higher_peak_than_without_backhaul_is_said() -> None:
    experiment = experiment_of(WORKERS)
    peaks = {"none": 100_000_000, "torch": 40_000_000, "backhaul": 150_000_000}
    cells = results(experiment, [visit_of(number, 0, 1.0, 1.0, 1.0, peak_bytes=peaks) for number in range(3)])
    (chart,) = figures(cells, ["workers"], [], ["peak"])
    assert "is 1.50 times that without checkpointing, and 3.75 times that with" in chart.sentence


def test_baselines_that_differ_are_drawn_for_each_series() -> None:
    experiment = experiment_of({**WORKERS, "matrix": {"workers": [1, 2, 3], "batch": [2, 4, 8]}})
    visits = []
    for number, cell in enumerate(experiment["settings"]["cells"]):
        bytes_of = {
            name: size * cell["batch"] for name, size in (("none", 10**7), ("torch", 10**6), ("backhaul", 10**6))
        }
        visits.append(visit_of(number, 0, 1.0, 1.0 + cell["batch"] / 10, 1.0, peak_bytes=bytes_of))
    charts = {
        chart.key: chart.chart for chart in figures(results(experiment, visits), ["workers", "batch"], [], CHARTS)
    }
    peaks = {line.name: [point.y for point in line.points] for line in charts["peak-workers"].lines}
    assert peaks["without checkpointing, 2 rows in a step"] == [20.0] * 3
    assert peaks["without checkpointing, 4 rows in a step"] == [40.0] * 3
    steps = {line.name: [point.y for point in line.points] for line in charts["step-time-workers"].lines}
    assert steps["torch.utils.checkpoint (break-even), 2 rows in a step"] == [1.2] * 3
    assert steps["torch.utils.checkpoint (break-even), 4 rows in a step"] == [1.4] * 3
    along = {line.name: [point.y for point in line.points] for line in charts["peak-batch"].lines}
    assert along["without checkpointing"] == [20.0, 40.0, 80.0]


@pytest.mark.parametrize(
    ("matrix", "keys"),
    [
        ({"workers": [1, 2], "batch": [2, 4]}, ["step-time-workers"]),
        ({"workers": [1, 2, 4], "batch": [2, 4]}, ["step-time-workers"]),
        ({"workers": [1, 2], "batch": [2, 4, 8]}, ["step-time-batch"]),
        ({"workers": [1, 2]}, ["step-time-workers"]),
    ],
)
def test_an_axis_of_two_values_has_no_charts_beside_others(matrix: dict[str, list[int]], keys: list[str]) -> None:
    experiment = experiment_of({**WORKERS, "matrix": matrix})
    visits = [visit_of(number, 0, 1.0, 1.4, 1.2) for number in range(len(experiment["settings"]["cells"]))]
    charts = figures(results(experiment, visits), experiment["settings"]["varied"], [], ["step_time"])
    assert [chart.key for chart in charts] == keys


@pytest.mark.parametrize("used", [0.5, 0.3])
def test_the_report_begins_with_a_summary_which_is_weaker_if_it_was_disturbed(tmp_path: Path, used: float) -> None:
    visits = [
        visit_of(number, 0, 1.0, 1.4, step_s, trainer_used=used) for number, step_s in enumerate((1.12, 2.8, 1.4))
    ]
    page, markdown = write_report(experiment_of(WORKERS), visits, tmp_path)
    said = (
        "A step with Backhaul took 0.80 to 2.00 times as long as one with torch.utils.checkpoint, and was faster in 1 "
        "of 3 cells; its peak of activations and gradients was 80% below that without checkpointing."
    )
    assert markdown.read_text().split("\n\n")[1].startswith(f"**{said}")
    for text in (page.read_text(), markdown.read_text()):
        assert said in text
        assert (
            ("so this is a hint" in text) == ("As far as a disturbed measurement shows, a step" in text) == (used < 0.4)
        )


def test_each_of_several_losses_is_told() -> None:
    experiment = experiment_of(
        {"steps": 2, "rounds": 4, "events": [{"at_step": 1}, {"at_step": 2}], "matrix": {"workers": 1}}
    )
    steps = {"none": [[1.0] * 4], "torch": [[1.0] * 4], "backhaul": [[1.0, 3.0, 4.0, 1.5]]}
    (result,) = results(experiment, [visit_of(0, 0, 1.0, 1.0, 1.0, step_s=steps)])
    said = loss_sentence(result, experiment["settings"]["events"])
    assert "A worker is killed in the middle of step 1, which then takes 3.00 times" in said
    assert "a worker is killed in the middle of step 2, which then takes 4.00 times" in said
    assert "steps before them take 1.00 times as long; those after them 1.50 times" in said


def test_a_log_with_fences_does_not_end_its_own(tmp_path: Path) -> None:
    visits = [visit_of(0, 0, 1.0, 1.0, 1.0) | {"status": "failed", "why": "it ended", "log": "```\n# not a heading"}]
    write_report(experiment_of(WORKERS), visits, tmp_path)
    assert "````\n```\n# not a heading\n````" in (tmp_path / "example.md").read_text()


def test_a_page_loads_nothing_and_is_closed(tmp_path: Path) -> None:
    visits = [visit_of(0, 0, 1.0, 1.4, 1.2), visit_of(1, 1, 1.0, 1.4, 1.2)]
    page, markdown = write_report(experiment_of(WORKERS), visits, tmp_path)
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
    _, markdown = write_report(experiment_of(table), visits, tmp_path)
    assert (
        "7.50 times as many bytes per second as the trainers' devices count them, and 7.50 times"
        in markdown.read_text()
    )


def test_a_killed_worker_is_marked_in_a_chart_of_steps(tmp_path: Path) -> None:
    table = {"steps": 2, "rounds": 2, "matrix": {"workers": 2}, "events": [{"kill_worker": 0, "at_step": 1}]}
    visit = visit_of(0, 0, 1.0, 1.4, 1.2)
    visit["step_s"]["backhaul"] = [[1.2, 3.6]]
    _, markdown = write_report(experiment_of(table), [visit], tmp_path)
    assert "killed in the middle of step 1, which then takes 3.60 times" in markdown.read_text()
    assert "worker 0 is killed" in (tmp_path / "example-steps-cell-0.svg").read_text()


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
