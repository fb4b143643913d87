"""What the page shows is in its address, and one time range drives every chart."""

import re
import time
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, Request, expect

from conftest import wait_until
from support.pages import OpenPage, Training, box_of

pytestmark = pytest.mark.browser

FAR_LEFT = re.compile(r"translate\(-10px")  # where uPlot keeps a cursor that it does not show


def query(page: Page) -> dict[str, str]:
    """The parameters in the address of a page. Playwright's `url` does not follow replaceState."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.evaluate("location.href")).query).items()}


@pytest.fixture
def page(trained: Training, open_page: OpenPage) -> Page:
    page = open_page(trained.dashboard.url)
    expect(page.locator("#run option")).to_have_count(4)  # all runs, and each of the three
    return page


def drag(page: Page, selector: str, start: float, end: float) -> None:
    """Drags over a chart between two shares of its width."""
    page.locator(
        selector.split(" ", maxsplit=1)[0]
    ).scroll_into_view_if_needed()  # its figure, which stays when it is drawn anew
    box = box_of(page.locator(selector))
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], y, steps=3)
    page.mouse.move(box["x"] + end * box["width"], y, steps=3)
    page.mouse.up()


def test_a_link_to_a_section_arrives_there(trained: Training, open_page: OpenPage) -> None:
    page = open_page(f"{trained.dashboard.url}#runs")
    expect(page.locator("#runs-table tbody tr").first).to_be_visible()
    page.wait_for_load_state("networkidle")
    wait_until(lambda: 0 <= box_of(page.locator("#runs"))["y"] < 200, "the section stays in view")


def test_each_choice_is_in_the_address_and_the_address_brings_it_back(
    page: Page, trained: Training, open_page: OpenPage
) -> None:
    run = trained.dashboard.items("runs")[1]["run"]
    worker = trained.workers[1].address
    page.locator("#run").select_option(run)
    page.locator("#range").select_option("3600")
    page.locator("#memory").scroll_into_view_if_needed()
    page.locator("#memory-of").select_option(f"worker {worker}")
    page.locator("#memory-budget").check()
    page.locator("#latency").scroll_into_view_if_needed()
    page.locator("#latency-worker").select_option(worker)
    page.locator("#rpcs tbody tr", has_text="Backward").click()
    page.locator("#timeline-steps").select_option("5")
    page.locator("#segments").scroll_into_view_if_needed()
    page.locator("#segments-table th button", has_text="Received").click()
    page.locator("#segments-table th button", has_text="Received").click()
    page.locator("#segments-filter").fill("#3")
    page.locator("#events-severity").select_option("warning")
    page.locator("#workers-filter").fill(worker)
    page.locator("#runs-search").fill(run[:8])
    wanted = {
        "run": run,
        "range": "3600",
        "memory": f"worker {worker}",
        "budget": "1",
        "worker": worker,
        "rpc": "Backward",
        "steps": "5",
        "sort": "down_bytes",
        "order": "down",
        "filter": "#3",
        "severity": "warning",
        "workers-filter": worker,
        "search": run[:8],
    }
    wait_until(lambda: query(page) == wanted, "all choices are in the address")

    shared = open_page(page.evaluate("location.href"))
    for section in ("memory", "latency", "timeline", "segments", "runs"):
        shared.locator(f"#{section}").scroll_into_view_if_needed()
    for control, value in (
        ("run", run),
        ("range", "3600"),
        ("memory-of", f"worker {worker}"),
        ("latency-worker", worker),
        ("timeline-steps", "5"),
        ("segments-filter", "#3"),
        ("events-severity", "warning"),
        ("workers-filter", worker),
        ("runs-search", run[:8]),
    ):
        expect(shared.locator(f"#{control}")).to_have_value(value)
    expect(shared.locator("#memory-budget")).to_be_checked()
    expect(shared.locator("#rpcs tr[aria-selected=true]")).to_contain_text("Backward")
    expect(shared.locator("#heat figcaption")).to_have_text("Duration of Backward calls")
    expect(shared.locator("#segments-table th[aria-sort=descending]")).to_have_text("Received")
    expect(shared.locator("#segments-table tbody tr")).to_have_count(1)
    expect(shared.locator("#runs-table tbody tr")).to_have_count(1)
    assert query(shared) == wanted


def test_back_and_forward_undo_and_repeat_a_choice(page: Page, trained: Training) -> None:
    run = trained.dashboard.items("runs")[0]["run"]
    page.locator("#run").select_option(run)
    page.locator("#range").select_option("120")
    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#timeline-steps").select_option("1")
    expect(page.locator("#steps tbody tr")).to_have_count(1)
    page.go_back()
    expect(page.locator("#timeline-steps")).to_have_value("3")
    expect(page.locator("#steps tbody tr")).to_have_count(3)
    page.go_back()
    expect(page.locator("#range")).to_have_value("600")
    page.go_back()
    expect(page.locator("#run")).to_have_value("")
    assert query(page) == {}
    page.go_forward()
    expect(page.locator("#run")).to_have_value(run)
    page.locator("#theme").click()
    assert query(page) == {"run": run}


def test_one_time_range_drives_all_charts(page: Page, trained: Training) -> None:
    asked: dict[str, dict[str, list[str]]] = {}

    def note(request: Request) -> None:
        parts = urlsplit(request.url)
        asked[parts.path.removeprefix("/api/v1/")] = parse_qs(parts.query)

    page.on("request", note)
    page.locator("#range").select_option("fixed")
    expect(page.locator("#range-fixed")).to_be_visible()
    since, until = query(page)["range"].split("-")
    assert float(until) - float(since) == pytest.approx(600, abs=2)
    for section in ("memory", "latency", "timeline", "events", "fleet", "runs"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        wait_until(lambda: page.evaluate("0") == 0 and len(asked) > 0, "something is asked for")
    routes = ("memory", "latency", "timeline", "events", "fleet")

    def ranges() -> set[tuple[str, ...]]:
        page.evaluate("0")
        return {tuple(asked.get(route, {}).get(name, [""])[0] for name in ("since_s", "until_s")) for route in routes}

    wait_until(lambda: ranges() == {(since, until)}, "all charts ask for the same range")

    page.locator("#range-live").click()
    expect(page.locator("#range")).to_have_value("600")
    expect(page.locator("#range-fixed")).to_be_hidden()


def test_a_time_range_is_typed(page: Page) -> None:
    page.locator("#range").select_option("fixed")
    page.locator("#range-since").fill("2026-01-02T03:04:05")
    page.locator("#range-until").fill("2026-01-02T03:05:05")
    since, until = map(float, query(page)["range"].split("-"))
    assert until - since == pytest.approx(60)
    page.locator("#memory").scroll_into_view_if_needed()
    expect(page.locator("#memory-held .empty")).to_contain_text("time range")
    page.locator("#range-until").fill("2025-01-02T03:05:05")
    expect(page.locator("#range-until")).to_have_attribute("aria-invalid", "true")
    assert tuple(map(float, query(page)["range"].split("-"))) == (since, until)


def test_a_drag_over_a_chart_zooms_all_of_them(page: Page) -> None:
    page.locator("#memory").scroll_into_view_if_needed()
    expect(page.locator("#memory-held .u-over")).to_be_visible()
    began_s = time.time()
    drag(page, "#memory-held .u-over", 0.25, 0.75)
    expect(page.locator("#range-fixed")).to_be_visible()
    since, until = map(float, query(page)["range"].split("-"))
    assert until - since < 600
    assert until < began_s
    page.locator("#latency").scroll_into_view_if_needed()
    page.go_back()
    expect(page.locator("#range")).to_have_value("600")

    page.locator("#heat").scroll_into_view_if_needed()
    expect(page.locator("#heat .plot")).to_have_attribute("aria-label", re.compile("^Heat map: "))
    drag(page, "#heat .u-over", 0.4, 0.8)
    expect(page.locator("#range-fixed")).to_be_visible()
    page.locator("#range-out").click()
    longer = query(page)["range"].split("-")
    assert float(longer[1]) - float(longer[0]) > 2


def test_a_finger_drags_as_a_mouse_does(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, has_touch=True)
    expect(page.locator("#memory-held .legend b").first).to_have_text(re.compile("B$"))  # drawn with its numbers
    chart = page.locator("#memory-held .u-over")
    chart.scroll_into_view_if_needed()
    box = box_of(chart)
    touches = page.context.new_cdp_session(page)
    for kind, share in (("touchStart", 0.3), ("touchMove", 0.4), ("touchMove", 0.6), ("touchEnd", None)):
        touched = [] if share is None else [{"x": box["x"] + share * box["width"], "y": box["y"] + 50}]
        touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touched})
    expect(page.locator("#range-fixed")).to_be_visible()


def test_steps_of_compared_runs_zoom_together(page: Page) -> None:
    page.locator("#runs").scroll_into_view_if_needed()
    expect(page.locator("#compare-loss .u-over")).to_be_visible()
    drag(page, "#compare-loss .u-over", 0.3, 0.6)
    expect(page).to_have_url(re.compile(r"between=\d+-\d+"))
    expect(page.locator("#compare-all")).to_be_visible()
    page.locator("#compare-all").click()
    expect(page).not_to_have_url(re.compile("between="))


def test_what_is_pointed_at_is_marked_in_the_other_charts(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 1600})
    expect(page.locator("#memory-held .u-over")).to_be_visible()
    expect(page.locator("#heat .plot")).to_have_attribute("aria-label", re.compile("^Heat map: "))
    page.locator("#memory-held .u-over").hover()
    for figure in ("memory-trainer", "heat"):
        expect(page.locator(f"#{figure} .u-cursor-x")).not_to_have_attribute("style", FAR_LEFT)
    page.mouse.move(0, 0)
    expect(page.locator("#heat .u-cursor-x")).to_have_attribute("style", FAR_LEFT)


def test_an_unknown_run_is_explained(trained: Training, open_page: OpenPage) -> None:
    page = open_page(f"{trained.dashboard.url}/?run=feedbeef", may_be_refused=True)
    expect(page.locator("#verdict-text")).to_have_text('This dashboard knows no run "feedbeef".')
    page.locator("#segments").scroll_into_view_if_needed()
    expect(page.locator("#segments > .empty")).to_contain_text('no run "feedbeef"')
    page.locator("#timeline").scroll_into_view_if_needed()
    expect(page.locator("#timeline-chart .empty")).to_contain_text('no run "feedbeef"')
    expect(page.locator("#run")).to_have_value("feedbeef")
    page.locator("#run").select_option("")
    expect(page.locator("#segments-table tbody tr")).to_have_count(36)
    expect(page.locator("#verdict-about")).to_contain_text("newest run")
