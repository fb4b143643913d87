"""The setups to predict, and the predictions as a table and as charts. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import log10
from typing import Any

from backhaul_lab.harness.chart import COLORS, GREY, ChartLine, ChartPoint, LineChart, draw
from backhaul_lab.simulate.costs import Costs, KnownCosts, Setup, step_of_torch_s, step_without_checkpointing_s
from backhaul_lab.simulate.deferred import BlockSetup, predict_block
from backhaul_lab.simulate.model import predict

SEGMENTS = 8
_MEGABYTES = 1e6
_HIGHEST = 2.5
"""Largest ratio of a chart: beyond it, a worker does not help anyway."""


def setups(costs: Costs) -> dict[str, Setup]:
    """Returns the setups of the table, by name."""
    usual = Setup(SEGMENTS)
    return {
        f"{SEGMENTS} blocks": usual,
        "12 blocks": Setup(12),
        "32 blocks": Setup(32),
        "room for 4 of 8": replace(usual, memory_bytes=costs.budget_bytes(SEGMENTS, 4)),
        "room for 2 of 8": replace(usual, memory_bytes=costs.budget_bytes(SEGMENTS, 2)),
        "two workers": replace(usual, workers=2),
        "100 MB/s": replace(usual, bytes_per_s=100e6),
        "1 GB/s, 0.5 ms": replace(usual, bytes_per_s=1e9, latency_s=0.5e-3),
        "worker twice as fast": replace(usual, worker_speed=2.0),
        "worker half as fast": replace(usual, worker_speed=0.5),
        "known after forward": replace(usual, is_predicted=False),
    }


def block_setups() -> dict[str, BlockSetup]:
    """Returns the accumulation blocks of the table, by name."""
    return {
        "4, equal worker": BlockSetup(SEGMENTS, 4, [1.0]),
        "8 micro-batches, equal worker": BlockSetup(SEGMENTS, 8, [1.0]),
        "16, worker of 0.3": BlockSetup(SEGMENTS, 16, [0.3]),
        "16, two equal workers": BlockSetup(SEGMENTS, 16, [1.0, 1.0]),
        "16, workers of 1 and 0.3": BlockSetup(SEGMENTS, 16, [1.0, 0.3]),
        "64, four equal workers": BlockSetup(SEGMENTS, 64, [1.0] * 4),
    }


def rows(costs: KnownCosts) -> list[dict[str, Any]]:
    """Returns the prediction of each setup, as JSON."""
    table = []
    for name, setup in setups(costs.steps).items():
        of_segment = costs.of(setup)
        predicted = predict(of_segment, setup)
        table.append(
            {
                "name": name,
                "setup": asdict(setup),
                "predicted_s": predicted.step_s,
                "over_none": predicted.step_s / step_without_checkpointing_s(of_segment, setup.segments),
                "over_torch": predicted.step_s / step_of_torch_s(of_segment, setup.segments),
                "replays": predicted.replays,
            }
        )
    return table


def block_rows(costs: Costs) -> list[dict[str, Any]]:
    """Returns one row per accumulation block, as JSON: its prediction, and the limits for many micro-batches.

    Args:
        costs: The costs of a segment with one micro-batch.
    """
    predicted = {name: (setup, predict_block(costs, setup)) for name, setup in block_setups().items()}
    return [
        {"name": name, "setup": asdict(setup), **asdict(block), "speed_up": block.speed_up}
        for name, (setup, block) in predicted.items()
    ]


def blocks_as_table(table: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows of `block_rows` as a text table."""
    columns = f"{'predicted':>11}{'share':>9}{'x torch':>9}{'speed-up':>10}{'whole':>7}{'law':>7}"
    head = f"{'accumulation block':<32}{columns}"
    lines = [head, "-" * len(head)]
    for row in table:
        over_torch = row["took_s"] / row["torch_s"]
        first, last = row["shares"][0], row["shares"][-1]
        share = str(first) if first == last else f"{first} to {last}"
        lines.append(
            f"{row['name']:<32}{row['took_s'] * 1e3:>8.0f} ms{share:>9}{over_torch:>9.2f}"
            f"{row['speed_up']:>10.2f}{row['whole_units']:>7.2f}{row['law']:>7.2f}"
        )
    return "\n".join(lines)


def as_table(table: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows as a text table."""
    head = f"{'':<28}{'predicted':>11}{'x none':>8}{'x torch':>9}{'replays':>9}"
    lines = [head, "-" * len(head)]
    lines += [
        f"{row['name']:<28}{row['predicted_s'] * 1e3:>8.0f} ms{row['over_none']:>8.2f}{row['over_torch']:>9.2f}"
        f"{row['replays']:>9}"
        for row in table
    ]
    return "\n".join(lines)


def as_svg(costs: KnownCosts) -> str:
    """Draws the step time, relative to training without checkpointing, over memory, network and worker speed."""
    usual = Setup(SEGMENTS)
    room = [
        (float(q), replace(usual, memory_bytes=costs.steps.budget_bytes(SEGMENTS, q))) for q in range(1, SEGMENTS + 1)
    ]
    network = [(log10(m), replace(usual, bytes_per_s=m * _MEGABYTES)) for m in (30, 50, 100, 200, 300, 500, 1000, 3000)]
    speed = [(log10(s / 4), replace(usual, worker_speed=s / 4)) for s in range(2, 17)]
    torch = step_of_torch_s(costs.steps, SEGMENTS) / step_without_checkpointing_s(costs.steps, SEGMENTS)

    def predicted(setups: Sequence[tuple[float, Setup]]) -> list[ChartPoint]:
        points = []
        for x, setup in setups:
            of_segment = costs.of(setup)
            over_none = predict(of_segment, setup).step_s / step_without_checkpointing_s(of_segment, SEGMENTS)
            points.append(ChartPoint(x, over_none))
        return points

    def chart(x_label: str, setups: Sequence[tuple[float, Setup]], ticks: Sequence[tuple[float, str]]) -> LineChart:
        known = [(x, replace(setup, is_predicted=False)) for x, setup in setups]
        lines = [
            ChartLine("predicted programs", COLORS[0], predicted(setups), has_marks=False),
            ChartLine("known after forward", COLORS[1], predicted(known), has_marks=False),
            ChartLine("torch's checkpoint", GREY, [ChartPoint(x, torch) for x, _ in setups], has_marks=False),
        ]
        title = f"Step time over {x_label}"
        return LineChart(title, x_label, "step time (without checkpointing = 1)", ticks, lines, high=_HIGHEST)

    charts = [
        chart(
            f"room for recomputed segments, of {SEGMENTS}", room, [(tick, f"{tick}") for tick in range(1, SEGMENTS + 1)]
        ),
        chart("network, MB/s each way", network, [(log10(tick), f"{tick}") for tick in (30, 100, 300, 1000, 3000)]),
        chart("speed of the worker", speed, [(log10(tick), f"{tick:g}") for tick in (0.5, 1, 2, 4)]),
    ]
    return draw(charts, width=380)
