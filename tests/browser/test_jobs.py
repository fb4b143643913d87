"""Runs with names, tags and ranks, the verdict on them, and the log of what happened to them."""

import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Page, expect

from conftest import wait_until
from support.cluster import Cluster
from support.dashboards import Dashboard
from support.pages import Crowd, OpenPage, broken_rules

pytestmark = pytest.mark.browser

LOST = "Worker w-1 was lost: it did not answer for 5 s. Its segments run on the trainer"
JOINED = "Worker w-2 joined"
BUSY = "Segment Block #2 ran on the trainer: its worker was busy"
RANKS = 3


@pytest.fixture(scope="module")
def jobs() -> Iterator[Crowd]:
    """Two jobs of three ranks and a training without ranks, to which something has happened."""
    cluster = Cluster(workers=3, segments=6, jobs=2, ranks=RANKS, workers_of_rank=2)
    with cluster, Dashboard(*cluster.addresses, options=("--store", ":memory:")) as dashboard:
        wait_until(lambda: dashboard.api("overview")["healthy_workers"] == 3, "all workers are known")
        cluster.start_jobs()
        # Charts of memory begin with the first point, and have no place for marks before it.
        wait_until(lambda: len(dashboard.api("memory?points=100")["workers"][0]["at_s"]) > 1, "charts have begun")
        cluster.large.happened("worker_lost", LOST, worker=cluster.addresses[1])
        cluster.large.happened("worker_joined", JOINED, worker=cluster.addresses[2])
        cluster.ranks[1].happened("fell_back", BUSY)
        wait_until(lambda: dashboard.api("runs")["total"] == 1 + 2 * RANKS, "all runs are known")
        wait_until(
            lambda: BUSY in [event["text"] for event in dashboard.api("events")["items"]], "all events are known"
        )
        wait_until(lambda: dashboard.items("runs")[0]["steps"] >= 6, "there is something to judge")
        yield Crowd(cluster, dashboard)


@pytest.fixture
def page(jobs: Crowd, open_page: OpenPage) -> Page:
    page = open_page(jobs.dashboard.url)
    expect(page.locator("#verdict")).to_be_visible()
    return page


def test_a_run_is_called_by_its_name_and_judged_in_a_sentence(page: Page, jobs: Crowd) -> None:
    run = jobs.cluster.large.training.run
    expect(page.locator("#verdict-about")).to_contain_text("newest run")
    page.locator("#run").select_option(run)
    expect(page.locator("#verdict-about")).not_to_contain_text("newest run")
    expect(page.locator("#verdict-run")).to_have_text("pretrain")
    expect(page.locator("#verdict-tags .tag")).to_have_text(["7b", "bf16"])
    expect(page.locator("#verdict-notes")).to_have_text("All workers, one trainer.")
    expect(page.locator("#verdict-about")).to_contain_text(f"{run[:8]} · pretrain-0:4711")

    def verdict() -> str:
        judged = jobs.dashboard.api(f"runs/{run}")["verdict"]
        return f"{judged['sentence']}. {judged['values']}."

    wait_until(lambda: page.locator("#verdict-text").inner_text() == verdict(), "page and API agree")
    expect(page.locator("#verdict")).to_have_attribute("data-level", "good")


def test_each_other_job_that_runs_has_a_line(page: Page, jobs: Crowd) -> None:
    shown = page.locator("#verdict-run").inner_text()
    lines = page.locator("#verdict-others li")
    expect(lines).to_have_count(2)  # of the pretraining and two jobs of several ranks, one is shown
    assert not [line for line in lines.all_inner_texts() if line.startswith(shown)]
    expect(lines.first).to_contain_text("less memory than without checkpointing")
    other = lines.first.locator("button").get_attribute("data-value")
    lines.first.locator("button").click()
    expect(page).to_have_url(re.compile(f"run={other}"))
    expect(lines).to_have_count(0)


def test_runs_are_found_by_name_and_tag(page: Page, jobs: Crowd) -> None:
    page.locator("#runs").scroll_into_view_if_needed()
    rows = page.locator("#runs-table tbody tr")
    expect(rows).to_have_count(1 + 2 * RANKS)
    page.locator("#runs-search").fill("sweep-1")
    expect(rows).to_have_count(RANKS)
    expect(rows.first).to_contain_text(re.compile(r"sweep-1 rank \d"))
    page.locator("#runs-search").fill("")
    page.locator("#runs-tag").select_option("7b")
    expect(rows).to_have_count(1)
    expect(rows.locator(".tag")).to_have_text(["7b", "bf16"])
    rows.locator(".expander").click()
    expect(page.locator("#runs-table tr.more")).to_contain_text("All workers, one trainer.")
    rows.locator("button.link").click()
    expect(page.locator("#run")).to_have_value(jobs.cluster.large.training.run)
    page.locator("#runs").scroll_into_view_if_needed()
    page.locator("#runs-tag").select_option("")
    page.locator("#runs-search").fill("nothing like this")
    expect(page.locator("#runs > .empty")).to_have_text("No run matches. Choose another word, tag or rank.")


