"""The exported trace beside one of torch's own profiler."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from backhaul_proto.v1.telemetry_pb2 import Lane, SegmentCall, Span
from backhaul_server.dashboard.collect.training_runs import Detail, TrainerRun
from backhaul_server.dashboard.views.timeline import last_steps
from backhaul_server.dashboard.views.trace import base_of, chrome_trace
from support.reporting import Training


@pytest.mark.slow
def test_it_merges_with_a_trace_of_torchs_profiler(tmp_path: Path) -> None:
    began_s = time.time()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.randn(8, 8) @ torch.randn(8, 8)
        started_s = time.time()
        with record_function("segment"):
            time.sleep(0.05)
        ended_s = time.time()
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    theirs = json.loads(file.read_text())

    training = Training(segments=1, began_at_s=began_s, step_s=time.time() - began_s)
    run = TrainerRun(training.about(), time.time())
    report = training.report([0])
    report.calls.pop()
    span = Span(lane=Lane.LANE_FORWARD, started_at_s=started_s, duration_s=ended_s - started_s)
    report.calls.append(SegmentCall(name="Block", spans=[span]))
    run.detail = Detail(run.id, lambda: True)
    run.take(report, now_s=time.time(), since_s=0.0)
    ours = chrome_trace(last_steps(run, 1))

    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    merged = [*theirs["traceEvents"], *ours["traceEvents"]]
    recorded = next(event for event in merged if event["name"] == "segment" and event["ph"] == "X")
    shown = next(event for event in merged if event["name"] == "Block #0")
    assert shown["ts"] - 1 <= recorded["ts"] <= recorded["ts"] + recorded["dur"] <= shown["ts"] + shown["dur"] + 1
    assert shown["dur"] - recorded["dur"] < 20_000  # what a context manager takes
    assert {event["pid"] for event in theirs["traceEvents"]}.isdisjoint(e["pid"] for e in ours["traceEvents"])


def test_the_base_changes_as_the_profilers_does() -> None:
    quarter_s = 7_889_238
    for periods in (0, 1, 223):
        for offset_s in (0.0, 0.5, quarter_s - 1):
            assert base_of(periods * quarter_s + offset_s) == periods * quarter_s * 10**9


def test_steps_without_a_break_do_not_overlap() -> None:
    training = Training(segments=1, began_at_s=1_795_312_145.0012345, step_s=0.4)
    run = TrainerRun(training.about(), time.time())
    run.take(training.report(range(60)), now_s=time.time(), since_s=0.0)
    events = [event for event in chrome_trace(last_steps(run, 60), base_ns=10**9)["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: event["ts"])
    assert [event["name"] for event in events] == [f"step {number}" for number in range(60)]
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(events))
