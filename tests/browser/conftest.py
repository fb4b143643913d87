"""A browser, a training to look at, and pages that must stay free of errors and of other hosts."""

from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from conftest import wait_until
from support.chromium import MISSING, chromium
from support.cluster import Cluster
from support.dashboards import Dashboard
from support.demos import Demo
from support.pages import Crowd, Heard, OpenPage, Training
from support.processes import WorkerProcess

PATIENCE_MS = 60_000
MANY_WORKERS = 50
MANY_SEGMENTS = 10_000
NO_STORE = ("--store", ":memory:")


expect.set_options(timeout=PATIENCE_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a dashboard run in one process. Of these, what must see the demo train comes first."""

    def turn(item: pytest.Item) -> int:
        fixtures = getattr(item, "fixturenames", [])
        return 3 if "crowd" in fixtures else 2 if "trained" in fixtures else 0 if "training" in fixtures else 1

    items.sort(key=turn)
    for item in items:
        if turn(item) != 1:
            item.add_marker(pytest.mark.xdist_group("crowd" if turn(item) == 3 else "training"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The machine's own Chromium."""
    assert chromium(), MISSING
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium())
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a page of a dashboard in a browser that knows nothing yet. No page may complain or ask another host."""
    contexts: list[BrowserContext] = []
    pages: list[tuple[str, Heard]] = []

    def open_one(
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["dark", "light"] = "light",
        may_be_refused: bool = False,
        **options: Any,
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        heard = Heard(may_be_refused)
        heard.listen(page)
        pages.append((urlsplit(url).netloc, heard))
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    for host, heard in pages:
        assert heard.errors == []
        assert heard.hosts == {host}


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A small demo that still trains when the first test gets it."""
    options = ["--memory", "96MiB"]
    with WorkerProcess(*options) as first, WorkerProcess(*options) as second:
        addresses = [first.address, second.address]
        with (
            Dashboard(*addresses, options=NO_STORE) as dashboard,
            Demo(
                addresses, "--steps", "8", "--width", "128", "--context", "128", "--batch", "2", "--micro-batches", "2"
            ) as demo,
        ):
            yield Training([first, second], dashboard, demo)


@pytest.fixture
def trained(training: Training) -> Training:
    """The same once all steps are trained: numbers stand still, but for those of the last seconds."""
    training.demo.wait()
    return training


@pytest.fixture(scope="session")
def crowd() -> Iterator[Crowd]:
    """Fifty workers, two hundred sessions and ten thousand segments, all of them known to the dashboard."""
    with Cluster(MANY_WORKERS, MANY_SEGMENTS) as cluster, Dashboard(*cluster.addresses, options=NO_STORE) as dashboard:
        wait_until(lambda: dashboard.api("segments?limit=1")["total"] >= MANY_SEGMENTS, "all segments are known")
        wait_until(lambda: dashboard.api("overview")["healthy_workers"] == MANY_WORKERS, "all workers are known")
        cluster.start_jobs()
        wait_until(lambda: dashboard.api("sessions?limit=1")["total"] == cluster.sessions, "all sessions are known")
        wait_until(lambda: dashboard.api("runs?limit=1")["total"] == 1 + len(cluster.ranks), "all runs are known")
        yield Crowd(cluster, dashboard)