def test_ranks_of_a_job_are_chosen_together_or_one_by_one(page: Page, jobs: Crowd) -> None:
    job = [member.training.run for member in jobs.cluster.ranks[:RANKS]]
    options = page.locator("#run option")
    expect(options).to_have_count(4)  # all runs, the training without ranks, and two jobs
    page.locator("#run").select_option(job[0])
    page.reload()  # as whoever gets the link: the other ranks become known only after the page has asked for this one
    page.locator("#timeline").scroll_into_view_if_needed()
    expect(page.locator("#timeline-chart figcaption")).to_have_text(f"Steps of {RANKS} ranks of sweep-0")
    expect(page.locator("#steps tbody tr")).to_have_count(3 * RANKS)
    expect(page).to_have_title("sweep-0 · Backhaul")
    expect(page.locator("#sessions tbody tr")).to_have_count(2 * RANKS)
    expect(page.locator("#steps th:visible").first).to_have_text("Rank")
    expect(page.locator("#timeline-workers")).to_contain_text("± 0.15 ms")

    page.locator("#segments").scroll_into_view_if_needed()
    for rank in range(RANKS):
        expect(page.locator("#segments-table tbody tr", has_text=f"sweep-0 rank {rank}").first).to_be_visible()
    expect(page.locator("#segments-table tbody tr", has_text="pretrain")).to_have_count(0)

    page.locator("#rank").select_option("2")
    expect(page.locator("#timeline-chart figcaption")).to_have_text("Steps of run sweep-0 rank 2")
    expect(page.locator("#steps tbody tr")).to_have_count(3)
    expect(page.locator("#verdict-about")).to_contain_text("rank 2 of 3")
    page.locator("#segments").scroll_into_view_if_needed()
    expect(page.locator("#segments-table tbody tr").first).to_contain_text("sweep-0 rank 2")
    page.locator("#topology").scroll_into_view_if_needed()
    expect(page.locator("#topology-chart .node[aria-label^=trainer]")).to_have_count(1)
    expect(page.locator("#links tbody tr td:first-child")).to_have_text(["sweep-0 rank 2"] * 2)
    expect(page.locator("#sessions tbody tr")).to_have_count(2)
    page.locator("#runs").scroll_into_view_if_needed()
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    assert broken_rules(page) == []


def test_a_timeline_without_bars_says_why(page: Page) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()
    expect(page.locator("#timeline-chart canvas")).to_be_visible()
    page.locator("#range").select_option("fixed")
    page.locator("#range-since").fill("2026-01-02T03:04:05")
    page.locator("#range-until").fill("2026-01-02T03:05:05")
    expect(page.locator("#timeline-chart .empty")).to_be_visible()
    assert len(page.locator("#timeline-chart .empty").inner_text()) > 30


def test_the_event_log_is_filtered(page: Page, jobs: Crowd) -> None:
    page.locator("#events").scroll_into_view_if_needed()
    rows = page.locator("#events-table tbody tr")
    expect(rows.filter(has_text=LOST)).to_have_count(1)
    expect(rows.filter(has_text=JOINED)).to_have_count(1)
    expect(rows.filter(has_text="run began").first).to_be_visible()
    page.locator("#events-severity").select_option("warning")
    expect(rows.filter(has_text=JOINED)).to_have_count(0)
    expect(rows.filter(has_text=LOST)).to_have_count(1)
    page.locator("#events-severity").select_option("")
    # The API filters, so that older events are found behind the newest thousand.
    with page.expect_request(re.compile(r"/api/v1/events\?.*filter=worker")):
        page.locator("#events-filter").fill("worker was busy")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("fallback")
    page.locator("#run").select_option(jobs.cluster.ranks[0].training.run)  # the job, with all of its ranks
    expect(rows).to_have_count(1)
    rows.locator("button.link", has_text="sweep-0 rank 1").click()
    expect(page.locator("#run")).to_have_value(re.compile(jobs.cluster.ranks[1].training.run))
    page.locator("#events-filter").fill("nothing like this")
    expect(page.locator("#events > .empty")).to_contain_text("No event matches these filters.")
    page.locator("#run").select_option(jobs.cluster.large.training.run)
    page.locator("#events-filter").fill("")
    expect(rows.filter(has_text="worker was busy")).to_have_count(0)
    expect(rows.filter(has_text=LOST)).to_have_count(1)


def test_events_are_marked_on_the_charts_and_told_on_hover(page: Page, jobs: Crowd) -> None:
    page.locator("#run").select_option(jobs.cluster.large.training.run)
    for figure in ("memory-held", "heat", "fleet-memory"):
        page.locator(f"#{figure}").scroll_into_view_if_needed()
        expect(page.locator(f"#{figure} .event-mark").first).to_be_attached()
    page.locator("#memory").scroll_into_view_if_needed()
    tip = page.locator("#tip")

    def is_told() -> bool:
        """Points at each mark: they move as time passes, and near ones are one."""
        for mark in page.locator("#memory-held .event-mark > span").all():
            with suppress(PlaywrightError):  # the mark was drawn again meanwhile
                mark.hover(timeout=2_000)
            if LOST in tip.inner_text():
                return True
        return False

    wait_until(is_told, "the event is told of")
