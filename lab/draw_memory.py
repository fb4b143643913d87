"""Draws docs/memory.svg, the trainer's activation memory during one step of the demo's model: `make picture`."""

import os
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Set before torch is imported, which reads it.

import torch

import backhaul
from backhaul.demo.corpus import standard_library
from backhaul.demo.peak_memory import live_bytes
from backhaul.demo.variants import DemoSettings, Variant, variants
from backhaul_lab.harness.chart import ChartLine, ChartPoint, LineChart, draw

SETTINGS = DemoSettings(layers=12, batch=4, micro_batches=1)
POINTS = 240
OUT = Path(__file__).parents[1] / "docs" / "memory.svg"
COLORS = ("#8c8c8c", "#2f6fb0", "#e0a030", "#c2410c")


def curve(variant: Variant) -> list[float]:
    """Returns the peak megabytes in each of POINTS equal parts of a step."""
    corpus = standard_library()
    variant.backward(corpus, 0)  # Allocates the gradients and sends the weights.
    events = live_bytes(lambda: variant.backward(corpus, 1))
    first, last = events[0][0], events[-1][0]
    most = [0] * POINTS
    live = at = 0
    for when, after in events:
        part = min(POINTS - 1, (when - first) * POINTS // (last - first))
        for passed in range(at, part + 1):
            most[passed] = max(most[passed], live)
        at, live = part, after
        most[part] = max(most[part], after)
    return [bytes_ / 1e6 for bytes_ in most]


def main() -> None:
    """Runs a step of each variant and draws its activation memory."""
    torch.set_num_threads(1)
    lines, checkpointed = [], []
    with backhaul.connect() as session:
        compared = variants(SETTINGS, lambda _, returns: backhaul.connect(session.workers, returns=returns))
        drawn = [variant for variant in compared if not variant.is_deferred]  # that one needs several micro-batches
        for variant, color in zip(drawn, COLORS, strict=True):
            megabytes = curve(variant)
            points = [ChartPoint(x, y) for x, y in enumerate(megabytes)]
            line = ChartLine(f"{variant.name}: {max(megabytes):.0f} MB at most", color, points, has_marks=False)
            lines.append(line)
            if variant.checkpoint is not None:
                checkpointed.append(line)
        for variant in compared:
            if variant.session is not None:
                assert variant.session.report().fallbacks == 0, variant.session.report()
                variant.session.close()
    title = f"Activation memory of the trainer in one step, {SETTINGS.layers} blocks"
    x_label = "forward  →  backward"
    charts = [
        LineChart(title, x_label, "activation memory of the trainer, MB", [], lines),
        LineChart("The same, checkpointed only", x_label, "the same, checkpointed only, MB", [], checkpointed),
    ]
    OUT.write_text(draw(charts, width=480), encoding="utf-8")


main()
