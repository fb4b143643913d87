"""Whatever workers and trainers tell, every route answers, in JSON, and what is kept stays small."""

import asyncio
import csv
import io
import json
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_server.dashboard.collect.sanitize import CALLS, clean_report
from backhaul_server.dashboard.collect.segments import ROWS
from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.collect.trainers import CALLS_BYTES, DETAILED_RUNS, ROWS_IN_ALL, RUNS, Trainers
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.history.retention import MEMORY
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.http.api import add_routes
from backhaul_server.dashboard.http.dashboard_state import DashboardState
from backhaul_server.dashboard.http.feed import Feed
from backhaul_server.dashboard.metrics.alerts import Alerts
from backhaul_server.dashboard.metrics.exposition import MetricsSnapshot, exposition
from support.reporting import Training

PATHS = [
    "overview",
    "workers",
    "sessions",
    "alerts",
    "topology",
    "fleet",
    "events",
    "memory",
    "latency",
    "timeline?steps=20",
    "timeline/trace",
    "segments?sort=wait_ms",
    "segments.csv",
    "runs",
]
_NUMBERS = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.floats(1.7e9, 1.8e9) | st.floats(0, 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 8) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 3) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 3) | st.integers(0, 2**64 - 1),
}
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["=1+1", "x" * 5_000, "\r\n", "gradients"])
_RUNS = st.sampled_from(["one", "two", "", "../x", "=run", "o" * 65])


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of a kind, by its description."""
    return _fields(kind.DESCRIPTOR).map(lambda fields: kind(**fields))


def _fields(described: Any) -> st.SearchStrategy[dict[str, Any]]:
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in described.fields:
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            optional[field.name] = st.dictionaries(_TEXT, _TEXT, max_size=2)
            continue
        if inner is not None:
            one: st.SearchStrategy[Any] = _fields(inner)
        elif field.name in {"id", "run"}:
            one = _RUNS
        else:
            one = _TEXT if field.cpp_type == field.CPPTYPE_STRING else _NUMBERS[field.cpp_type]
        is_list = isinstance(getattr(_kind(described)(), field.name), str | bytes | int | float | Message) is False
        optional[field.name] = st.lists(one, max_size=3) if is_list else one
    return st.fixed_dictionaries({}, optional=optional)


def _kind(described: Descriptor) -> type[Message]:
    return getattr(telemetry_pb2, described.name)


class Answers:
    """The application's routes without a server, and what they answer from."""

    def __init__(self) -> None:
        self.watch = Watch(parse_resolvers("a:1,b:2"))
        self._state = DashboardState(
            self.watch, Alerts(self.watch), History(MEMORY, 1)
        )  # not started: it keeps nothing
        self.feed = Feed(self._state.live)
        self._app = FastAPI()
        add_routes(self._app, self._state, self.feed)

    def take(self, report: telemetry_pb2.TrainerReport) -> None:
        # As the wire brings it.
        report = telemetry_pb2.TrainerReport.FromString(report.SerializeToString())
        if clean_report(report):
            self.watch.trainers.take(report, time.time(), 0.0)

    def all(self) -> dict[str, str]:
        """What every route says."""
        return asyncio.run(self._all())

    async def _all(self) -> dict[str, str]:
        runs = [f"runs/{run.id}/steps" for run in self.watch.trainers]
        texts = {}
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://dashboard") as client:
            for path in [*PATHS, *runs]:
                answer = await client.get(f"/api/v1/{path}")
                assert answer.status_code == 200 or (path == "timeline/trace" and answer.status_code == 404), (
                    answer.text
                )
                texts[path] = answer.text
        async for event in self.feed.listen():
            texts["live"] = str(event.raw_data)
            break
        return texts


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check(answers: Answers) -> None:
    """All that is promised of every answer, whatever was told."""
    texts = answers.all()
    for path, text in texts.items():
        if path == "segments.csv":
            rows = list(csv.reader(io.StringIO(text)))
            assert {len(row) for row in rows} == {23}
            assert not any(cell.startswith(("=", "@", "+")) for row in rows for cell in row)
        else:
            _check_values(json.loads(text, parse_constant=_refuse))
    timeline = json.loads(texts["timeline?steps=20"])
    spans_of_rows: dict[Any, list[Any]] = {}
    for span in timeline["spans"]:
        spans_of_rows.setdefault((span["lane"], span["worker"], span["row"]), []).append(span)
    for spans in spans_of_rows.values():
        spans.sort(key=lambda span: (span["start_ms"], span["duration_ms"]))
        for before, after in pairwise(spans):
            assert before["start_ms"] + before["duration_ms"] <= after["start_ms"]
    exposition(MetricsSnapshot(answers.watch))


