"""The topology, and the maps of all workers."""

import re

import pytest
from playwright.sync_api import Page, expect

from conftest import wait_until
from support.pages import Crowd, OpenPage, box_of
from support.shown import MINUS, NONE

pytestmark = pytest.mark.browser


@pytest.fixture
def page(crowd: Crowd, open_page: OpenPage) -> Page:
    page = open_page(crowd.dashboard.url)
    page.locator("#topology").scroll_into_view_if_needed()
    expect(page.locator("#topology-chart .node")).to_have_count(81)
    return page


def test_every_trainer_worker_and_link_is_drawn_and_listed(page: Page, crowd: Crowd) -> None:
    topology = crowd.dashboard.api("topology")
    expect(page.locator("#topology-chart .link-group")).to_have_count(len(topology["links"]))
    names = set(page.locator("#topology-chart .node").evaluate_all("all => all.map((node) => node.dataset.id)"))
    assert names == {node["id"] for node in topology["nodes"]}
    pager = page.locator("#links-pager p")
    expect(pager).to_have_text(f"1{NONE}12 of {len(topology['links'])} links")
    row = page.locator("#links tbody tr").first
    expect(row.locator("td").nth(3)).to_have_text(re.compile(r"[KMG]iB/s$"))
    expect(row.locator("td").nth(5)).to_have_text(re.compile(r"ms$"))
    expect(row.locator("td").nth(6)).to_have_text(re.compile(rf"^[+{MINUS}]\d+\.\d+ ± 0\.15 ms$"))


def test_a_state_is_told_by_shape_and_word_too(crowd: Crowd, page: Page) -> None:
    worker = crowd.workers[-1]
    node = page.locator(f'#topology-chart [data-id="worker:{worker.address}"]')
    good = node.locator(".shape").get_attribute("d")

    def is_in_state(word: str) -> bool:
        """Looks there again: parts above may have moved the topology away, and only what is on screen is asked for."""
        page.locator("#topology").evaluate("section => section.scrollIntoView()")
        return word in (node.get_attribute("aria-label") or "")

    worker.hung.set()
    try:
        wait_until(lambda: is_in_state("unreachable"), "the worker is unreachable")
        expect(node.locator("text")).to_contain_text("unreachable")
        assert node.locator(".shape").get_attribute("d") != good
        broken = page.locator("#topology-chart .link-group[data-state=broken]")
        expect(broken.first).to_be_attached()
        dashes = broken.first.locator(".wire").evaluate("wire => getComputedStyle(wire).strokeDasharray")
        assert dashes != "none"
        expect(page.locator("#links tbody tr").first).to_contain_text("broken")
        page.locator("#topology-links").select_option("problems")
        expect(page.locator("#topology-chart .link-group[data-state=active]")).to_have_count(0)
    finally:
        worker.hung.clear()
    wait_until(lambda: is_in_state("serving"), "the worker answers again")


def test_a_node_is_selected_by_click_and_by_keyboard(page: Page, crowd: Crowd) -> None:
    address = crowd.workers[2].address
    node = page.locator(f'#topology-chart [data-id="worker:{address}"]')
    node.click()
    expect(node).to_have_attribute("aria-pressed", "true")
    expect(page).to_have_url(re.compile("node=worker"))
    expect(page.locator("#links tbody tr").first).to_contain_text(address)
    links = page.locator("#links tbody tr").count()
    assert links == page.locator("#topology-chart .link-group.is-on").count()

    node.focus()
    page.keyboard.press("ArrowDown")
    focused = page.locator("#topology-chart .node:focus")
    assert focused.get_attribute("data-id") != f"worker:{address}"
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_attribute("aria-label", re.compile("^trainer"))
    page.keyboard.press("Enter")
    expect(focused).to_have_attribute("aria-pressed", "true")

    page.locator("#topology-clear").click()
    expect(page.locator("#topology-selected")).to_be_hidden()
    expect(page).not_to_have_url(re.compile("node="))


def test_the_topology_is_enlarged_and_fitted(page: Page) -> None:
    drawing = page.locator("#topology-chart .diagram")
    before = box_of(drawing)["height"]
    page.locator("#topology-in").click()
    assert box_of(drawing)["height"] > before
    page.locator("#topology-fit").click()
    assert box_of(drawing)["height"] < 600
    page.locator("#topology-out").click()
    assert box_of(drawing)["height"] < 600


def test_a_worker_of_the_topology_leads_to_its_row(page: Page, crowd: Crowd) -> None:
    address = crowd.workers[-2].address
    page.locator(f'#topology-chart [data-id="worker:{address}"]').click()
    page.locator("#topology-go").click()
    row = page.locator("#workers tbody tr:not(.more)", has_text=address)
    expect(row).to_be_in_viewport()
    expect(row.locator(".expander")).to_have_attribute("aria-expanded", "true")
    expect(row.locator(".expander")).to_be_focused()


def test_a_map_shows_all_workers_and_leads_to_one(page: Page, crowd: Crowd) -> None:
    plot = page.locator("#fleet-load .plot")
    plot.scroll_into_view_if_needed()
    expect(plot).to_have_attribute("aria-label", re.compile(r"^Load.* of 50 workers: now [\d.]+ % in the mean"))
    box = box_of(plot)
    row_height = (box["height"] - 44) / 50
    fourth = {"x": box["width"] - 40, "y": 18 + 3.5 * row_height}
    tip = page.locator("#tip")

    def is_told() -> bool:
        page.mouse.move(0, 0)
        plot.hover(position={"x": fourth["x"], "y": fourth["y"]})
        return crowd.workers[3].address in tip.inner_text()

    wait_until(is_told, "the cell is told of")
    plot.click(position={"x": fourth["x"], "y": fourth["y"]})
    address = crowd.workers[3].address
    expect(page.locator("#workers tr.more")).to_have_count(1)
    expect(page.locator("#workers tbody tr:not(.more)").nth(3)).to_be_in_viewport()
    expect(page.locator("#memory-of")).to_have_value(f"worker {address}")
    expect(page.locator("#latency-worker")).to_have_value(address)
    page.go_back()
    expect(page.locator("#latency-worker")).to_have_value("")

    page.mouse.move(0, 0)
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#spoken")).to_contain_text(crowd.workers[0].address)
    page.keyboard.press("ArrowDown")
    expect(page.locator("#spoken")).to_contain_text(crowd.workers[1].address)
    page.keyboard.press("Enter")
    expect(page.locator("#latency-worker")).to_have_value(crowd.workers[1].address)
