"""The dashboard on a real worker, as HTTP sees it."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from backhaul import Session
from conftest import settle, wait_until
from support.processes import WorkerProcess


class Dashboard:
    """`backhaul dashboard`, ready when constructed."""

    def __init__(self, *workers: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "backhaul", "dashboard", "--listen", "127.0.0.1:0", "--worker", *workers],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.client = httpx.Client(base_url=line.rpartition(" ")[2].strip(), timeout=10)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def close(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(10)


@pytest.fixture
def dashboard(worker: WorkerProcess) -> Iterator[Dashboard]:
    found = Dashboard(worker.address)
    try:
        wait_until(lambda: found.get("/api/v1/workers").json()[0]["state"] == "serving", "the worker is seen")
        yield found
    finally:
        assert found.close() in {0, -signal.SIGTERM}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backhaul", "dashboard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_numbers_follow_a_training(dashboard: Dashboard, session: Session) -> None:
    def calls() -> int:
        rpcs = dashboard.get("/api/v1/workers").json()[0]["rpcs"]
        return next((rpc["calls"] for rpc in rpcs if rpc["method"] == "Backward"), 0)

    before = calls()
    for _ in range(3):
        session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns="gradients").sum().backward()
    wait_until(lambda: calls() == before + 3, "the calls are seen")
    (worker,) = dashboard.get("/api/v1/workers").json()
    backward = next(rpc for rpc in worker["rpcs"] if rpc["method"] == "Backward")
    assert 0 < backward["p50_s"] <= backward["p90_s"] <= backward["p99_s"]
    assert worker["memory"]["budget_bytes"] == 2 << 30
    assert worker["memory"]["resident_bytes"] > 1 << 20


def test_held_memory_is_shown_over_time(dashboard: Dashboard, session: Session) -> None:
    held = session.checkpoint(torch.sin, torch.randn(1 << 18, requires_grad=True), returns="gradients")
    settle(session)

    def latest() -> dict[str, list[int]]:
        return dashboard.get("/api/v1/memory?samples=600").json()[0]

    wait_until(lambda: latest()["segment_bytes"][-1] >= 1 << 20, "the segment is seen")
    assert len({len(values) for values in latest().values() if isinstance(values, list)}) == 1
    held.sum().backward()


def test_metrics_are_what_prometheus_reads(dashboard: Dashboard, session: Session) -> None:
    session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns="gradients").sum().backward()
    answer = dashboard.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert answer.headers["content-type"].startswith("text/plain")
    assert all(name.startswith("backhaul_") for name in families)
    assert families["backhaul_worker_up"].samples[0].value == 1.0
    tiers = {sample.labels["tier"] for sample in families["backhaul_worker_memory_bytes"].samples}
    assert tiers == {"segments", "cached", "working", "results"}


def test_drift_is_shown(dashboard: Dashboard, session: Session) -> None:
    session._sides[0].link.drift = 2.5e-7  # as if this trainer had other hardware

    def sessions() -> list[float]:
        return [s["drift"] for s in dashboard.get("/api/v1/workers").json()[0]["sessions"]]

    wait_until(lambda: sessions() == [2.5e-7], "the worker is told, and the dashboard asks")
    families = {family.name: family for family in text_string_to_metric_families(dashboard.get("/metrics").text)}
    assert families["backhaul_worker_drift_ratio"].samples[0].value == 2.5e-7


def test_the_page_is_whole_without_any_other_host(dashboard: Dashboard) -> None:
    page = dashboard.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert linked
    for path in linked:
        assert path.startswith("/static/")
        assert dashboard.get(path).status_code == 200
    assert not re.search(r"<script>|<style>|style=|onclick=", page.text)
    assert dashboard.get("/healthz").text == "ok\n"
    assert [dashboard.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


def test_the_api_describes_itself(dashboard: Dashboard) -> None:
    described = dashboard.get("/api/v1/openapi.json").json()
    assert set(described["paths"]) == {"/api/v1/workers", "/api/v1/memory"}
    assert all(list(methods) == ["get"] for methods in described["paths"].values())


@pytest.mark.parametrize("samples", ["0", "601", "many"])
def test_bad_queries_are_named(samples: str, dashboard: Dashboard) -> None:
    answer = dashboard.get(f"/api/v1/memory?samples={samples}")
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", "samples"]


def test_a_worker_out_of_reach_is_shown_as_such_beside_the_others(worker: WorkerProcess) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dashboard = Dashboard(worker.address, f"127.0.0.1:{nobody.getsockname()[1]}")
        try:
            wait_until(lambda: "UNAVAILABLE" in dashboard.get("/api/v1/workers").json()[1]["error"], "it was asked")
            wait_until(lambda: dashboard.get("/api/v1/workers").json()[0]["state"] == "serving", "the other is seen")
            missing = dashboard.get("/api/v1/workers").json()[1]
            assert (missing["state"], missing["seen_at_s"], missing["rpcs"]) == ("unreachable", 0, [])
            assert "} 0.0" in dashboard.get("/metrics").text
        finally:
            dashboard.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "nowhere"], '"nowhere" can\'t be read'),
        (["--worker", "a:1", "--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--worker", "a:1", "--listen", "unix:/tmp/x"], "is no place for a page"),
        ([], "--worker"),
    ],
)
def test_a_bad_option_is_named(arguments: list[str], message: str) -> None:
    found = run(*arguments)
    assert found.returncode == 2
    assert message in found.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = run("--worker", "a:1", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert found.returncode == 2
    assert "can't listen on" in found.stderr
