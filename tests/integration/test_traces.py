"""Traces of a training program that configures an SDK, in a process of its own: a process has one SDK."""

import json
from typing import Any

import pytest

from support.nursery import run
from support.processes import WorkerProcess

PROGRAM = """
import json, sys
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import backhaul

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
block = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(block.parameters())
for telemetry in (True, False):
    settings = backhaul.Settings(traces=True, telemetry=telemetry, silence_s=240)
    with backhaul.connect(sys.argv[1], settings=settings) as session:
        for _ in range(2):
            with trace.get_tracer("mine").start_as_current_span("batch"):
                session.checkpoint(block, torch.randn(2, 8), returns="gradients").sum().backward()
                optimizer.step()
        assert session.report().remote == 2
    print(json.dumps([
        [span.name, format(span.context.span_id, "x"), format(span.parent.span_id, "x") if span.parent else "",
         span.start_time, span.end_time]
        for span in exporter.get_finished_spans()
    ]))
    exporter.clear()
"""


@pytest.mark.slow
def test_steps_are_spans_inside_the_programs_own(worker: WorkerProcess) -> None:
    process = run("-c", PROGRAM, worker.address)
    assert process.returncode == 0, process.stderr
    with_telemetry, without = map(json.loads, process.stdout.splitlines())
    check(with_telemetry)
    check(without)


def check(spans: list[list[Any]]) -> None:
    """Looks at which spans there are, and which are inside which."""
    children: dict[str, list[str]] = {}
    for name, _, parent, *_ in spans:
        children.setdefault(parent, []).append(name)
    of = {name: [span for span in spans if span[0] == name] for name in {span[0] for span in spans}}
    assert [len(of[name]) for name in ("batch", "backhaul.step", "backhaul.segment")] == [2, 2, 2]
    assert [children[number] for _, number, *_ in of["batch"]] == [["backhaul.step"]] * 2
    assert [children[number] for _, number, *_ in of["backhaul.step"]] == [["backhaul.segment"]] * 2
    for _, number, _, began, ended in of["backhaul.segment"]:
        assert {
            "backhaul.forward",
            "backhaul.upload",
            "backhaul.recompute",
            "backhaul.backward",
            "backhaul.wait",
        } <= set(children[number])
        assert all(began <= span[3] <= span[4] <= ended for span in spans if span[2] == number)
