"""How much of the recomputation backward had to wait for, from what a session told its worker."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import grpc

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.wire.splicing import accepted
from backhaul_runtime.wire.stubs import stub

Lane = telemetry_pb2.Lane
TOLD_WITHIN_S = 2.5
"""A session tells once a second."""


def told_calls(worker: str) -> list[telemetry_pb2.SegmentCall]:
    """All calls that a worker was told of, in the order of their steps, once those just ended are told too."""
    time.sleep(TOLD_WITHIN_S)
    found: list[telemetry_pb2.SegmentCall] = []
    with grpc.insecure_channel(parse_address(worker).target) as channel:
        ask = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"]).GetTelemetry
        request = telemetry_pb2.GetTelemetryRequest()
        while True:
            answer: telemetry_pb2.GetTelemetryResponse = accepted(ask(request))
            found += [call for report in answer.reports for call in report.report.calls]
            if not answer.has_more_reports:
                break
            request = telemetry_pb2.GetTelemetryRequest(epoch=answer.epoch, after_report=answer.reports[-1].number)
    return sorted(found, key=lambda call: (call.step, call.number))


def spans(call: telemetry_pb2.SegmentCall, lane: "Lane.ValueType") -> list[tuple[float, float]]:
    """Begin and end of what a call had in a lane, in seconds."""
    return [(s.started_at_s, s.started_at_s + s.duration_s) for s in call.spans if s.lane == lane]


def exposed_by_step(worker: str) -> list[float]:
    """Of each step in order, the part of its recomputation that ran when it was already needed."""
    steps: dict[int, list[telemetry_pb2.SegmentCall]] = defaultdict(list)
    for call in told_calls(worker):
        steps[call.step].append(call)
    return [exposed(steps[number]) for number in sorted(steps)]


def exposed(calls: Iterable[telemetry_pb2.SegmentCall]) -> float:
    """The part of a step's recomputation that ran after its grad_output was there.

    It is there when backward asks for the segment, or, where the worker went on into the segment by itself, when it had
    the gradient of the one after it. What the trainer recomputed was all waited for.
    """
    late_s = all_s = 0.0
    after: Sequence[tuple[float, float]] = ()
    for call in sorted(calls, key=lambda call: call.number, reverse=True):
        backward = spans(call, Lane.LANE_BACKWARD)
        needed_at = min((began for began, _ in spans(call, Lane.LANE_WAIT)), default=float("inf"))
        if after and backward and backward[0][0] < needed_at:
            needed_at = after[-1][1]
        for began, ended in spans(call, Lane.LANE_RECOMPUTE):
            all_s += ended - began
            late_s += max(0.0, ended - max(began, needed_at))
        for began, ended in spans(call, Lane.LANE_TRAINER):
            all_s += ended - began
            late_s += ended - began
        after = backward
    if not all_s:
        raise RuntimeError("no recomputation was told of")
    return late_s / all_s
