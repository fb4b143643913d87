"""The dashboard on a real worker and a real training, as HTTP sees it."""

import re
import socket
import subprocess
from collections.abc import Iterator

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from backhaul import Session
from backhaul_runtime.version import version
from conftest import settle, wait_until
from integration.test_telemetry import train
from support import nursery
from support.dashboards import Dashboard
from support.processes import WorkerProcess


@pytest.fixture
def dashboard(worker: WorkerProcess) -> Iterator[Dashboard]:
    with Dashboard(worker.address) as opened:
        wait_until(lambda: opened.items("workers")[0]["state"] == "serving", "the worker is seen")
        yield opened


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return nursery.run("dashboard", *arguments)


@pytest.mark.slow
def test_workers_may_be_named_in_several_options(worker: WorkerProcess) -> None:
    options = ("--worker", "127.0.0.1:1,127.0.0.1:2", "127.0.0.1:3", "--worker", "127.0.0.1:4")
    with Dashboard(worker.address, options=options) as dashboard:
        watched = [row["address"] for row in dashboard.items("workers")]
    assert watched == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4", worker.address]


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/api", "/metrics"])
def test_asked_for_no_more_than_the_head_it_answers_as_if_asked_for_all(dashboard: Dashboard, path: str) -> None:
    all_of_it, head = dashboard.get(path), dashboard.head(path)
    assert (head.status_code, head.text) == (200, "")
    for name in ("content-type", "cache-control", "etag", "content-security-policy"):
        assert head.headers.get(name) == all_of_it.headers.get(name)
    assert dashboard.get(path).status_code == 200  # on the same connection


@pytest.mark.slow
def test_numbers_follow_a_training(dashboard: Dashboard, session: Session, worker: WorkerProcess) -> None:
    train(session, 5, returns="gradients")
    assert session.telemetry is not None
    name = session.telemetry._run.id

    def listed_runs() -> list[dict[str, object]]:
        return [run for run in dashboard.items("runs") if run["run"] == name]

    wait_until(lambda: bool(listed_runs()) and listed_runs()[0]["steps"] == 5, "the steps are told")
    (listed_run,) = listed_runs()
    assert (listed_run["client_version"], listed_run["state"], listed_run["fallbacks"]) == (version(), "running", 0)
    wait_until(lambda: dashboard.api(f"segments?run={name}")["total"] == 3, "the segments are told")
    segments = dashboard.api(f"segments?run={name}")["rows"]
    assert [row["segment"] for row in segments] == ["Sequential #0", "Sequential #1", "Sequential #2"]
    assert {(row["decision"], row["worker"]) for row in segments} == {("gradients", worker.address)}
    assert all(row["local_ms"] > 0 and row["remote_ms"] > 0 and row["up_bytes"] > 0 for row in segments)

    timeline = dashboard.api(f"timeline?run={name}&steps=2")
    assert [step["number"] for step in timeline["steps"]] == [3, 4]
    lanes = {span["lane"] for span in timeline["spans"]}
    # No download may be known: it is short, and begins by the worker's clock, which the trainer can only estimate.
    assert lanes >= {"forward", "upload", "recompute", "backward", "wait"}
    rows = {(rpc["method"]): rpc for rpc in dashboard.api("latency")["rpcs"]}
    assert rows["Backward"]["calls"] >= 5  # one for each step at least: the rest may come ahead
    assert 0 < rows["Backward"]["p50_ms"] <= rows["Backward"]["p90_ms"] <= rows["Backward"]["p99_ms"]
    assert len(dashboard.api(f"runs/{name}/steps")["step"]) == 5

    wait_until(lambda: dashboard.api("overview")["sessions"] == 1, "the sessions of other tests have ended")
    overview = dashboard.api("overview")
    assert (overview["workers"], overview["healthy_workers"]) == (1, 1)
    assert 0 < overview["remote_share"] <= 1.0  # of all that trained on this worker lately, other tests among them
    assert overview["saved_bytes"] > 0
    assert overview["spared_ms_per_step"] > 0
    memory = dashboard.items("workers")[0]["memory"]
    assert memory["budget_bytes"] == 2 << 30
    assert memory["resident_bytes"] > 1 << 20


