"""Debian's Prometheus reads our files, and scrapes and asks a real dashboard: `make test-monitoring`."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import wait_until
from contract.test_layout import ROOT
from contract.test_monitoring_files import QUERIES
from contract.test_monitoring_files import RULES as ALERT_RULES
from support.dashboards import Dashboard
from support.processes import WorkerProcess

pytestmark = pytest.mark.monitoring

UNPACKED = ROOT / "build/prometheus/usr/bin"
RULES = ROOT / "deploy/prometheus/alerts.yml"
TOKEN = "a-token-that-only-this-test-knows"


def program(name: str) -> str:
    """Where it is, on the path or where `make test-monitoring` unpacks it."""
    executable = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if executable is None:
        pytest.fail(f"there is no {name} here: `make test-monitoring` gets it on Debian, or install Prometheus", False)
    return executable


def promtool(*arguments: str | Path) -> str:
    process = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def configured(folder: Path, target: str, token: Path) -> Path:
    """The committed configuration, with the addresses and paths of this machine and in more of a hurry."""
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    for ours, theirs in {
        "/run/backhaul/dashboard/token": str(token),
        "dashboard:8080": target,
        "- alerts.yml": f"- {RULES}",
        "_interval: 5s": "_interval: 1s",
    }.items():
        assert ours in text
        text = text.replace(ours, theirs)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


def token_file(folder: Path) -> Path:
    path = folder / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    path = configured(tmp_path, "a:1", token_file(tmp_path))
    assert f"{len(ALERT_RULES)} rules found" in promtool("check", "config", path)


def test_promtool_takes_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_each_alert_fires_and_does_not() -> None:
    assert "SUCCESS" in promtool("test", "rules", ROOT / "tests/monitoring/alerts.test.yml")


def test_promtool_takes_what_a_dashboard_exposes(scraped: "Scraped") -> None:
    """Its linter knows Prometheus' rules of naming."""
    text = httpx.get(f"{scraped.dashboard}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    process = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


class Scraped:
    """A Prometheus that scrapes a dashboard, which watches one worker."""

    def __init__(self, address: str, dashboard: str, worker: str) -> None:
        self.address, self.dashboard, self.worker = address, dashboard, worker

    def ask(self, path: str, **query: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.address}/api/v1/{path}", params=query).raise_for_status().json()
        assert answer["status"] == "success"
        return answer["data"]

    def value(self, query: str) -> float | None:
        """Of a query with one result, None without."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A process until the test ends, and no longer. It says nothing, or what went wrong."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@contextmanager
def scraping(worker: WorkerProcess, folder: Path) -> Iterator[Scraped]:
    """A dashboard and a Prometheus, both with the token."""
    token, address = token_file(folder), f"127.0.0.1:{free_port()}"
    with Dashboard(worker.address, options=("--token-file", str(token))) as dashboard:
        configuration = configured(folder, dashboard.url.removeprefix("http://"), token)
        server = [program("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        with running([*server, f"--web.listen-address={address}", "--log.level=warn"]):
            wait_until(lambda: answers(f"http://{address}/-/ready"), "Prometheus is up")
            yield Scraped(f"http://{address}", dashboard.url, worker.address)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def scraped(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """For tests that change nothing of it."""
    with scraping(worker, tmp_path_factory.mktemp("prometheus")) as running:
        wait_until(lambda: running.value("backhaul_worker_up") == 1, "it is scraped")
        yield running


def test_prometheus_scrapes_a_dashboard_and_answers_with_what_it_shows(scraped: Scraped) -> None:
    assert scraped.value(f'backhaul_worker_memory_budget_bytes{{worker="{scraped.worker}"}}') == 2 << 30
    assert scraped.value('up{job="backhaul"}') == 1
    assert scraped.value("count(backhaul_trainer_steps_total)") == 1
    (target,) = scraped.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert TOKEN not in json.dumps(scraped.ask("status/config"))


def test_a_dashboard_refuses_whoever_has_no_token(scraped: Scraped) -> None:
    for headers in ({}, {"Authorization": "Bearer another-token-than-the-right-one"}):
        assert httpx.get(f"{scraped.dashboard}/metrics", headers=headers).status_code == 401


def test_prometheus_understands_each_query_of_the_grafana_dashboard(scraped: Scraped) -> None:
    for query in QUERIES:
        expr = query.replace("$__rate_interval", "1m").replace("$worker", re.escape(scraped.worker))
        scraped.ask("query", query=expr.replace("\\", "\\\\"))


def test_a_worker_that_dies_is_an_alert(own_worker: WorkerProcess, tmp_path: Path) -> None:
    with scraping(own_worker, tmp_path) as scraped:
        wait_until(lambda: scraped.value("backhaul_worker_up") == 1, "it is scraped")
        own_worker.end()

        def alerts() -> dict[str, str]:
            return {alert["labels"]["alertname"]: alert["state"] for alert in scraped.ask("alerts")["alerts"]}

        wait_until(lambda: alerts() == {"WorkerUnreachable": "pending"}, "it is pending")
        wait_until(lambda: alerts() == {"WorkerUnreachable": "firing"}, "it fires", 60)
        (alert,) = scraped.ask("alerts")["alerts"]
        assert alert["annotations"]["summary"].startswith(f"{own_worker.address}: A worker does not answer")
