"""Sanitizes reports and telemetry where they arrive, because trainers and workers may be buggy or hostile.

Messages are changed in place, so that later code needs no checks: numbers are finite, not negative and of plausible
size, strings are short and printable, and lists are bounded. A report that names no run is rejected.
"""

import math
import re
from collections.abc import MutableMapping, MutableSequence
from typing import TypeVar

from google.protobuf.message import Message

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.wire.telemetry import MAX_NOTES, MAX_RUN_NAME, MAX_TAG, MAX_TAGS
from backhaul_server.dashboard.collect.series import LARGEST

T = TypeVar("T")

DECISIONS = frozenset({"gradients", "activations", "trainer", "kept", ""})
LANES = frozenset(telemetry_pb2.Lane.values()) - {telemetry_pb2.LANE_UNSPECIFIED}
LATEST_S = 4e9
"""The latest accepted time, in seconds since 1970: the year 2096."""
LONGEST_S = 1e6
STEPS = 1_000
"""The largest number of steps in one report."""
CALLS = 20_000
"""The largest number of calls in one report."""
CALLS_OF_A_STEP = 16_384
_SPANS = 32
_ENTRIES = 64
_SESSIONS = 256
_METHODS = 64
_SHARES = 64
EVENTS = 100
"""The largest number of events in one report."""
_LINKS = 256
_WORST_DRIFT = 1e9
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def clean_report(report: telemetry_pb2.TrainerReport) -> bool:
    """Sanitizes a report in place. Returns False if it names no run and is therefore useless."""
    run = report.run
    if not _RUN.fullmatch(run.id):
        return False
    run.trainer, run.client_version = clipped(run.trainer), clipped(run.client_version, 64)
    run.started_at_s = _within(run.started_at_s, LATEST_S)
    run.name, run.notes = clipped(run.name, MAX_RUN_NAME), _clipped_lines(run.notes, MAX_NOTES)
    del run.tags[MAX_TAGS:]
    for index, tag in enumerate(run.tags):
        run.tags[index] = clipped(tag, MAX_TAG)
    _clean_map(run.settings)
    _clean_map(run.fingerprint)
    _clean_strings(run.workers)
    report.dropped = min(LARGEST, report.dropped + _shorten(report.steps, STEPS) + _shorten(report.calls, CALLS))
    for step in report.steps:
        _clean_step(step)
    for call in report.calls:
        _clean_call(call)
    report.sent_at_s = _within(report.sent_at_s, LATEST_S)
    _shorten(report.events, EVENTS)
    for event in report.events:
        _clean_event(event)
    _shorten(report.links, _LINKS)
    for link in report.links:
        _clean_link(link)
    return True


def clean_telemetry(telemetry: telemetry_pb2.GetTelemetryResponse) -> None:
    """Sanitizes a worker's telemetry in place, except its reports, which are sanitized one by one."""
    for name in ("worker_version", "epoch", "device", "last_error"):
        setattr(telemetry, name, clipped(getattr(telemetry, name)))
    telemetry.uptime_s = _within(telemetry.uptime_s, LATEST_S)
    telemetry.last_error_at_s = _within(telemetry.last_error_at_s, LATEST_S)
    _clean_map(telemetry.fingerprint)
    _clean_counts(telemetry)
    _clean_counts(telemetry.memory)
    telemetry.busy_s = _within(telemetry.busy_s, LATEST_S)
    telemetry.clock_s = _within(telemetry.clock_s, LATEST_S)
    if telemetry.HasField("accelerator"):
        accelerator = telemetry.accelerator
        accelerator.name = clipped(accelerator.name)
        _clean_counts(accelerator)
        if accelerator.HasField("utilization"):
            accelerator.utilization = _within(accelerator.utilization, 1.0)
    _shorten(telemetry.sessions, _SESSIONS)
    for session in telemetry.sessions:
        for name in ("trainer", "client_version", "last_error"):
            setattr(session, name, clipped(getattr(session, name)))
        session.run = session.run if _RUN.fullmatch(session.run) else ""
        session.idle_s = _within(session.idle_s, LONGEST_S)
        session.drift = _drift(session.drift)
        _clean_counts(session)
    _shorten(telemetry.rpcs, _METHODS)
    for rpc in telemetry.rpcs:
        rpc.method = clipped(rpc.method, 64)
        rpc.total_s = _within(rpc.total_s, LATEST_S)
        _clean_counts(rpc)


def clipped(text: str, length: int = 200) -> str:
    """Returns a text without line breaks and other control characters, cut to a length."""
    if len(text) > length:
        text = f"{text[: length - 1]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _clipped_lines(text: str, length: int) -> str:
    """Returns a text that may have line breaks, but no other control characters, cut to a length."""
    lines = text[:length].splitlines()
    return "\n".join(clipped(line, length) for line in lines)


