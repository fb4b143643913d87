"""Traces of steps, as a user's SDK gets them."""

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backhaul._observe.opentelemetry import MAX_CALLS, MAX_STEPS, Traces
from backhaul_proto.v1 import telemetry_pb2 as pb

LANES = [
    (pb.LANE_FORWARD, 100.0, 0.2),
    (pb.LANE_UPLOAD, 100.2, 0.1),
    (pb.LANE_QUEUE, 100.3, 0.05),
    (pb.LANE_RECOMPUTE, 100.35, 0.2),
    (pb.LANE_BACKWARD, 100.6, 0.2),
    (pb.LANE_WAIT, 100.7, 0.2),
    (pb.LANE_DOWNLOAD, 100.8, 0.1),
]


class Recorded:
    """Traces, and the spans that came of them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.traces = Traces(self.tracer)

    def export(
        self,
        steps: Sequence[pb.Step] = (),
        calls: Sequence[pb.SegmentCall] = (),
        contexts: dict[int, Context] | None = None,
        run: pb.Run | None = None,
    ) -> None:
        self.traces.export(pb.TrainerReport(run=run or pb.Run(id="a1b2"), steps=steps, calls=calls), contexts or {})

    def spans(self, name: str = "") -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name or not name]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def step(number: int = 4, **fields: Any) -> pb.Step:
    return pb.Step(number=number, started_at_s=100.0, duration_s=2.0, calls=1, **fields)


def call(
    step: int = 4, spans: Sequence[tuple[pb.Lane.ValueType, float, float]] = LANES, **fields: Any
) -> pb.SegmentCall:
    reported = [pb.Span(lane=lane, started_at_s=began_at_s, duration_s=took_s) for lane, began_at_s, took_s in spans]
    return pb.SegmentCall(**{"step": step, "name": "Block", "position": 1, "spans": reported, **fields})


def test_a_step_has_its_segments_and_these_their_lanes_at_the_times_they_had(recorded: Recorded) -> None:
    recorded.export([step(loss=0.5)], [call(worker="gpu-box:50051", decision="gradients", up_bytes=7)])
    (whole,), (segment,) = recorded.spans("backhaul.step"), recorded.spans("backhaul.segment")
    parts = [span for span in recorded.spans() if span not in (whole, segment)]

    assert whole.parent is None
    assert segment.parent == whole.context
    assert [part.parent for part in parts] == [segment.context] * len(LANES)
    assert [(part.name, part.start_time, part.end_time) for part in parts] == [
        (f"backhaul.{pb.Lane.Name(lane).removeprefix('LANE_').lower()}", round(at * 1e9), round((at + took) * 1e9))
        for lane, at, took in LANES
    ]
    assert (whole.start_time, whole.end_time) == (100_000_000_000, 102_000_000_000)
    assert (segment.start_time, segment.end_time) == (100_000_000_000, 100_900_000_000)

    assert whole.attributes is not None
    assert segment.attributes is not None
    assert {
        name: whole.attributes[name] for name in ("backhaul.session", "backhaul.step.number", "backhaul.step.loss")
    } == {
        "backhaul.session": "a1b2",
        "backhaul.step.number": 4,
        "backhaul.step.loss": 0.5,
    }
    expected = {
        "backhaul.segment.name": "Block",
        "backhaul.segment.position": 1,
        "backhaul.decision": "gradients",
        "backhaul.bytes.up": 7,
        "server.address": "gpu-box",
        "server.port": 50051,
    }
    assert {name: segment.attributes[name] for name in expected} == expected
    assert segment.status.is_unset


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ("unix:/run/b.sock", {"server.address": "/run/b.sock", "network.transport": "unix"}),
        ("[::1]:7", {"server.address": "::1", "server.port": 7, "network.transport": "tcp"}),
        ("", {}),
    ],
)
def test_a_worker_is_named_as_opentelemetry_names_servers(
    worker: str, expected: dict[str, object], recorded: Recorded
) -> None:
    recorded.export([step()], [call(worker=worker)])
    attributes = recorded.spans("backhaul.segment")[0].attributes or {}
    assert {
        name: value for name, value in attributes.items() if name.split(".")[0] in {"server", "network"}
    } == expected


def test_a_step_is_a_child_of_what_was_current_when_it_ended(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("training") as training:
        context = Traces.context()
    recorded.export([step(4), step(5)], contexts={4: context})
    four, five = recorded.spans("backhaul.step")
    assert four.parent == training.get_span_context()
    assert four.context.trace_id == training.get_span_context().trace_id
    assert five.parent is None


def test_the_span_that_is_current_where_it_is_told_is_not_meant(recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("somebody else's"):
        recorded.export([step()])
    assert recorded.spans("backhaul.step")[0].parent is None


def test_calls_find_their_step_whichever_is_told_first(recorded: Recorded) -> None:
    recorded.export(calls=[call(4)])
    assert recorded.spans() == []
    recorded.export([step(4)])
    recorded.export(calls=[call(4)])
    (whole,) = recorded.spans("backhaul.step")
    assert [span.parent for span in recorded.spans("backhaul.segment")] == [whole.context] * 2


@pytest.mark.slow
def test_calls_without_a_step_are_not_kept(recorded: Recorded) -> None:
    recorded.export([step(4)], [call(3)])  # it has passed and was not told
    recorded.export(calls=[call(9)] * (MAX_CALLS + 5))
    recorded.export([step(9)])
    assert len(recorded.spans("backhaul.segment")) == MAX_CALLS
    recorded.export(calls=[call(12)], run=pb.Run(is_closed=True))
    recorded.export([step(12)])
    assert len(recorded.spans("backhaul.segment")) == MAX_CALLS


def test_steps_are_not_kept_for_ever(recorded: Recorded) -> None:
    recorded.export([step(number) for number in range(MAX_STEPS + 1)])
    recorded.export(calls=[call(0), call(1)])
    (segment,) = recorded.spans("backhaul.segment")
    assert segment.attributes is not None
    assert segment.attributes["backhaul.step.number"] == 1


def test_a_fallback_is_an_error_of_its_segment_and_says_why(recorded: Recorded) -> None:
    own = [(pb.LANE_FORWARD, 100.0, 0.2), (pb.LANE_TRAINER, 101.0, 0.3)]
    why = "the worker is out of reach"
    recorded.export([step(fallbacks=1)], [call(spans=own, is_fallback=True, reason=why, retries=1, mismatches=2)])
    (whole,), (segment,) = recorded.spans("backhaul.step"), recorded.spans("backhaul.segment")
    assert whole.status.is_unset
    assert (segment.status.status_code, segment.status.description) == (trace.StatusCode.ERROR, why)
    assert {event.name: dict(event.attributes or {}) for event in segment.events} == {
        "backhaul.retry": {"backhaul.retries": 1},
        "backhaul.mismatch": {"backhaul.mismatches": 2},
        "backhaul.fallback": {"backhaul.reason": why},
    }
    assert {event.timestamp for event in segment.events} == {101_000_000_000}


def test_a_call_of_which_no_time_is_known_has_no_span(recorded: Recorded) -> None:
    recorded.export([step()], [call(spans=[])])
    assert recorded.spans("backhaul.segment") == []


def test_a_lane_of_a_later_version_is_passed_over(recorded: Recorded) -> None:
    recorded.export([step()], [call(spans=[(99, 100.0, 1.0)])])  # type: ignore[list-item]
    assert [span.name for span in recorded.spans()] == ["backhaul.step", "backhaul.segment"]