_LOSSES = {"loss", "last_loss"}  # a trainer's own numbers, of any size
_LONGEST_TEXT, _LONGEST_NOTES = 1_500, 2_000


def _check_values(node: Any) -> None:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "notes":  # several lines
                assert len(value) <= _LONGEST_NOTES
                assert value.replace("\n", "").isprintable()
            elif name not in _LOSSES:
                _check_values(value)
    elif isinstance(node, list):
        for value in node:
            _check_values(value)
    elif isinstance(node, str):
        assert len(node) < _LONGEST_TEXT
        assert node.isprintable()
    elif node is not None:
        # Nanoseconds since 1970 among them, and sums of what is held to as much, rounded.
        assert abs(node) <= 1.001e19


SLOW = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@SLOW
@given(st.lists(messages(telemetry_pb2.TrainerReport), min_size=1, max_size=4))
def test_any_reports_are_answered_for(reports: list[telemetry_pb2.TrainerReport]) -> None:
    answers = Answers()
    for report in reports:
        answers.take(report)
    check(answers)


@pytest.mark.slow
@SLOW
@given(st.lists(messages(telemetry_pb2.GetTelemetryResponse), min_size=1, max_size=4))
def test_any_telemetry_is_answered_for(responses: list[telemetry_pb2.GetTelemetryResponse]) -> None:
    answers = Answers()
    for index, telemetry in enumerate(responses):
        worker = answers.watch.workers[index % 2]
        worker.answered(telemetry_pb2.GetTelemetryResponse.FromString(telemetry.SerializeToString()))
        answers.watch.held.sample(time.time(), answers.watch.workers, answers.watch.trainers)
    check(answers)


def test_absurd_steps_are_shown_as_numbers() -> None:
    answers, training = Answers(), Training(segments=2)
    for number, (loss, drift) in enumerate([(float("nan"), float("inf")), (float("-inf"), float("nan")), (1e300, -1)]):
        report = training.report([number])
        report.steps[0].MergeFrom(
            telemetry_pb2.Step(loss=loss, duration_s=float("inf"), up_bytes=2**64 - 1, peak_bytes=2**64 - 1)
        )
        report.calls[0].drift = drift
        report.calls[0].spans[0].duration_s = float("inf")
        answers.take(report)
    parsed = {path: json.loads(text) for path, text in answers.all().items() if path != "segments.csv"}
    assert parsed[f"runs/{training.run}/steps"]["loss"] == [None, None, 1e300]
    assert parsed["runs"]["items"][0]["peak_bytes"] == LARGEST
    assert parsed["segments?sort=wait_ms"]["rows"][0]["drift"] == 1e9  # what is no number is no small drift
    assert parsed["timeline?steps=20"]["duration_ms"] < 1e10


