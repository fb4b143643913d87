"""Pictures of the page over a real training, in build/screenshots; `make screenshots` puts them into docs/images.

The training is one that workers speed up, so that the pictures show what Backhaul is for. A picture with an alert, or
with a verdict that workers were not worth it, fails its test.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import FloatRect, Page, expect

from conftest import wait_until
from support.dashboards import Dashboard
from support.pages import SECTIONS, OpenPage, box_of
from support.processes import WorkerProcess

pytestmark = pytest.mark.browser

TESTS = Path(__file__).parents[1]
PICTURES = TESTS.parent / "build" / "screenshots"
MOST_BYTES = 400_000
WORKERS = 2
STEPS = 12
PICTURED_STEPS = 8
PICTURED = ("latency", "segments", "topology", "fleet", "runs")


@dataclass
class Scene:
    """What is pictured: a training that has ended, one that still trains at first, and the dashboard over both.

    Attributes:
        dashboard: Watches all workers.
        current: The second training.
    """

    dashboard: Dashboard
    current: "subprocess.Popen[str]"


@contextmanager
def finetuning(workers: str, name: str, seed: int, *tags: str) -> Iterator["subprocess.Popen[str]"]:
    """A training as a process, which keeps its session until the context ends."""
    marks = [part for tag in tags for part in ("--tag", tag)]
    notes = "Frozen base of 4 layers. Biases, norms and head are trained, in 8 micro-batches per step."
    arguments = [workers, name, str(seed), str(STEPS), *marks, "--notes", notes]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.finetuning", *arguments],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate(timeout=240)


def until_trained(process: "subprocess.Popen[str]") -> None:
    """Waits until a training has made all its steps."""
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Starts the second training once the first has ended, because both would need the same core."""
    with ExitStack() as stack:
        workers = [stack.enter_context(WorkerProcess("--memory", "256MiB")) for _ in range(WORKERS)]
        addresses = [worker.address for worker in workers]
        dashboard = stack.enter_context(Dashboard(*addresses, options=("--store", ":memory:")))
        with finetuning(",".join(addresses), "bitfit-seed-0", 0, "bitfit", "4k") as first:
            until_trained(first)
        current = stack.enter_context(finetuning(",".join(addresses), "bitfit-seed-1", 1, "bitfit", "4k"))
        yield Scene(dashboard, current)


def settle(page: Page) -> None:
    """Waits until every part has its numbers, and no chart is empty."""
    for section in (*SECTIONS, "overview"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(100)  # lets the observer see it
    expect(page.locator("#runs-table tbody tr")).to_have_count(2)
    expect(page.locator("#steps tbody tr").first).to_be_visible()
    expect(page.locator("#compare-loss canvas")).to_be_visible()
    expect(page.locator("#segments-table tbody tr").first).to_be_visible()
    expect(page.locator("#topology-chart .node")).to_have_count(WORKERS + 2)
    expect(page.locator(".empty:visible")).to_have_count(0)
    expect(page.locator(".alert")).to_have_count(0)


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


def test_overview_while_it_trains(scene: Scene, open_page: OpenPage) -> None:
    def steps_of_current() -> int:
        return max((run["steps"] for run in scene.dashboard.items("runs") if run["name"] == "bitfit-seed-1"), default=0)

    wait_until(lambda: steps_of_current() >= PICTURED_STEPS, "there is something to see", 180)
    for scheme in ("light", "dark"):
        page = open_page(scene.dashboard.url, height=1000, scheme=scheme)
        expect(page.locator("#verdict")).to_have_attribute("data-level", "good")
        expect(page.locator("#memory-held .plot canvas")).to_be_visible()
        expect(page.locator("#memory-trainer .empty")).to_be_hidden()
        expect(page.locator("[data-tile=rate] .figure")).to_contain_text("/s")
        expect(page.locator(".alert")).to_have_count(0)
        picture(page, f"dashboard-overview-{scheme}", ["overview", "memory"], with_bar=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_desktop(scheme: str, scene: Scene, open_page: OpenPage) -> None:
    if scheme == "light":
        until_trained(scene.current)
    page = open_page(scene.dashboard.url, height=5200, scheme=scheme)
    settle(page)
    for name in PICTURED:
        picture(page, f"dashboard-{name}-{scheme}", [name])
    page.locator("#timeline-steps").select_option("1")
    expect(page.locator("#steps tbody tr")).to_have_count(1)
    plot = page.locator("#timeline-chart .plot")
    plot.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#call")).to_be_visible()
    plot.blur()
    picture(page, f"dashboard-timeline-{scheme}", ["timeline"])


def test_phone(scene: Scene, open_page: OpenPage) -> None:
    page = open_page(scene.dashboard.url, width=360, height=740, device_scale_factor=2)
    settle(page)
    page.evaluate("scrollTo(0, 0)")
    path = PICTURES / "dashboard-phone.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES


def test_api(scene: Scene, open_page: OpenPage) -> None:
    page = open_page(f"{scene.dashboard.url}/api", height=800)
    expect(page.locator(".opblock").first).to_be_visible()
    path = PICTURES / "dashboard-api.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES
