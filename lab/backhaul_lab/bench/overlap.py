"""Computes how much of the recomputation backward waited for, from the telemetry that a session reports."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import grpc

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.wire.splicing import accepted
from backhaul_runtime.wire.stubs import stub

Lane = telemetry_pb2.Lane
REPORTED_WITHIN_S = 2.5
"""Time after which a call has been reported. A session reports once a second."""


def reported_calls(worker: str) -> list[telemetry_pb2.SegmentCall]:
    """Returns all calls that were reported to a worker, by step. It first waits for the reports of the last calls."""
    time.sleep(REPORTED_WITHIN_S)
    calls: list[telemetry_pb2.SegmentCall] = []
    with grpc.insecure_channel(parse_address(worker).target) as channel:
        get_telemetry = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"]).GetTelemetry
        request = telemetry_pb2.GetTelemetryRequest()
        while True:
            answer: telemetry_pb2.GetTelemetryResponse = accepted(get_telemetry(request))
            calls += [call for report in answer.reports for call in report.report.calls]
            if not answer.has_more_reports:
                break
            request = telemetry_pb2.GetTelemetryRequest(epoch=answer.epoch, after_report=answer.reports[-1].number)
    return sorted(calls, key=lambda call: (call.step, call.number))


def spans(call: telemetry_pb2.SegmentCall, lane: "Lane.ValueType") -> list[tuple[float, float]]:
    """Returns begin and end of each span of a call in a lane, in seconds."""
    return [(s.started_at_s, s.started_at_s + s.duration_s) for s in call.spans if s.lane == lane]


def exposed_by_step(worker: str) -> list[float]:
    """Returns the exposed fraction of the recomputation for each step, in order."""
    steps: dict[int, list[telemetry_pb2.SegmentCall]] = defaultdict(list)
    for call in reported_calls(worker):
        steps[call.step].append(call)
    return [exposed(steps[number]) for number in sorted(steps)]


def exposed(calls: Iterable[telemetry_pb2.SegmentCall]) -> float:
    """Returns the fraction of a step's recomputation that ran after its grad_output was available.

    The grad_output is available when backward requests the segment. If the worker ran the segment speculatively, it is
    available when the worker has finished the segment after it. Everything that the trainer recomputed is exposed.
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
        raise RuntimeError("no recomputation was reported")
    return late_s / all_s