def test_absurd_blocks_are_shown_as_numbers() -> None:
    answers, training = Answers(), Training(segments=1)
    usual = telemetry_pb2.Share(segments=3, segment_s=0.5)
    blocks = [
        telemetry_pb2.Block(
            took_s=float("nan"), others_s=float("inf"), pending_gradient_bytes=2**64 - 1, shares=[usual]
        ),
        telemetry_pb2.Block(took_s=1e-300, others_s=1, shares=[usual, telemetry_pb2.Share(worker="x" * 9_000)]),
        telemetry_pb2.Block(took_s=2, shares=[telemetry_pb2.Share(worker="a:1", segments=2**32 - 1)] * 1_000),
        telemetry_pb2.Block(
            micro_batches=2,
            took_s=4,
            others_s=1,
            shares=[usual, telemetry_pb2.Share(worker="a:1", segments=9, segment_s=1)],
        ),
    ]
    for number, block in enumerate(blocks):
        report = training.report([number])
        report.steps[0].block.CopyFrom(block)
        answers.take(report)
    shown = [step["block"] for step in json.loads(answers.all()["timeline?steps=20"])["steps"]]
    assert [block["speed_up"] for block in shown] == [None, LARGEST, None, (1 + 12 * 0.5) / 4]
    assert shown[0]["pending_gradient_bytes"] == LARGEST
    assert len(shown[1]["shares"][1]["worker"]) == 200
    assert len(shown[2]["shares"]) == 64
    assert [(share["share"], share["speed"]) for share in shown[3]["shares"]] == [(0.25, 1.0), (0.75, 0.5)]


@pytest.mark.slow
def test_a_trainer_that_tells_too_much_is_bounded() -> None:
    trainers, now_s = Trainers(), time.time()
    spans = Training().call(0, 0).spans
    calls = [
        telemetry_pb2.SegmentCall(number=n, name="x" * 500, position=n, reason="y" * 9_000, spans=spans)
        for n in range(ROWS + 500)
    ]
    for run in range(RUNS + 10):
        call_count = len(calls) if run == 0 else 4_000 if run < DETAILED_RUNS else 2
        report = telemetry_pb2.TrainerReport(run=Training(run=f"run-{run}").about(), calls=calls[:call_count])
        assert clean_report(report)
        trainers.take(report, now_s, now_s)
    rows = [len(run.detail.segments) for run in trainers if run.detail is not None]
    assert len(trainers) == RUNS
    assert trainers.refused_reports == 10
    assert len(rows) == DETAILED_RUNS
    assert (rows[0], sum(rows)) == (ROWS, ROWS_IN_ALL)
    kept = [call for run in trainers for step in run.reported_steps.values() for call in step.calls.values()]
    assert 0 < sum(map(len, kept)) == sum(run.calls_bytes for run in trainers) <= CALLS_BYTES


def test_one_report_is_bounded() -> None:
    report = telemetry_pb2.TrainerReport(run=Training().about(), dropped=5)
    for number in range(CALLS + 7):
        report.calls.add(number=number)
    assert clean_report(report)
    assert len(report.calls) == CALLS
    assert report.dropped == 12


def test_absurd_descriptions_events_and_links_are_made_harmless() -> None:
    report = Training().report([0])
    report.run.name, report.run.notes = "n" * 1_000, "a\x00b\n" * 5_000
    report.run.tags.extend(["t" * 100] * 100)
    report.sent_at_s = float("nan")
    for _ in range(1_000):
        report.events.add(kind="fell_back", at_s=float("inf"), text="x\n" * 1_000, number=2**64 - 1)
        report.links.add(worker="w" * 999, clock_offset_s=float("nan"), clock_error_s=float("nan"), up_bytes=2**64 - 1)
    assert clean_report(report)
    assert (len(report.run.name), len(report.run.tags), len(report.run.tags[0])) == (100, 16, 40)
    assert (len(report.run.notes) <= 2_000, "\x00" in report.run.notes, "\n" in report.run.notes) == (True, False, True)
    assert (len(report.events), len(report.links)) == (100, 256)
    assert (report.events[0].at_s, len(report.events[0].text), report.events[0].number) == (4e9, 300, 2**53 - 1)
    assert (report.links[0].clock_offset_s, report.links[0].clock_error_s) == (0.0, 4e9)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "x" * 65, "ü", "a\n"])
def test_a_run_that_no_route_could_name_is_refused(name: str) -> None:
    assert not clean_report(telemetry_pb2.TrainerReport(run=telemetry_pb2.Run(id=name)))