@pytest.mark.slow
def test_held_memory_is_shown_over_time(dashboard: Dashboard, session: Session) -> None:
    held = session.checkpoint(torch.sin, torch.randn(1 << 18, requires_grad=True), returns="gradients")
    settle(session)
    assert session.telemetry is not None
    name = session.telemetry._run.id

    def worker() -> dict[str, list[int]]:
        return dashboard.api("memory?seconds=60&points=60")["workers"][0]

    wait_until(lambda: worker()["segment_bytes"][-1] >= 1 << 20, "the segment is seen")
    assert len({len(values) for key, values in worker().items() if isinstance(values, list) and key != "marks"}) == 1

    def held_bytes() -> int:
        return next((r["held_bytes"][-1] for r in dashboard.api("memory")["runs"] if r["run"] == name), 0)

    wait_until(lambda: held_bytes() >= 1 << 20, "it is seen as the run's")

    (shown,) = [shown for shown in dashboard.items("sessions") if shown["run"] == name]
    assert shown["segments"] == 1
    assert shown["quota_share"] > 0
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


@pytest.mark.slow
def test_drift_is_shown(dashboard: Dashboard, session: Session) -> None:
    session._workers[0].connection.drift = 2.5e-7  # as if this trainer had other hardware
    drifts = [2.5e-7]
    wait_until(lambda: [s["drift"] for s in dashboard.items("sessions")] == drifts, "the worker is told, and asked")
    families = {family.name: family for family in text_string_to_metric_families(dashboard.get("/metrics").text)}
    assert families["backhaul_worker_drift_ratio"].samples[0].value == 2.5e-7


@pytest.mark.slow
def test_the_page_is_whole_without_any_other_host(dashboard: Dashboard) -> None:
    for path in ("/", "/api"):
        page = dashboard.get(path)
        assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert page.headers["cache-control"] == "no-cache"
        assert page.headers["x-content-type-options"] == "nosniff"
        linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert linked
        for target in linked:
            if target.startswith("#"):
                assert f'id="{target[1:]}"' in page.text
            else:
                assert not target.startswith(("/", "http"))  # a proxy may serve the page below a path prefix
                assert dashboard.get(f"/{target}").status_code == 200
        assert not re.search(r"<script>|<style>|style=|onclick=", page.text)
    assert dashboard.get("/healthz").text == "ok\n"
    assert dashboard.get("/readyz").text == "ok\n"
    assert [dashboard.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


@pytest.mark.slow
def test_a_worker_out_of_reach_is_shown_as_such_beside_the_others(worker: WorkerProcess) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with Dashboard(worker.address, f"127.0.0.1:{nobody.getsockname()[1]}") as dashboard:
            wait_until(lambda: "nothing listens" in dashboard.items("workers")[1]["error"], "it was asked")
            wait_until(lambda: dashboard.items("workers")[0]["state"] == "serving", "the other is seen")
            missing = dashboard.items("workers")[1]
            assert (missing["state"], missing["seen_at_s"], missing["sessions"]) == ("unreachable", 0, 0)
            unreachable = (
                "WorkerUnreachable",
                missing["address"],
            )  # there may be others, of the shared worker's trainers
            wait_until(
                lambda: unreachable in [(alert["name"], alert["subject"]) for alert in dashboard.items("alerts")],
                "it was asked twice",
            )
            assert "} 0.0" in dashboard.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worker", "nowhere"], '"nowhere" can\'t be read'),
        (["--worker", "a:1", "--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--worker", "a:1", "--listen", "unix:/tmp/x"], "is not an address for a page"),
        ([], "--worker"),
    ],
)
def test_a_bad_option_is_named(arguments: list[str], message: str) -> None:
    process = run(*arguments)
    assert process.returncode == 2
    assert message in process.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = run("--worker", "a:1", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert process.returncode == 2
    assert "can't listen on" in process.stderr
