"""Exports a timeline for Perfetto and chrome://tracing, on the clock of torch.profiler's traces."""

import re
from math import inf
from typing import Any

from backhaul_server.dashboard.collect.intervals import rows_of
from backhaul_server.dashboard.views.timeline import LANES, Steps, by_lane, name_of

_PROFILER_BASE_S = 3 * 2_629_746
"""torch.profiler counts time from the last multiple of this number of seconds, three average months. Using the same
base puts the events of both into one file. `base_ns` is for a profile that began before such a moment and steps after
it."""
_FIRST_PROCESS = 5_000_000
"""The first process id of the export. It is beyond all ids of Linux, so it never equals one of a profile."""
_STEPS_THREAD = 0
_ROWS_OF_A_LANE = 100_000


def base_of(at_s: float) -> int:
    """Returns the base from which torch.profiler counts at a time, in nanoseconds since 1970."""
    return int(at_s // _PROFILER_BASE_S) * _PROFILER_BASE_S * 10**9


def chrome_trace(steps: Steps, base_ns: int | None = None) -> dict[str, Any]:
    """Returns a trace in which the trainer and each worker are processes, and the rows of a lane are threads.

    Args:
        steps: The steps and bars to show.
        base_ns: The base of all times, in nanoseconds since 1970; None for that of torch.profiler.
    """
    base_ns = base_of(steps.begin_s) if base_ns is None else base_ns
    about = steps.run.about
    workers = sorted({bar.worker for bar in steps.bars} - {""})
    processes = {name: _FIRST_PROCESS + index for index, name in enumerate(["", *workers])}
    events = []
    for name, process in processes.items():
        shown = f"Backhaul worker {name}" if name else f"Backhaul trainer {about.trainer}"
        events.append(_named("process_name", process, 0, name=shown))
        events.append(_named("process_sort_index", process, 0, sort_index=process))
    trainer = processes[""]
    if steps.steps:
        events.append(_named("thread_name", trainer, _STEPS_THREAD, name="step"))
    next_us: float = inf
    for step in sorted(steps.steps, key=lambda step: step.started_at_s, reverse=True):
        start_us, end_us = _since(base_ns, step.started_at_s, step.started_at_s + step.duration_s)
        numbers: dict[str, object] = {"step": step.number, "wait_ms": 1e3 * step.wait_s}
        if step.HasField("loss"):
            numbers["loss"] = step.loss
        # Rounding may let a step end after the next one began.
        interval = start_us, int(max(start_us, min(end_us, next_us)))
        events.append(_complete(f"step {step.number}", trainer, _STEPS_THREAD, interval, numbers))
        next_us = start_us
    order = {lane: number for number, lane in LANES.items()}
    for (lane, worker), bars in sorted(by_lane(steps.bars).items(), key=lambda item: order[item[0][0]]):
        intervals = [_since(base_ns, bar.start_s, bar.end_s) for bar in bars]
        rows = rows_of(intervals)
        for row in range(max(rows) + 1):
            name = lane if row == 0 else f"{lane} {row + 1}"
            thread = order[lane] * _ROWS_OF_A_LANE + row
            events.append(_named("thread_name", processes[worker], thread, name=name))
            events.append(_named("thread_sort_index", processes[worker], thread, sort_index=thread))
        for bar, interval, row in zip(bars, intervals, rows, strict=True):
            call = steps.calls[bar.call]
            about_call: dict[str, object] = {
                "step": call.step,
                "decision": call.decision,
                "reason": call.reason,
                "is_known": call.capture.is_known,
                "recorded_because": call.capture.reason,
                "worker": call.worker,
                "up_bytes": call.up_bytes,
                "down_bytes": call.down_bytes,
            }
            thread = order[lane] * _ROWS_OF_A_LANE + row
            events.append(_complete(name_of(call), processes[worker], thread, interval, about_call))
    return {"baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms", "traceEvents": events}


def file_name(steps: Steps) -> str:
    """Returns the file name of the download."""
    last = steps.steps[-1].number if steps.steps else 0
    return f"backhaul-{re.sub(r'[^A-Za-z0-9_.-]', '_', steps.run.id)}-{last}.json"


def _named(kind: str, process: int, thread: int, **arguments: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _since(base_ns: int, start_s: float, end_s: float) -> tuple[int, int]:
    """Returns start and duration in whole microseconds: with fractions their sum would not always equal the end."""
    return round((start_s * 1e9 - base_ns) / 1e3), round((end_s * 1e9 - base_ns) / 1e3)


def _complete(
    name: str, process: int, thread: int, interval_us: tuple[int, int], arguments: dict[str, object]
) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "backhaul",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": interval_us[0],
        "dur": interval_us[1] - interval_us[0],
        "args": arguments,
    }
