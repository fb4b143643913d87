"""Exports a trainer's steps as OpenTelemetry traces. Needs the extra "otel" and a configured SDK.

    backhaul.step
    ├── backhaul.segment          a checkpointed call, from its forward to the end of its backward
    │   ├── backhaul.forward      and a span for each other phase: upload, queue, recompute, backward,
    │   ├── backhaul.upload       download, wait, trainer
    │   └── ...
    └── backhaul.segment

NOTE [Spans]
1. Spans are created after the fact, with the times of the events by the trainer's clock.
2. A step is a child of the span that was current in the thread that ended the step. Its calls are children of the step.
   A call may be reported before its step and then waits for it, or after it. Both are bounded.
3. If the trainer recomputed a segment that was meant for a worker, the segment has an error, but not its step.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import AddressError
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.version import version

MAX_STEPS = 64
MAX_CALLS = 4096

Attributes = dict[str, AttributeValue]
_LANES = {
    number: name.removeprefix("LANE_").lower()
    for name, number in telemetry_pb2.Lane.items()
    if number != telemetry_pb2.LANE_UNSPECIFIED
}


class Traces:
    """Creates spans from the telemetry of a session.

    Args:
        tracer: Creates the spans; None for that of the SDK that is configured when the first report arrives.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("backhaul", version())
        self._steps: OrderedDict[int, Context] = OrderedDict()  # of the steps that were reported
        self._waiting: list[telemetry_pb2.SegmentCall] = []  # calls that wait for their step

    @staticmethod
    def context() -> Context:
        """Returns the context for a step that ends now, to pass to `export`.

        Called in the thread that ends the step.
        """
        return get_current()

    def export(self, report: telemetry_pb2.TrainerReport, contexts: Mapping[int, Context]) -> None:
        """Creates the spans of a report. Only the telemetry thread calls it.

        Args:
            report: Steps that have ended, and calls of these or other steps.
            contexts: For each step of the report, by number, the context that was current when it ended.
        """
        for step in report.steps:
            self._step(step, contexts.get(step.number, Context()), report.run)
        calls = [*self._waiting, *report.calls]
        self._waiting = []
        for call in calls:
            parent = self._steps.get(call.step)
            if parent is not None:
                self._call(call, parent)
            elif not report.run.is_closed and not self._is_past(call.step):
                self._waiting.append(call)
        del self._waiting[:-MAX_CALLS]  # Rule 2

    def _is_past(self, step: int) -> bool:
        return bool(self._steps) and step <= next(reversed(self._steps))

    def _step(self, step: telemetry_pb2.Step, context: Context, run: telemetry_pb2.Run) -> None:
        attributes: Attributes = {
            "backhaul.session": run.id,
            "backhaul.step.number": step.number,
            "backhaul.step.calls": step.calls,
            "backhaul.step.gradients": step.gradients,
            "backhaul.step.activations": step.activations,
            "backhaul.step.on_trainer": step.on_trainer,
            "backhaul.step.fallbacks": step.fallbacks,
            "backhaul.step.wait_s": step.wait_s,
            "backhaul.step.overhead_s": step.overhead_s,
            "backhaul.step.spared_s": step.spared_s,
            "backhaul.bytes.up": step.up_bytes,
            "backhaul.bytes.down": step.down_bytes,
            "backhaul.bytes.saved": step.saved_bytes,
        }
        if step.HasField("loss"):
            attributes["backhaul.step.loss"] = step.loss
        begin, end = _ns(step.started_at_s), _ns(step.started_at_s + step.duration_s)
        span = self._tracer.start_span("backhaul.step", context, attributes=attributes, start_time=begin)
        span.end(end)
        self._steps[step.number] = trace.set_span_in_context(span, context)
        while len(self._steps) > MAX_STEPS:  # Rule 2
            self._steps.popitem(last=False)

    def _call(self, call: telemetry_pb2.SegmentCall, parent: Context) -> None:
        if not call.spans:  # its times are unknown
            return
        attributes: Attributes = {
            "backhaul.step.number": call.step,
            "backhaul.segment.name": call.name,
            "backhaul.segment.position": call.position,
            "backhaul.decision": call.decision,
            "backhaul.reason": call.reason,
            "backhaul.retries": call.retries,
            "backhaul.mismatches": call.mismatches,
            "backhaul.drift": call.drift,
            "backhaul.bytes.up": call.up_bytes,
            "backhaul.bytes.down": call.down_bytes,
        }
        attributes |= _server(call.worker)
        begin = _ns(min(span.started_at_s for span in call.spans))
        end = _ns(max(span.started_at_s + span.duration_s for span in call.spans))
        segment = self._tracer.start_span("backhaul.segment", parent, attributes=attributes, start_time=begin)
        _judge(segment, call, end)
        inside = trace.set_span_in_context(segment, parent)
        for reported in _by_start(call.spans):
            name = _LANES.get(reported.lane)
            if name is not None:
                span = self._tracer.start_span(f"backhaul.{name}", inside, start_time=_ns(reported.started_at_s))
                span.end(_ns(reported.started_at_s + reported.duration_s))
        segment.end(end)


def _judge(segment: Span, call: telemetry_pb2.SegmentCall, end: int) -> None:
    """Sets the status and events of a segment's span (Rule 3)."""
    failed = [span.started_at_s for span in call.spans if span.lane == telemetry_pb2.LANE_TRAINER]
    at = _ns(min(failed)) if failed else end
    if call.retries:
        segment.add_event("backhaul.retry", {"backhaul.retries": call.retries}, at)
    if call.mismatches:
        segment.add_event("backhaul.mismatch", {"backhaul.mismatches": call.mismatches}, at)
    if call.is_fallback:
        segment.add_event("backhaul.fallback", {"backhaul.reason": call.reason}, at)
        segment.set_status(Status(StatusCode.ERROR, call.reason))


def _server(worker: str) -> Attributes:
    """Returns the attributes of a worker in OpenTelemetry's naming; none if no worker had the segment."""
    try:
        address = parse_address(worker)
    except AddressError:
        return {}
    if address.unix_path:
        return {"server.address": address.unix_path, "network.transport": "unix"}
    return {"server.address": address.host, "server.port": address.port, "network.transport": "tcp"}


def _by_start(spans: Sequence[telemetry_pb2.Span]) -> list[telemetry_pb2.Span]:
    return sorted(spans, key=lambda span: span.started_at_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
