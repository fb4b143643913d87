"""The page says how old the numbers of an unreachable worker are, and what is not kept of an older run."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from backhaul_server.dashboard.collect.percentages import in_percent
from conftest import wait_until
from support.dashboards import Dashboard
from support.pages import OpenPage, broken_rules
from support.reporting import FakeWorker, Training
from support.shown import NONE

pytestmark = pytest.mark.browser

GIB = 1 << 30
AGO = r"\d+ (s|min) ago"


@dataclass
class Half:
    """A worker that serves and one that has stopped answering, with a training on both.

    Attributes:
        serving: The worker that answers.
        gone: The worker that has answered, and hangs now.
        training: The training on both.
        dashboard: Watches both workers, and a third address where nothing has ever listened.
    """

    serving: FakeWorker
    gone: FakeWorker
    training: Training
    dashboard: Dashboard


@pytest.fixture(scope="module")
def half() -> Iterator[Half]:
    with FakeWorker() as serving, FakeWorker() as gone:
        training = Training(workers=[serving.address, gone.address], began_at_s=time.time() - 30)
        for worker, held in ((serving, 1), (gone, 3)):
            with worker.lock:
                worker.telemetry.memory.segment_bytes = held * GIB
                worker.telemetry.accelerator.name = "NVIDIA H100"
                worker.telemetry.accelerator.utilization = 0.5
                worker.telemetry.accelerator.used_bytes = held * GIB
                worker.telemetry.accelerator.total_bytes = 80 * GIB
                worker.telemetry.sessions.add(run=training.run, trainer="gpu-box:4711", held_bytes=held * GIB)
        report = training.report(range(3))
        for worker in (serving, gone):
            report.links.add(worker=worker.address, round_trip_s=0.002, clock_error_s=0.001, connected=True)
        report.sent_at_s = time.time()
        serving.tell(report)
        with Dashboard(serving.address, gone.address, "127.0.0.1:1", options=("--store", ":memory:")) as dashboard:
            wait_until(lambda: dashboard.api("overview")["healthy_workers"] == 2, "both have answered")
            wait_until(
                lambda: [run["budget_bytes"] for run in dashboard.api("memory")["runs"]] == [8 * GIB],
                "both hold tensors of the run",
            )
            gone.hung.set()
            wait_until(lambda: dashboard.api("overview")["healthy_workers"] == 1, "one is missed")
            yield Half(serving, gone, training, dashboard)


def open_half(half: Half, open_page: OpenPage, **options: object) -> Page:
    page = open_page(half.dashboard.url, **options)
    expect(page.locator("#workers tbody tr:not(.more)")).to_have_count(3)
    return page


def test_the_table_of_workers_says_how_old_numbers_are(half: Half, open_page: OpenPage) -> None:
    page = open_half(half, open_page)
    serving, gone, never = (page.locator("#workers tbody tr:not(.more)").nth(number) for number in range(3))
    memory = 3
    expect(serving.locator("td").nth(memory)).to_have_text("25 % of 4.00 GiB")
    expect(gone.locator("td").nth(memory)).to_have_text(re.compile(rf"^75 % of 4\.00 GiB{AGO}$"))
    expect(gone.locator("td.gpu").first).to_have_text(re.compile(rf"^50 %{AGO}$"))
    expect(gone.locator("td").nth(1)).to_contain_text(re.compile(r"its numbers are \d+ (s|min) old"))
    expect(gone.locator("td.measured .meter[data-level]")).to_have_count(0)
    assert never.locator("td.measured").all_inner_texts() == [NONE] * 9
    colour = "node => getComputedStyle(node).color"
    assert gone.locator("td.measured").first.evaluate(colour) != serving.locator("td.measured").first.evaluate(colour)

    head = page.locator("#workers th", has_text="Memory").first.locator("button")
    for _ in range(2):  # ascending, then descending: what is old comes last in both
        head.dispatch_event("click")
        expect(page.locator("#workers tbody tr").first).to_contain_text(half.serving.address)
    gone = page.locator("#workers tbody tr:not(.more)", has_text=half.gone.address)
    gone.locator(".expander").dispatch_event("click")
    expect(page.locator("#workers tr.more")).to_contain_text(re.compile(r"As of\d+ \w+ \d\d:\d\d:\d\d"))


def test_sums_of_now_leave_out_workers_that_are_gone(half: Half, open_page: OpenPage) -> None:
    page = open_half(half, open_page)
    expect(page.locator("#tiles-head")).to_have_text("Now, over all runs and the only worker that answers")
    expect(page.locator("[data-tile=sessions] .note")).to_have_text("1 session")
    expect(page.locator("[data-tile=workers] .note")).to_have_text("2 unreachable")
    page.locator("#fleet").scroll_into_view_if_needed()
    label = r"of 3 workers: now 25 % in the mean, 25 % at most, without the 2 that are unreachable\."
    expect(page.locator("#fleet-memory .plot")).to_have_attribute("aria-label", re.compile(label))


def test_maps_topology_and_memory_say_when_a_worker_last_answered(half: Half, open_page: OpenPage) -> None:
    page = open_half(half, open_page)
    page.locator("#fleet").scroll_into_view_if_needed()
    plot = page.locator("#fleet-memory .plot")
    expect(plot).to_have_attribute("aria-label", re.compile("of 3 workers"))
    plot.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#spoken")).to_contain_text(f"{half.gone.address} (unreachable, last answer ")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#spoken")).to_contain_text("127.0.0.1:1 (unreachable, never answered)")

    page.locator("#topology").scroll_into_view_if_needed()
    node = page.locator(f'#topology-chart [data-id="worker:{half.gone.address}"]')
    expect(node).to_have_attribute("aria-label", re.compile(rf"unreachable, last answer {AGO}, 1 link$"))
    expect(node.locator("text")).to_contain_text("unreachable for ")
    node.dispatch_event("click")
    expect(page.locator("#topology-selected span")).to_have_text(
        re.compile(rf"unreachable, last answer {AGO}: 1 link$")
    )
    link = page.locator("#links tbody tr")
    expect(link.locator("td").nth(2)).to_have_text("broken")
    expect(link.locator("td").nth(5)).to_have_text(re.compile(rf"^2\.00 ms{AGO}$"))
    expect(link.locator("td").nth(3)).to_have_text(NONE)

    page.locator("#memory").scroll_into_view_if_needed()
    page.locator("#memory-of").select_option(f"worker {half.gone.address}")
    expect(page.locator("#memory-held figcaption")).to_have_text(re.compile(rf", last answer {AGO}$"))
    expect(page.locator("#memory-held .plot")).to_have_attribute(
        "aria-label", re.compile(rf"last answer {AGO} 3\.00 GiB")
    )
    page.locator("#memory-of").select_option(f"worker {half.serving.address}")
    expect(page.locator("#memory-held figcaption")).to_have_text(f"Held by worker {half.serving.address}")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_everybody_can_read_old_numbers(scheme: str, width: int, half: Half, open_page: OpenPage) -> None:
    page = open_half(half, open_page, scheme=scheme, width=width)
    page.locator("#topology").scroll_into_view_if_needed()
    expect(page.locator("#topology-chart .node")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert broken_rules(page) == []


def test_the_page_and_the_api_write_percentages_alike(half: Half, open_page: OpenPage) -> None:
    page = open_half(half, open_page)
    shares = [number / 4000 for number in range(4400)] + [1e-9, 0.00049, 0.00051, 0.99949, 0.99951, 0.999999]
    shown = page.evaluate(
        "async (shares) => { const { percent } = await import('/static/js/format.js'); return shares.map(percent); }",
        shares,
    )
    assert shown == [in_percent(share) for share in shares]


@pytest.fixture
def old_runs(tmp_path: Path) -> Iterator[tuple[Dashboard, list[Training]]]:
    """Ten runs that have ended, two of which have the same name, and the dashboard that was told of them."""
    trainings = [Training(began_at_s=time.time() - 3_600 * (12 - number)) for number in range(10)]
    store = str(tmp_path / "history.sqlite3")
    with FakeWorker() as worker:
        for number, training in enumerate(trainings):
            report = training.report(range(6), is_closed=True)
            report.run.name = f"sweep-{max(1, number)}"
            worker.tell(report)
        with Dashboard(worker.address, store=store) as dashboard:
            wait_until(lambda: dashboard.api("runs")["total"] == len(trainings), "all runs are known")
            yield dashboard, trainings


def test_a_run_whose_details_are_not_kept_says_so(
    old_runs: tuple[Dashboard, list[Training]], open_page: OpenPage
) -> None:
    dashboard, trainings = old_runs
    dropped = [training.run for training in trainings if dashboard.api(f"segments?runs={training.run}")["total"] == 0]
    assert len(dropped) == 2
    page = open_page(f"{dashboard.url}/?run={dropped[0]}")
    sentence = "kept for the last 8 runs that reported since the dashboard was started, and this run is not among them"
    for part in ("#segments > .empty", "#timeline-chart .empty"):
        page.locator(part.split(" ", maxsplit=1)[0]).scroll_into_view_if_needed()
        expect(page.locator(part)).to_contain_text(sentence)
    expect(page.locator("#timeline-export")).to_be_hidden()
    page.locator("#segments-filter").fill("Block")
    expect(page.locator("#segments > .empty")).to_contain_text("No segment matches these filters")
    expect(page.locator("#segments > .empty")).to_contain_text(sentence)

    page.locator("#segments-filter").fill("")
    page.locator("#run").select_option("")
    expect(page.locator("#segments-table tbody tr")).to_have_count(32)
    expect(page.locator("#segments-note")).to_have_text(
        "Segments are kept for 8 runs at a time: those of 2 of 10 runs are not shown."
    )


def test_events_of_a_run_that_was_over_before_the_range_are_one_click_away(
    old_runs: tuple[Dashboard, list[Training]], open_page: OpenPage
) -> None:
    dashboard, trainings = old_runs
    page = open_page(f"{dashboard.url}/?run={trainings[5].run}")
    page.locator("#events").scroll_into_view_if_needed()
    expect(page.locator("#events-outside")).to_contain_text("sweep-5 ran from ")
    page.locator("#events-go").dispatch_event("click")
    rows = page.locator("#events-table tbody tr")
    expect(rows.filter(has_text="run began")).to_have_count(1)
    expect(page.locator("#events-outside")).to_be_hidden()
    assert broken_rules(page) == []


def test_runs_of_one_name_are_told_apart_by_their_ids(
    old_runs: tuple[Dashboard, list[Training]], open_page: OpenPage
) -> None:
    dashboard, trainings = old_runs
    page = open_page(dashboard.url)
    page.locator("#runs").scroll_into_view_if_needed()
    page.locator("#runs-search").fill("sweep-1")
    names = page.locator("#runs-table button.link")
    expect(names).to_have_text([f"sweep-1 ({training.run[:8]})" for training in (trainings[1], trainings[0])])
