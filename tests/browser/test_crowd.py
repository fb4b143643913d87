"""Fifty workers, two hundred sessions and ten thousand segments."""

import re

import pytest
from playwright.sync_api import Page, expect

from conftest import wait_until
from support.pages import SECTIONS, Crowd, OpenPage, broken_rules
from support.shown import NONE

pytestmark = pytest.mark.browser


def walk(page: Page) -> None:
    """Scrolls through all sections, so that each of them has its numbers."""
    expect(page.locator("#workers tbody tr:not(.more)")).to_have_count(50)
    for section in SECTIONS:
        page.locator(f"#{section}").scroll_into_view_if_needed()
    expect(page.locator("#segments-pager p")).to_have_text(re.compile(r"of 10,\d\d\d"))
    expect(page.locator("#topology-chart .node")).to_have_count(81)  # 50 workers and 31 trainers
    expect(page.locator("#rpcs tbody tr")).to_have_count(4)
    expect(page.locator("#fleet-memory .plot")).to_have_attribute("aria-label", re.compile("of 50 workers"))
    expect(page.locator("#runs-table tbody tr").first).to_be_visible()


def test_long_tables_have_pages(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    walk(page)
    expect(page.locator("#segments-pager p")).to_have_text(re.compile(rf"^1{NONE}50 of 10,\d\d\d segments$"))
    pager = page.locator("#sessions-pager")
    expect(pager.locator("p")).to_have_text(f"1{NONE}50 of 200 sessions")
    expect(page.locator("#sessions tbody tr")).to_have_count(50)
    first = page.locator("#sessions tbody tr").first.inner_text()
    pager.locator("button", has_text="Next").click()
    expect(pager.locator("p")).to_have_text(f"51{NONE}100 of 200 sessions")
    expect(page.locator("#sessions tbody tr").first).not_to_have_text(first)
    pager.locator("button", has_text="Previous").click()
    expect(pager.locator("button", has_text="Previous")).to_be_disabled()

    runs = page.locator("#runs-pager")
    expect(runs.locator("p")).to_have_text(f"1{NONE}25 of 31 runs")
    runs.locator("button", has_text="Next").click()
    expect(runs.locator("p")).to_have_text(f"26{NONE}31 of 31 runs")
    expect(page.locator("#runs-table tbody tr")).to_have_count(6)
    expect(runs.locator("button", has_text="Next")).to_be_disabled()


def test_a_filter_finds_among_ten_thousand(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    page.locator("#segments").scroll_into_view_if_needed()
    page.locator("#segments-filter").fill("Block #777")
    expect(page.locator("#segments-pager p")).to_have_text(f"1{NONE}11 of 11 segments")
    assert page.locator("#segments-table tbody tr").count() == 11


def test_rows_stay_the_same_nodes_when_numbers_change(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    expect(page.locator("#workers tbody tr:not(.more)")).to_have_count(50)
    page.locator("#workers .expander").nth(3).focus()
    page.evaluate("window.kept = document.querySelector('#workers tbody tr')")
    recomputed = page.locator("#workers tbody tr").first.locator("td").nth(5)
    before = recomputed.inner_text()
    expect(recomputed).not_to_have_text(before)
    assert page.evaluate("window.kept === document.querySelector('#workers tbody tr')")
    assert page.evaluate("document.activeElement === document.querySelectorAll('#workers .expander')[3]")


def test_workers_are_sorted_and_show_how_busy_their_gpus_are(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    page.locator("#fleet").scroll_into_view_if_needed()
    heads = page.locator("#workers thead th:visible")
    expect(heads.filter(has_text="GPU")).to_have_count(2)
    without, having = page.locator("#workers tbody tr").nth(0), page.locator("#workers tbody tr").nth(1)
    expect(without.locator("td.gpu").first).to_have_text(NONE)
    expect(having.locator("td.gpu").first).to_have_text(re.compile(r"\d %$"))
    expect(having.locator("td.gpu").nth(1)).to_have_text(re.compile(r"\d of 80.0 GiB"))
    expect(page.locator("#workers td.gpu .meter[data-level]")).to_have_count(0)  # being busy is no problem
    table = page.locator("#workers").locator("xpath=..")
    assert table.evaluate("node => node.scrollWidth <= node.clientWidth")  # no column is out of sight

    head = page.locator("#workers th", has_text="Memory").first
    head.locator("button").dispatch_event("click")
    head.locator("button").dispatch_event("click")
    expect(head).to_have_attribute("aria-sort", "descending")
    shares = [float(text.split(" ")[0]) for text in page.locator("#workers td:nth-child(4)").all_inner_texts()]
    assert len(shares) == 50
    assert shares == sorted(shares, reverse=True)
    gpu = page.locator("#workers th", has_text="GPU").first
    gpu.locator("button").dispatch_event("click")
    expect(page.locator("#workers tbody tr").last.locator("td.gpu").first).to_have_text(NONE)


def test_a_worker_is_found_by_text_and_the_text_is_in_the_address(crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url)
    rows = page.locator("#workers tbody tr:not(.more)")
    expect(rows).to_have_count(50)
    address = crowd.workers[41].address
    page.locator("#workers-filter").fill(address[4:].upper())
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(address)
    shared = open_page(page.evaluate("location.href"))
    expect(shared.locator("#workers-filter")).to_have_value(address[4:])
    expect(shared.locator("#workers tbody tr:not(.more)")).to_have_count(1)

    other = crowd.workers[7].address  # a worker that is hidden is shown again where it is chosen elsewhere
    page.locator("#topology").scroll_into_view_if_needed()
    page.locator(f'#topology-chart [data-id="worker:{other}"]').dispatch_event("click")
    page.locator("#topology-go").dispatch_event("click")
    expect(rows).to_have_count(50)
    expect(rows.filter(has_text=other).locator(".expander")).to_have_attribute("aria-expanded", "true")
    page.locator("#workers-filter").fill("no such worker")
    expect(page.locator("#fleet > .empty").first).to_have_text("No worker matches. Choose another word.")
    expect(page.locator("#workers")).to_be_hidden()
    page.locator("#workers-filter").fill("serving")
    expect(rows).to_have_count(50)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_everybody_can_read_and_use_a_crowded_page(scheme: str, width: int, crowd: Crowd, open_page: OpenPage) -> None:
    page = open_page(crowd.dashboard.url, scheme=scheme, width=width)
    walk(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    clipped = page.locator("#topology-chart .node text").evaluate_all(
        """all => {
          const { left, right } = all[0].closest("svg").getBoundingClientRect();
          return all.map((text) => text.getBoundingClientRect()).filter((box) => box.left < left || box.right > right);
        }"""
    )
    assert clipped == []
    assert broken_rules(page) == []
    # Events instead of clicks, which wait until elements stand still: that takes a busy machine many seconds.
    page.locator("#topology-chart .node").first.dispatch_event("click")
    page.locator("#workers .expander").first.dispatch_event("click")
    page.locator("#range").select_option("fixed")
    expect(page.locator("#range-fixed")).to_be_visible()
    expect(page.locator("#topology-selected")).to_be_visible()
    page.locator("#events-filter").fill("no such event")
    page.locator("#segments-filter").fill("no such segment")
    page.locator("#workers-filter").fill("no such worker")
    page.locator("#runs-search").fill("no such run")

    def is_empty() -> bool:
        """Parts above may have moved the table away, and only what is on screen is asked for."""
        page.locator("#runs-search").scroll_into_view_if_needed()
        return page.locator("#runs > .empty").is_visible()

    wait_until(is_empty, "no run matches")
    assert broken_rules(page) == []
