"""Fifty workers and ten thousand segments."""

import pytest
from playwright.sync_api import expect

from support.pages import Crowd, OpenPage
from support.shown import NONE

pytestmark = pytest.mark.browser

CLICK_MS = 100
# Clicks, and calls back once the frame that shows what it did has been painted. Best done in the page: the test's own
# way to the browser takes longer than most answers.
TIMED_CLICK = """([selector, shown]) => new Promise((resolve) => {
  const target = document.querySelector(selector);
  const signature = () => [...document.querySelectorAll(shown)].map((node) => node.outerHTML.slice(0, 400)).join();
  const before = signature();
  const begunMs = performance.now();
  target.click();
  const look = () => requestAnimationFrame(() => {
    if (signature() === before) look();
    else {
      const channel = new MessageChannel();
      channel.port1.onmessage = () => resolve(performance.now() - begunMs);
      channel.port2.postMessage(0);
    }
  });
  look();
})"""


CLICKS = [
    ("a sorted table", "#segments-table th:nth-child(4) button", "#segments-table th:nth-child(4)"),
    ("another page", "#segments-next", "#segments-count"),
    ("a worker unfolded", "#workers tbody tr:first-child .expander", "#workers tbody tr:nth-child(2)"),
    ("an RPC picked", "#rpcs tbody tr:nth-child(2)", "#rpcs tbody tr:nth-child(2)"),
    ("the timeline paused", "#timeline-pause", "#timeline-pause"),
    ("another theme", "#theme", "#theme"),
    ("a run picked", "#runs-table input", "#runs-hint"),
]


def test_with_fifty_workers_and_ten_thousand_segments_clicks_are_answered_at_once(
    crowd: Crowd, open_page: OpenPage
) -> None:
    page = open_page(crowd.dashboard.url)
    expect(page.locator("#workers tbody tr:not(.more)")).to_have_count(50)
    page.locator("#segments").scroll_into_view_if_needed()
    expect(page.locator("#segments-count")).to_have_text(f"1{NONE}50 of 10,000")
    for section in ("latency", "timeline", "runs", "segments"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#runs-table input")).to_have_count(1)
    expect(page.locator("#rpcs tbody tr")).to_have_count(3)
    took_ms: dict[str, list[float]] = {name: [] for name, _, _ in CLICKS}
    for _ in range(
        7
    ):  # of which the second best counts: others may have had the processor, the page never blocks so often
        for name, selector, shown in CLICKS:
            took_ms[name].append(page.evaluate(TIMED_CLICK, [selector, shown]))
    assert {name: ms for name, ms in took_ms.items() if sorted(ms)[1] >= CLICK_MS} == {}


def test_a_filter_finds_among_ten_thousand(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    page.locator("#segments").scroll_into_view_if_needed()
    page.locator("#segments-filter").fill("Block #777")
    expect(page.locator("#segments-count")).to_have_text(f"1{NONE}11 of 11")
    assert page.locator("#segments-table tbody tr").count() == 11


def test_rows_stay_the_same_nodes_when_numbers_change(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    expect(page.locator("#workers tbody tr:not(.more)")).to_have_count(50)
    page.locator("#workers .expander").nth(3).focus()
    page.evaluate("window.kept = document.querySelector('#workers tbody tr')")
    with crowd.workers[0].lock:
        crowd.workers[0].telemetry.recomputed_segments = 4_321
    expect(page.locator("#workers tbody tr").first.locator("td").nth(5)).to_have_text("4,321")
    assert page.evaluate("window.kept === document.querySelector('#workers tbody tr')")
    assert page.evaluate("document.activeElement === document.querySelectorAll('#workers .expander')[3]")