def _clean_event(event: telemetry_pb2.Event) -> None:
    event.at_s = _within(event.at_s, LATEST_S)
    event.kind, event.worker = clipped(event.kind, 64), clipped(event.worker)
    event.segment, event.text = clipped(event.segment), clipped(event.text, 300)
    _clean_counts(event)


def _clean_link(link: telemetry_pb2.Link) -> None:
    link.worker = clipped(link.worker)
    link.round_trip_s = _within(link.round_trip_s, LONGEST_S)
    link.clock_offset_s = (
        max(-LATEST_S, min(LATEST_S, link.clock_offset_s)) if math.isfinite(link.clock_offset_s) else 0.0
    )
    # An error that is no number must not look like a small one.
    link.clock_error_s = _within(link.clock_error_s, LATEST_S) if math.isfinite(link.clock_error_s) else LATEST_S
    _clean_counts(link)


def _clean_step(step: telemetry_pb2.Step) -> None:
    step.started_at_s = _within(step.started_at_s, LATEST_S)
    for name in ("duration_s", "wait_s", "overhead_s", "spared_s"):
        setattr(step, name, _within(getattr(step, name), LONGEST_S))
    if step.HasField("loss") and not math.isfinite(step.loss):
        step.ClearField("loss")
    _clean_counts(step)
    if step.HasField("block"):
        _clean_block(step.block)


def _clean_block(block: telemetry_pb2.Block) -> None:
    block.took_s, block.others_s = _within(block.took_s, LONGEST_S), _within(block.others_s, LONGEST_S)
    _clean_counts(block)
    del block.shares[_SHARES:]
    for share in block.shares:
        share.worker, share.segment_s = clipped(share.worker), _within(share.segment_s, LONGEST_S)


def _clean_call(call: telemetry_pb2.SegmentCall) -> None:
    call.name, call.worker, call.reason = clipped(call.name), clipped(call.worker), clipped(call.reason, 300)
    if call.decision not in DECISIONS:
        call.decision = ""
    call.drift = _drift(call.drift)
    call.overhead_s = _within(call.overhead_s, LONGEST_S)
    _clean_counts(call)
    if len(call.spans) > _SPANS or any(span.lane not in LANES for span in call.spans):
        kept = [span for span in call.spans if span.lane in LANES][:_SPANS]
        del call.spans[:]
        call.spans.extend(kept)
    for span in call.spans:
        span.started_at_s = _within(span.started_at_s, LATEST_S)
        span.duration_s = _within(span.duration_s, LONGEST_S)


def _clean_counts(message: Message) -> None:
    """Limits the 64-bit counts of a message. Smaller integers cannot be too large."""
    for name in _COUNTS[message.DESCRIPTOR.full_name]:
        if getattr(message, name) > LARGEST:
            setattr(message, name, LARGEST)


def _clean_map(entries: MutableMapping[str, str]) -> None:
    kept = {clipped(key, 64): clipped(value) for key, value in sorted(entries.items())[:_ENTRIES]}
    if kept != dict(entries):
        entries.clear()
        entries.update(kept)


def _clean_strings(entries: MutableSequence[str]) -> None:
    _shorten(entries, _ENTRIES)
    for index, entry in enumerate(entries):
        entries[index] = clipped(entry)


def _shorten(entries: MutableSequence[T], length: int) -> int:
    """Keeps only the last entries of a list. Returns how many were removed."""
    surplus = max(0, len(entries) - length)
    if surplus:
        del entries[:surplus]
    return surplus


def _within(value: float, most: float) -> float:
    return min(value, most) if value > 0 else 0.0  # a NaN is not above 0


def _drift(value: float) -> float:
    """Limits a drift. NaN becomes the largest drift, because it must not look like a small one."""
    return min(abs(value), _WORST_DRIFT) if math.isfinite(value) else _WORST_DRIFT


_COUNTS = {
    kind.DESCRIPTOR.full_name: [
        field.name
        for field in kind.DESCRIPTOR.fields
        if field.cpp_type == field.CPPTYPE_UINT64 and isinstance(getattr(kind(), field.name), int)
    ]
    for kind in (
        telemetry_pb2.GetTelemetryResponse,
        telemetry_pb2.MemoryTelemetry,
        telemetry_pb2.SessionTelemetry,
        telemetry_pb2.RpcTelemetry,
        telemetry_pb2.Step,
        telemetry_pb2.Block,
        telemetry_pb2.SegmentCall,
        telemetry_pb2.Event,
        telemetry_pb2.Link,
        telemetry_pb2.Accelerator,
    )
}
