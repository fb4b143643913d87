"""Routes of /api/v1: what they describe, what they refuse, and what they answer of a made-up training."""

import base64
import csv
import io
import json
import time
from collections.abc import Iterator
from typing import get_args

import pytest

from backhaul_server.dashboard.http.parameters import Column
from backhaul_server.dashboard.schemas.latency import Phases
from backhaul_server.dashboard.schemas.memory import HeldHistory, TierHistory
from backhaul_server.dashboard.schemas.runs import RunSeries
from backhaul_server.dashboard.schemas.segments import SegmentStatus
from conftest import wait_until
from support.dashboards import Dashboard
from support.reporting import FakeWorker, Training

ROUTES = {
    "/live",
    "/overview",
    "/workers",
    "/sessions",
    "/alerts",
    "/topology",
    "/fleet",
    "/events",
    "/memory",
    "/latency",
    "/timeline",
    "/timeline/trace",
    "/segments",
    "/segments.csv",
    "/runs",
    "/runs/{run}",
    "/runs/{run}/steps",
}
FRAMEWORKS = {"HTTPValidationError", "ValidationError", "ErrorDetail"}
"""Schemas of errors, as FastAPI writes them."""


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(segments=4, workers=["a:1", "b:2"], name="=Block", began_at_s=time.time() - 10)


@pytest.fixture(scope="module")
def dashboard(training: Training) -> Iterator[Dashboard]:
    with FakeWorker() as worker, Dashboard(worker.address).ready() as dashboard:
        report = training.report(range(5))
        report.calls.append(
            training.call(4, 4, name="Head", position=0, decision="trainer", reason="a custom Function")
        )
        worker.tell(report)
        worker.served("Backward", [0.02] * 9 + [0.2])
        wait_until(lambda: dashboard.api("segments")["total"] == 5, "the training is told")
        wait_until(lambda: dashboard.api("latency?method=Backward")["rpcs"] != [], "calls are counted")
        yield dashboard


def test_every_route_and_model_is_described_with_an_example(dashboard: Dashboard) -> None:
    described = dashboard.api("openapi.json")
    assert set(described["paths"]) == {f"/api/v1{route}" for route in ROUTES}
    for path, methods in described["paths"].items():
        assert list(methods) == ["get"]
        route = methods["get"]
        assert route["description"], path
        (content,) = route["responses"]["200"]["content"].values()
        assert "schema" in content or "itemSchema" in content, path
        for parameter in route.get("parameters", []):
            assert parameter["description"], (path, parameter)
            assert "examples" in parameter["schema"] or "examples" in parameter, (path, parameter)
    assert set(described["components"]["securitySchemes"]) == {"token", "login"}
    for name, model in described["components"]["schemas"].items():
        for field, about in model["properties"].items():
            assert len(about.get("description", "").split()) >= 3 or name in FRAMEWORKS, (name, field)
            assert "examples" in about or "$ref" in json.dumps(about) or name in FRAMEWORKS, (name, field)


def test_examples_of_lists_are_equally_long() -> None:
    for model in (TierHistory, HeldHistory, Phases, RunSeries):
        examples = [field.examples[0] for field in model.model_fields.values() if field.examples]
        assert len({len(example) for example in examples if isinstance(example, list)}) == 1


HUGE = base64.urlsafe_b64encode(b"[1%s, %s]" % (b"0" * 400, b'"a"')).decode().rstrip("=")
"""A cursor with a number that no float can hold."""
NO_TEXT = base64.urlsafe_b64encode(b'[1, "\\ud800"]').decode().rstrip("=")
"""A cursor whose name no database takes."""


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("memory?seconds=9", "seconds"),
        ("memory?seconds=3601", "seconds"),
        ("memory?points=many", "points"),
        ("latency?seconds=0", "seconds"),
        ("timeline?steps=21", "steps"),
        ("timeline/trace?base_ns=-1", "base_ns"),
        ("segments?sort=colour", "sort"),
        ("segments?limit=1001", "limit"),
        ("segments?offset=-1", "offset"),
        ("segments.csv?descending=perhaps", "descending"),
        (f"segments?filter={'x' * 201}", "filter"),
        ("runs?limit=0", "limit"),
        ("runs?cursor=nonsense", "cursor"),
        ("workers?limit=1001", "limit"),
        ("sessions?cursor=WzFd", "cursor"),
        ("events?cursor=WyJhIiwgImIiXQ", "cursor"),
        ("events?since_s=20&until_s=10", "since_s"),
        ("events?severity=grave", "severity"),
        (f"events?filter={'x' * 201}", "filter"),
        (f"runs?cursor={HUGE}", "cursor"),
        (f"events?cursor={NO_TEXT}", "cursor"),
        ("memory?since_s=20&until_s=10", "since_s"),
        ("fleet?points=0", "points"),
        ("runs/x/steps?points=0", "points"),
    ],
)
def test_bad_queries_are_named(path: str, field: str, dashboard: Dashboard) -> None:
    answer = dashboard.get(f"/api/v1/{path}")
    assert answer.status_code == 422
    (detail,) = answer.json()["detail"]
    assert detail["loc"] == ["query", field]
    assert detail["msg"]


@pytest.mark.parametrize(
    "path",
    [
        "latency?run=unknown",
        "latency?worker=unknown:1",
        "timeline?run=unknown",
        "timeline/trace?run=unknown",
        "segments?run=unknown",
        "segments.csv?run=unknown",
        "runs/unknown/steps",
    ],
)
def test_what_is_unknown_is_named(path: str, dashboard: Dashboard) -> None:
    answer = dashboard.get(f"/api/v1/{path}")
    assert answer.status_code == 404
    assert "unknown" in answer.json()["detail"]


