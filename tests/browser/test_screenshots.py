"""Pictures of the page over a real training, in build/screenshots; `make screenshots` puts them into docs/images."""

from pathlib import Path

import pytest
from playwright.sync_api import FloatRect, Page, expect

from conftest import wait_until
from support.pages import OpenPage, Training, box_of

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
MOST_BYTES = 300_000
FULL_STEPS = 10
PICTURED = {
    "latency": ["latency"],
    "timeline": ["timeline"],
    "segments": ["segments"],
    "runs": ["runs"],
}


def settle(page: Page) -> None:
    """Until every part has its numbers, and no chart is empty."""
    for section in ("memory", "latency", "timeline", "segments", "fleet", "runs", "overview"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # lets the observer see it
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    expect(page.locator("#steps tbody tr").first).to_be_visible()
    expect(page.locator("#compare-loss canvas")).to_be_visible()
    expect(page.locator("#segments-table tbody tr").first).to_be_visible()
    expect(page.locator(".empty:visible")).to_have_count(0)


def picture(page: Page, name: str, sections: list[str], *, with_bar: bool = False) -> None:
    boxes = [box_of(page.locator(f"#{section}")) for section in sections]
    scroll = page.evaluate("scrollY")
    top = 0 if with_bar else min(box["y"] for box in boxes) + scroll - 16
    bottom = max(box["y"] + box["height"] for box in boxes) + scroll + 16
    path = PICTURES / f"{name}.png"
    assert page.viewport_size is not None
    clip: FloatRect = {"x": 0, "y": top, "width": page.viewport_size["width"], "height": bottom - top}
    page.screenshot(path=path, full_page=True, clip=clip)
    assert path.stat().st_size < MOST_BYTES


def test_overview_while_it_trains(training: Training, open_page: OpenPage) -> None:
    def fewest_steps() -> int:
        return min((run["steps"] for run in training.dashboard.items("runs")), default=0)

    wait_until(lambda: fewest_steps() >= FULL_STEPS, "there is something to see", 90)
    for scheme in ("light", "dark"):
        page = open_page(training.dashboard.url, height=1000, scheme=scheme)
        expect(page.locator("#memory-held .plot canvas")).to_be_visible()
        expect(page.locator("#memory-trainer .empty")).to_be_hidden()
        expect(page.locator("[data-tile=rate] .figure")).to_contain_text("/s")
        picture(page, f"dashboard-overview-{scheme}", ["overview", "memory"], with_bar=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_desktop(scheme: str, trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, height=4200, scheme=scheme)
    settle(page)
    page.locator("#timeline-steps").select_option("1")
    expect(page.locator("#steps tbody tr")).to_have_count(1)
    canvas = page.locator("#timeline-chart canvas")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#call")).to_be_visible()
    canvas.blur()
    for name, sections in PICTURED.items():
        picture(page, f"dashboard-{name}-{scheme}", sections)


def test_phone(trained: Training, open_page: OpenPage) -> None:
    page = open_page(trained.dashboard.url, width=360, height=740, device_scale_factor=2)
    settle(page)
    page.evaluate("scrollTo(0, 0)")
    path = PICTURES / "dashboard-phone.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES


def test_api(trained: Training, open_page: OpenPage) -> None:
    page = open_page(f"{trained.dashboard.url}/api", height=800)
    expect(page.locator("h2").nth(3)).to_be_visible()
    path = PICTURES / "dashboard-api.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES
