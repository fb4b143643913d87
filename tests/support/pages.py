"""Pages of a dashboard as tests see them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, FloatRect, Locator, Page, Request

from support.cluster import Cluster
from support.dashboards import Dashboard
from support.demos import Demo
from support.processes import WorkerProcess
from support.reporting import FakeWorker

OpenPage = Callable[..., Page]
SECTIONS = ["overview", "memory", "latency", "timeline", "segments", "events", "topology", "fleet", "runs"]


@dataclass
class Training:
    """A demo on two workers, and the dashboard over it.

    Attributes:
        workers: Both.
        dashboard: Watches them.
        demo: Trains, then keeps its sessions.
    """

    workers: list[WorkerProcess]
    dashboard: Dashboard
    demo: Demo


@dataclass
class Crowd:
    """A cluster that is made up, and the dashboard over it.

    Attributes:
        cluster: Its workers and trainings, which keep reporting.
        dashboard: Watches all workers.
    """

    cluster: Cluster
    dashboard: Dashboard

    @property
    def workers(self) -> list[FakeWorker]:
        """The workers of the cluster, in the order of the command line."""
        return self.cluster.workers


@dataclass
class Heard:
    """What a page asked for and complained of.

    Attributes:
        may_be_refused: Whether the dashboard is stopped meanwhile, or asked for an unknown run. The browser itself
            makes notes of both.
        errors: Of its console, and exceptions.
        hosts: That it sent requests to.
    """

    may_be_refused: bool
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def listen(self, page: Page) -> None:
        """From now on."""
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        is_refusal = "net::ERR_" in message.text or "status of 404" in message.text
        if message.type == "error" and not (self.may_be_refused and is_refusal):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


def box_of(locator: Locator) -> FloatRect:
    """The place of an element on its page. It must be visible."""
    box = locator.bounding_box()
    assert box is not None
    return box


def broken_rules(page: Page) -> list[str]:
    """Violations of axe-core's rules on a page, as "rule: HTML". The rules: https://dequeuniversity.com/rules/axe."""
    violations = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html'][:100]}" for rule in violations for node in rule["nodes"]]
