"""Sanitizes reports and telemetry where they arrive, because trainers and workers may be buggy or hostile.

Messages are changed in place, so that later code needs no checks: numbers are finite, not negative and of plausible
size, strings are short and printable, and lists are bounded. A report that names no run is rejected. What differs from
the usual limit of a type is in `_OF_FIELD`, by the name of the field.
"""

import math
import re
from collections.abc import Callable, MutableMapping, MutableSequence
from functools import cache, partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.wire.telemetry import MAX_NOTES, MAX_RUN_NAME, MAX_TAG, MAX_TAGS
from backhaul_server.dashboard.collect.series import LARGEST

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
EVENTS = 100
"""The largest number of events in one report."""
_ENTRIES = 64
"""The largest number of entries of any other list or map."""
_SPANS = 32
_WORST_DRIFT = 1e9
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Rule = Callable[[Any], Any]
"""Returns the sanitized value of a scalar, or changes a message, list or map in place."""


def clean_report(report: telemetry_pb2.TrainerReport) -> bool:
    """Sanitizes a report in place. Returns False if it names no run and is therefore useless."""
    if not _RUN.fullmatch(report.run.id):
        return False
    surplus = max(0, len(report.steps) - STEPS) + max(0, len(report.calls) - CALLS)
    clean(report)
    report.dropped = min(LARGEST, report.dropped + surplus)
    for step in report.steps:
        if not math.isfinite(step.loss):
            step.ClearField("loss")
    for call in report.calls:
        if len(call.spans) > _SPANS or any(span.lane not in LANES for span in call.spans):
            spans = [span for span in call.spans if span.lane in LANES][:_SPANS]
            del call.spans[:]
            call.spans.extend(spans)
    return True


def clipped(text: str, length: int = 200) -> str:
    """Returns a text without line breaks and other control characters, cut to a length."""
    if len(text) > length:
        text = f"{text[: length - 1]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _clipped_lines(text: str) -> str:
    """Returns notes, which may have line breaks, but no other control characters."""
    lines = text[:MAX_NOTES].splitlines()
    return "\n".join(clipped(line, MAX_NOTES) for line in lines)


def _within(value: float, most: float) -> float:
    return min(value, most) if value > 0 else 0.0  # a NaN is not above 0


def _drift(value: float) -> float:
    """Limits a drift. NaN becomes the largest drift, because it must not look like a small one."""
    return min(abs(value), _WORST_DRIFT) if math.isfinite(value) else _WORST_DRIFT


def _offset(value: float) -> float:
    return max(-LATEST_S, min(LATEST_S, value)) if math.isfinite(value) else 0.0


_OF_FIELD: dict[str, Rule] = {
    "Accelerator.utilization": partial(_within, most=1.0),
    "Capture.reason": partial(clipped, length=300),
    "TorchCompilation.guard": partial(clipped, length=300),
    "Event.kind": partial(clipped, length=64),
    "Event.text": partial(clipped, length=300),
    # An error that is no number must not look like a small one.
    "Link.clock_error_s": lambda value: _within(value, LATEST_S) if math.isfinite(value) else LATEST_S,
    "Link.clock_offset_s": _offset,
    "RpcTelemetry.method": partial(clipped, length=64),
    "RpcTelemetry.total_s": partial(_within, most=LATEST_S),
    "Run.name": partial(clipped, length=MAX_RUN_NAME),
    "Run.notes": _clipped_lines,
    "Run.tags": partial(clipped, length=MAX_TAG),
    "SegmentCall.decision": lambda decision: decision if decision in DECISIONS else "",
    "SegmentCall.drift": _drift,
    "TrainerReport.drift": _drift,
    "SegmentCall.reason": partial(clipped, length=300),
    "SessionTelemetry.drift": _drift,
    "SessionTelemetry.run": lambda run: run if _RUN.fullmatch(run) else "",
    "Step.loss": lambda loss: loss,  # a number of the trainer's own, of any size
}
"""How values of fields are sanitized that have limits of their own."""
_LONG_TIMES = frozenset({"busy_s", "clock_s", "sent_at_s", "uptime_s"})
_MOST = {
    "Run.tags": MAX_TAGS,
    "TrainerReport.calls": CALLS,
    "TrainerReport.events": EVENTS,
    "TrainerReport.links": 256,
    "TrainerReport.steps": STEPS,
    "GetTelemetryResponse.sessions": 256,
    "SegmentCall.spans": CALLS,  # limited once those of unknown lanes are left out
}
"""The largest number of entries of lists with limits of their own."""


def clean(message: Message) -> None:
    """Sanitizes all fields of a message in place, and those of the messages in it. For reports see `clean_report`."""
    for name, rule in _plan(message.DESCRIPTOR):
        value = getattr(message, name)
        if isinstance(value, str | float | int):
            cleaned = rule(value)
            if cleaned != value:
                setattr(message, name, cleaned)
        elif not isinstance(value, Message) or message.HasField(name):
            rule(value)


@cache
def _plan(kind: Descriptor) -> list[tuple[str, Rule]]:
    """Returns the fields of a kind of message that need to be sanitized, each with its rule."""
    plan = []
    for field in kind.fields:
        name = f"{kind.name}.{field.name}"
        rule = _OF_FIELD.get(name) or _of_type(field)
        if rule is None:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            rule = _clean_map
        elif field.is_repeated:
            rule = partial(_clean_list, most=_MOST.get(name, _ENTRIES), rule=rule)
        plan.append((field.name, rule))
    return plan


def _of_type(field: FieldDescriptor) -> Rule | None:
    """Returns how a value of a field without limits of its own is sanitized; None if nothing about it can be wrong."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return clean
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return clipped
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        is_time = field.name.endswith("at_s") or field.name in _LONG_TIMES
        return partial(_within, most=LATEST_S if is_time else LONGEST_S)
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 and not field.is_repeated:
        return partial(min, LARGEST)
    return None  # smaller integers cannot be too large, and buckets are differences of counts


def _clean_list(entries: MutableSequence[Any], most: int, rule: Rule) -> None:
    """Keeps only the first entries of a list, and sanitizes them."""
    del entries[most:]
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            entries[index] = rule(entry)
        else:
            rule(entry)


def _clean_map(entries: MutableMapping[str, str]) -> None:
    clean = {clipped(key, 64): clipped(value) for key, value in sorted(entries.items())[:_ENTRIES]}
    if clean != dict(entries):
        entries.clear()
        entries.update(clean)
