"""What the page shows of dead workers, a stopped dashboard and an empty one, and what it asks for when nobody looks."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Page, expect

from conftest import wait_until
from support import reporting
from support.dashboards import Dashboard
from support.pages import SECTIONS, OpenPage, Training, box_of, broken_rules
from support.processes import WorkerProcess
from support.reporting import FakeWorker
from support.shown import NONE

pytestmark = pytest.mark.browser
NO_STORE = ("--store", ":memory:")


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    """Over a worker that tells nothing of interest; it may be stopped."""
    with FakeWorker() as worker, Dashboard(worker.address, options=NO_STORE) as opened:
        yield opened


@pytest.fixture
def own_dashboard(own_worker: WorkerProcess) -> Iterator[Dashboard]:
    """Over a worker that may be killed."""
    with Dashboard(own_worker.address, options=NO_STORE) as opened:
        yield opened


def test_a_killed_worker_turns_red(own_worker: WorkerProcess, own_dashboard: Dashboard, open_page: OpenPage) -> None:
    page = open_page(own_dashboard.url)
    row = page.locator("#workers tbody tr", has_text=own_worker.address)
    expect(row.locator(".state")).to_have_text("serving")
    assert row.get_attribute("data-level") is None
    own_worker.kill()
    expect(row).to_have_attribute("data-level", "bad")
    expect(row.locator(".state")).to_have_text("unreachable")
    expect(page.locator("[data-tile=workers]")).to_have_attribute("data-level", "bad")
    expect(page.locator(".alert-name")).to_have_text("Worker unreachable")
    red, green, blue = map(int, re.findall(r"\d+", colour_of(page, "#workers .state"))[:3])
    assert red > 1.5 * max(green, blue)


def colour_of(page: Page, selector: str) -> str:
    return page.locator(selector).first.evaluate("node => getComputedStyle(node).color")


def test_what_is_old_looks_old_until_the_dashboard_is_back(dashboard: Dashboard, open_page: OpenPage) -> None:
    page = open_page(dashboard.url)
    status = page.locator("#status")
    expect(status).to_have_attribute("data-state", "live")
    fresh = colour_of(page, ".tile .figure")
    dashboard.process.send_signal(signal.SIGSTOP)
    try:
        expect(status).to_have_attribute("data-state", "stale")
        expect(status).to_have_text(re.compile(r"no answer, the numbers are \d+ s old"))
        assert colour_of(page, ".tile .figure") == colour_of(page, ".tile dt") != fresh
        assert page.locator(".plot").first.evaluate("node => getComputedStyle(node).filter") == "grayscale(1)"
        assert broken_rules(page) == []
    finally:
        dashboard.process.send_signal(signal.SIGCONT)
    expect(status).to_have_attribute("data-state", "live")
    expect(page.locator("body")).not_to_have_class("is-stale")


def test_a_dashboard_that_is_started_again_is_followed_again(open_page: OpenPage) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options = (*NO_STORE, "--listen", f"127.0.0.1:{free.getsockname()[1]}")
    with Dashboard("127.0.0.1:1", options=options) as first:
        status = open_page(first.url, may_be_refused=True).locator("#status")
        expect(status).to_have_attribute("data-state", "live")
    expect(status).to_have_attribute("data-state", "stale")
    with Dashboard("127.0.0.1:1", options=options):
        expect(status).to_have_attribute("data-state", "live")


def test_only_what_is_seen_is_asked_for(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, height=500)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.split("/api/v1/")[-1].split("?")[0]))
    wait_until(lambda: page.evaluate("0") == 0 and asked.count("memory") >= 2, "memory is asked for again")
    assert {"runs", "segments", "timeline"}.isdisjoint(asked)
    page.locator("#runs").scroll_into_view_if_needed()
    wait_until(lambda: page.evaluate("0") == 0 and "runs" in asked, "runs are asked for")

    page.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true})")
    page.evaluate("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_load_state("networkidle")  # nothing for half a second, which the stream and polls never let happen
    asked.clear()
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    wait_until(lambda: page.evaluate("0") == 0 and "live" in asked and "runs" in asked, "a tab that is back asks again")


def test_an_empty_dashboard_says_why_it_is_empty_and_what_to_do(open_page: OpenPage) -> None:
    with Dashboard("127.0.0.1:1", options=NO_STORE) as dashboard:
        page = open_page(dashboard.url, may_be_refused=True)
        expect(page.locator("#workers .state")).to_have_text("unreachable")
        for section in SECTIONS:
            page.locator(f"#{section}").scroll_into_view_if_needed()
        for part in (
            "#memory-held .empty",
            "#memory-trainer .empty",
            "#latency .block .empty",
            "#heat .empty",
            "#phases .empty",
            "#timeline-chart .empty",
            "#segments > .empty",
            "#fleet > .empty >> nth=1",
            "#runs > .empty",
        ):
            expect(page.locator(part)).to_be_visible()
            assert len(page.locator(part).inner_text()) > 40
            card = box_of(page.locator(part).locator("xpath=ancestor::section"))
            box = box_of(page.locator(part))
            assert card["y"] < box["y"] < box["y"] + box["height"] < card["y"] + card["height"], part
        for name in ("sessions", "rate", "saved", "added", "remote", "fallbacks"):
            expect(page.locator(f"[data-tile={name}] .figure")).to_have_text(NONE)
            expect(page.locator(f"[data-tile={name}] .note")).to_have_text(re.compile("no (worker|step)"))


def test_what_is_no_longer_known_is_a_dash_with_its_age(open_page: OpenPage) -> None:
    with FakeWorker() as worker, ExitStack() as stack:
        # Before the dashboard asks: once it has asked, no later report counts as older than that.
        worker.tell(reporting.Training(began_at_s=time.time() - 600).report(range(3)))
        dashboard = stack.enter_context(Dashboard(worker.address, options=NO_STORE))
        page = open_page(dashboard.url, may_be_refused=True)
        for name in ("saved", "added", "remote"):
            expect(page.locator(f"[data-tile={name}] .note")).to_have_text("last known 10 min ago")
            expect(page.locator(f"[data-tile={name}] .figure")).to_have_text(NONE)
        expect(page.locator("[data-tile=rate] .figure")).to_have_text("0.00 /s")
        worker.hung.set()
        expect(page.locator("[data-tile=rate] .note")).to_have_text(re.compile(r"last known \d+ s ago"))
        expect(page.locator("[data-tile=sessions] .figure")).to_have_text(NONE)


def test_a_run_that_nobody_hears_from_does_not_look_good(open_page: OpenPage) -> None:
    with FakeWorker() as worker, Dashboard(worker.address, options=NO_STORE) as dashboard:
        worker.tell(reporting.Training(workers=[worker.address]).report(range(6)))
        page = open_page(dashboard.url, may_be_refused=True)
        verdict, text = page.locator("#verdict"), page.locator("#verdict-text")
        expect(verdict).to_have_attribute("data-level", "good")
        worker.hung.set()
        expect(verdict).to_have_attribute("data-level", "idle")
        expect(text).to_have_text(re.compile(r"Not heard from for \d+ s\. Until then: \S+ % less memory"))
        expect(page.locator("#verdict-about")).to_contain_text("silent")


def test_reasons_of_fallbacks_stay_and_are_filtered_by(open_page: OpenPage) -> None:
    training = reporting.Training(segments=3, began_at_s=time.time() - 300)
    report = training.report(range(2))
    for call in report.calls:
        if call.step == 0 and call.number < 2:
            call.decision, call.reason, call.is_fallback = "trainer", f"reason {call.number}", True
        elif call.number == 2:
            call.decision, call.reason = "kept", "a custom function"
    with FakeWorker() as worker, ExitStack() as stack:
        worker.tell(report)  # before the dashboard asks, as above
        dashboard = stack.enter_context(Dashboard(worker.address, options=NO_STORE))
        page = open_page(dashboard.url, may_be_refused=True)
        page.locator("#segments").scroll_into_view_if_needed()
        rows = page.locator("#segments-table tbody tr")
        expect(rows).to_have_count(3)
        why = rows.nth(1).locator("td.wrap").first
        expect(why).to_have_text("no output is used elsewherereason 11 call, last 5 min ago")
        expect(rows.nth(1).locator(".badge")).to_have_text("gradients")
        choice = page.locator("#segments-reason")
        assert choice.locator("option").all_inner_texts() == ["any", "a custom function", "reason 0", "reason 1"]
        choice.select_option("reason 1")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("Block #1")
        expect(page.locator("#segments-csv")).to_have_attribute("href", re.compile("reason=reason"))
        choice.select_option("any")
        expect(rows).to_have_count(3)
        expect(rows.nth(2).locator(".badge[data-kind=kept]")).to_have_text("kept")
        page.locator("#segments-filter").fill("kept")
        expect(rows).to_have_count(1)
        expect(rows.locator("td.wrap").first).to_have_text(re.compile("a custom function2 calls"))
        assert broken_rules(page) == []