@pytest.mark.parametrize("column", get_args(Column))
def test_segments_are_sorted_by_any_column(column: str, dashboard: Dashboard) -> None:
    rows = dashboard.api(f"segments?sort={column}")["rows"]
    falling = dashboard.api(f"segments?sort={column}&descending=true")["rows"]
    values = [row[column] for row in rows]
    assert values == sorted(values)
    assert [row[column] for row in falling] == sorted(values, reverse=True)


def test_segments_are_filtered_and_paged(dashboard: Dashboard) -> None:
    assert dashboard.api("segments?filter=HEAD")["total"] == 1
    assert dashboard.api("segments?filter=custom")["rows"][0]["segment"] == "Head #0"
    assert dashboard.api("segments?filter=b:2")["total"] == 2
    assert dashboard.api("segments?reason=a%20custom%20Function")["rows"][0]["segment"] == "Head #0"
    assert dashboard.api("segments?reason=custom")["rows"] == []
    (reason,) = dashboard.api("segments?filter=b:2")["reasons"]
    assert (reason["reason"], reason["decision"], reason["calls"]) == ("a custom Function", "trainer", 1)
    page = dashboard.api("segments?offset=1&limit=2")
    assert page["total"] == 5
    assert [row["segment"] for row in page["rows"]] == ["=Block #1", "=Block #2"]


def test_the_csv_has_all_rows_and_no_formulas(dashboard: Dashboard, training: Training) -> None:
    answer = dashboard.get("/api/v1/segments.csv?sort=segment&limit=1")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert tuple(rows[0]) == tuple(SegmentStatus.model_fields)
    assert [row["segment"] for row in rows] == [*(f"'=Block #{i}" for i in range(4)), "Head #0"]
    assert {row["run"] for row in rows} == {training.run}
    assert [row["reasons"] for row in rows] == [*[""] * 4, "1 x a custom Function"]
    assert float(rows[0]["local_ms"]) > 0


def test_the_timeline_adds_up(dashboard: Dashboard, training: Training) -> None:
    timeline = dashboard.api("timeline?steps=2")
    assert timeline["run"] == training.run
    assert [step["number"] for step in timeline["steps"]] == [3, 4]
    assert timeline["duration_ms"] == pytest.approx(800, abs=1)
    assert len(timeline["calls"]) == 9
    for step in timeline["steps"]:
        assert 0.5 < step["overlap"] < 1
        assert step["wait_ms"] == pytest.approx(40)
    assert {span["worker"] for span in timeline["spans"] if span["lane"] == "upload"} == {"a:1", "b:2"}
    assert {span["worker"] for span in timeline["spans"] if span["lane"] in {"forward", "wait"}} == {""}
    for span in timeline["spans"]:
        assert timeline["calls"][span["call"]]["segment"] == span["segment"]
        assert 0 <= span["start_ms"] <= span["start_ms"] + span["duration_ms"] <= timeline["duration_ms"] + 0.01


def test_the_trace_is_a_file_with_lanes_apart(dashboard: Dashboard, training: Training) -> None:
    answer = dashboard.get("/api/v1/timeline/trace?steps=2&base_ns=1000000000")
    assert answer.headers["content-disposition"] == f'attachment; filename="backhaul-{training.run}-4.json"'
    trace = json.loads(answer.text)
    assert (trace["baseTimeNanoseconds"], trace["displayTimeUnit"]) == (10**9, "ms")
    named = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert {event["args"]["name"] for event in named} == {
        "Backhaul trainer gpu-box:4711",
        "Backhaul worker a:1",
        "Backhaul worker b:2",
    }
    ends: dict[tuple[int, int], float] = {}
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert bars
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in sorted(bars, key=lambda event: event["ts"]):
        thread = (event["pid"], event["tid"])
        assert thread in threads
        assert ends.get(thread, 0) <= event["ts"]
        ends[thread] = event["ts"] + event["dur"]
    assert min(event["ts"] for event in bars) == pytest.approx((training.began_at_s + 1.2 - 1) * 1e6, abs=2)


def test_latency_is_by_worker_and_method(dashboard: Dashboard) -> None:
    address = dashboard.items("workers")[0]["address"]
    latency = dashboard.api(f"latency?worker={address}&method=Backward&seconds=60")
    (rpc,) = [rpc for rpc in latency["rpcs"] if rpc["method"] == "Backward"]
    assert rpc["calls"] == 10
    assert 20 / 1.2 <= rpc["p50_ms"] <= 20 * 1.2
    assert 200 / 1.2 <= rpc["p99_ms"] <= 200 * 1.2
    heat = latency["heat"]
    assert len(heat["counts"]) == len(heat["at_s"])
    assert all(len(column) == len(heat["bounds_ms"]) + 1 for column in heat["counts"])
    assert sum(map(sum, heat["counts"])) == 10
    row = next(i for column in heat["counts"] for i, count in enumerate(column) if count == 9)
    assert heat["bounds_ms"][row - 1] < 20 <= heat["bounds_ms"][row]
    (phases,) = latency["phases"]
    assert phases["step"] == [0, 1, 2, 3, 4]
    assert all(len(values) == 5 for key, values in phases.items() if key != "run")


def test_steps_are_thinned_out(dashboard: Dashboard, training: Training) -> None:
    series = dashboard.api(f"runs/{training.run}/steps?points=2")
    assert series["step"] == [2, 4]
    assert series["step_ms"] == pytest.approx([400, 400])
    assert series["loss"] == pytest.approx([3.5, 2 + (3 / 4 + 3 / 5) / 2])


def test_answers_are_compressed_where_it_pays(dashboard: Dashboard) -> None:
    assert dashboard.get("/api/v1/timeline").headers["content-encoding"] == "gzip"
    assert "content-encoding" not in dashboard.get("/healthz").headers
