"""Which charts a report has, and the sentence below each, which is derived from the results. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from backhaul_lab.experiment.plan.axes import AXES, Axis, Value
from backhaul_lab.experiment.report.results import CellResult
from backhaul_lab.harness.chart import COLORS, DARK, GREY, ChartLine, ChartPoint, LineChart
from backhaul_lab.harness.rounds import Spread

NONE, TORCH, BACKHAUL = "without checkpointing", "torch.utils.checkpoint", "Backhaul"
_EQUAL = 0.02
"""Ratios that differ from 1 by less are called equal."""
_PAIR = 2
_MEGABYTE = 1e6
_OF_TRAINING = ("micro_batches", "segment_layers", "batch", "dtype")
"""Axes that change what a step without Backhaul computes, or how torch's checkpoint divides it."""


@dataclass(frozen=True, slots=True)
class ReportChart:
    """A chart of a report.

    Attributes:
        key: Name of the figure's file, without the ending.
        heading: Heading above the chart.
        chart: The chart to draw.
        sentence: What the chart shows, derived from the results.
    """

    key: str
    heading: str
    chart: LineChart
    sentence: str


Series = list[tuple[str, list[CellResult]]]
"""Results along an axis, one list for each combination of the other axes, with its name."""


def figures(
    results: Sequence[CellResult], varied: Sequence[str], events: Sequence[dict[str, Any]], kinds: Sequence[str]
) -> list[ReportChart]:
    """Returns the charts of a report.

    Args:
        results: The results of all cells.
        varied: Names of the axes with more than one value.
        events: What happened while steps were measured.
        kinds: Kinds of charts to return, see `CHARTS` of the experiment's file.
    """
    charts = []
    if events:
        charts += [figure for result in results if (figure := _timeline(result, events)) is not None]
    shown = [result for result in results if result.is_measured]
    for name in _along(shown, varied):
        series = _series(shown, AXES[name], varied)
        has_links = any(result.workers_bytes_per_s or result.cell["bandwidth"] for _, row in series for result in row)
        for kind, make in (("carried", _carried), ("step_time", _step_time), ("peak", _peak)):
            if kind in kinds and (kind != "carried" or has_links):
                charts.append(make(series, AXES[name]))
    return charts


def _along(results: Sequence[CellResult], varied: Sequence[str]) -> list[str]:
    """Returns the axes over which charts are drawn: where there are others, not those of only two values.

    The two values of such an axis are lines of the other charts.
    """
    if not results:
        return []
    long = [name for name in varied if len({result.cell[name] for result in results}) > _PAIR]
    return long or list(varied[:1])


def positions(axis: Axis, values: Sequence[Value]) -> dict[Value, float]:
    """Returns where the values of an axis are, in units of the chart.

    A value that means unlimited is placed as far after the largest other value as that is after the one before.
    """
    ordered = sorted(set(values), key=lambda value: _order(axis, value))
    if axis.scale == "names":
        return {value: float(number) for number, value in enumerate(ordered)}
    finite = [value for value in ordered if not (axis.unlimited_last and not value)]
    numbers = {value: float(value) for value in finite}
    if axis.scale == "log":
        numbers = {value: math.log10(number) for value, number in numbers.items()}
    if len(finite) < len(ordered):
        last = [numbers[value] for value in finite[-2:]]
        gap = last[-1] - last[0] if len(last) > 1 else 1.0
        numbers[ordered[-1]] = (last[-1] if last else 0.0) + max(gap, 0.1)
    return numbers


def _order(axis: Axis, value: Value) -> tuple[bool, Any]:
    if axis.scale == "names":
        return (False, str(value))
    return (axis.unlimited_last and not value, float(value))


def _series(results: Sequence[CellResult], axis: Axis, varied: Sequence[str]) -> Series:
    """Returns the results along an axis, sorted, one list for each combination of the other varied axes."""
    others = [name for name in varied if name != axis.name]
    groups: dict[str, list[CellResult]] = {}
    for result in results:
        groups.setdefault(result.cell.shown(others) if others else "", []).append(result)
    return [
        (name, sorted(row, key=lambda result: _order(axis, result.cell[axis.name]))) for name, row in groups.items()
    ]


def _ticks(series: Series, axis: Axis) -> tuple[dict[Value, float], list[tuple[float, str]]]:
    values = [result.cell[axis.name] for _, row in series for result in row]
    at = positions(axis, values)
    return at, [(x, axis.show(value)) for value, x in at.items()]


def _named(what: str, name: str) -> str:
    return f"{what}, {name}" if name else what


def _step_time(series: Series, axis: Axis) -> ReportChart:
    at, ticks = _ticks(series, axis)
    lines: list[ChartLine] = [
        ChartLine(NONE, GREY, [ChartPoint(x, 1.0) for x, _ in ticks], "2 4", has_marks=len(ticks) == 1)
    ]
    for shared, rows in _same_baseline(series, axis):
        torch_points = []
        for value, x in at.items():
            ratios = [
                result.torch_over_none.value
                for result in rows
                if result.cell[axis.name] == value and result.torch_over_none is not None
            ]
            if ratios:
                middle = Spread.of(ratios).value
                torch_points.append(ChartPoint(x, middle))
        if torch_points:
            name = _named(f"{TORCH} (break-even)", shared)
            lines.append(ChartLine(name, DARK, torch_points, "8 4", has_marks=len(torch_points) == 1))
    for color, (name, row) in zip(_colors(), series, strict=False):
        lines.append(
            ChartLine(_named(BACKHAUL, name), color, _measured(row, at, axis, lambda result: result.over_none))
        )
    chart = LineChart(
        f"Step time over {axis.label}",
        axis.label,
        "step time (without checkpointing = 1)",
        ticks,
        lines,
    )
    heading = f"Step time by {axis.label.split(';')[0]}"
    return ReportChart(f"step-time-{axis.name.replace('_', '-')}", heading, chart, step_sentence(series, axis))


def _measured(
    row: Sequence[CellResult],
    at: dict[Value, float],
    axis: Axis,
    value: Callable[[CellResult], Spread | None],
) -> list[ChartPoint]:
    points = []
    for result in row:
        spread = value(result)
        if spread is not None:
            x = at[result.cell[axis.name]]
            points.append(ChartPoint(x, spread.value, spread.low, spread.high, result.is_core_bound))
    return points


def step_sentence(series: Series, axis: Axis) -> str:
    """Returns what the chart of step times shows."""
    texts = []
    for name, row in series:
        usable = [result for result in row if result.over_torch is not None and not result.is_core_bound]
        if not usable:
            continue
        prefix = f"With {name}: " if name else ""
        if any(result.disturbed for result in usable):
            prefix += f"{'as' if prefix else 'As'} far as a disturbed measurement shows, "
        texts.append(prefix + _range_sentence(usable, axis, is_first=not prefix))
    bound = [result for _, row in series for result in row if result.is_core_bound]
    if bound:
        texts.append(
            f"Hollow points ({len(bound)}) are core-bound: their nodes were not held to their shares of a core, so "
            "they say nothing about scaling."
        )
    return " ".join(texts) or "No cell along this axis could be measured."


def _range_sentence(usable: Sequence[CellResult], axis: Axis, *, is_first: bool) -> str:
    first, last = usable[0], usable[-1]
    ratio = {result.cell.number: result.over_torch.value for result in usable if result.over_torch is not None}
    what = "A step with Backhaul" if is_first else "a step with Backhaul"

    def at(result: CellResult) -> str:
        return f"with {axis.said(result.cell[axis.name])}"

    def compared(result: CellResult) -> str:
        return f"takes {ratio[result.cell.number]:.2f} times as long as one with {TORCH}"

    if len(usable) == 1:
        return f"{what} {compared(first)}."
    sentence = f"{what} {compared(first)} {at(first)}, and {ratio[last.cell.number]:.2f} times {at(last)}. "
    lowest, highest = min(ratio.values()), max(ratio.values())
    if lowest >= 1 - _EQUAL and highest <= 1 + _EQUAL:
        return f"{sentence}It stays close to {TORCH}."
    crossings = break_even(usable, axis)
    if crossings:
        places = " and ".join(f"between {low} and {high}" for low, high in crossings)
        return f"{sentence}It breaks even with {TORCH} {places}."
    if highest < 1 - _EQUAL:
        return f"{sentence}It is faster than {TORCH} everywhere in this range."
    if lowest > 1 + _EQUAL:
        return f"{sentence}It is slower than {TORCH} everywhere in this range."
    if lowest < 1 - _EQUAL:
        return f"{sentence}It is nowhere slower than {TORCH} in this range."
    return f"{sentence}It is nowhere faster than {TORCH} in this range."


def break_even(usable: Sequence[CellResult], axis: Axis) -> list[tuple[str, str]]:
    """Returns the neighbouring values between which Backhaul changes from slower to faster than torch, or back."""
    crossings = []
    for one, other in pairwise(usable):
        assert one.over_torch is not None
        assert other.over_torch is not None
        if (one.over_torch.value - 1) * (other.over_torch.value - 1) < 0:
            crossings.append((axis.said(one.cell[axis.name]), axis.said(other.cell[axis.name])))
    return crossings


def _peak(series: Series, axis: Axis) -> ReportChart:
    at, ticks = _ticks(series, axis)
    lines = []
    names = {"none": (NONE, GREY, "2 4"), "torch": (TORCH, DARK, "8 4")}
    for shared, rows in _same_baseline(series, axis):
        for variant, (label, color, dash) in names.items():
            points = _peaks(rows, at, axis, variant)
            lines.append(ChartLine(_named(label, shared), color, points, dash, has_marks=len(points) == 1))
    for color, (name, row) in zip(_colors(), series, strict=False):
        lines.append(ChartLine(_named(BACKHAUL, name), color, _peaks(row, at, axis, "backhaul")))
    chart = LineChart(
        f"Peak memory over {axis.label}",
        axis.label,
        "peak of the trainer (MB)",
        ticks,
        [line for line in lines if line.points],
    )
    saved = [
        1 - result.peak_bytes["backhaul"] / result.peak_bytes["none"]
        for _, row in series
        for result in row
        if result.peak_bytes is not None
    ]
    beside = [
        result.peak_bytes["backhaul"] / result.peak_bytes["torch"]
        for _, row in series
        for result in row
        if result.peak_bytes is not None
    ]
    if min(saved) < -_EQUAL:
        needed = _times([1 - share for share in saved])
        sentence = (
            f"With Backhaul the peak of the trainer's activations and gradients is {needed} that without "
            f"checkpointing, and {_times(beside)} that with {TORCH}."
        )
    elif max(saved) < _EQUAL:
        sentence = "All variants need the same memory, because the activations of this model are small."
    else:
        sentence = (
            f"With Backhaul the peak of the trainer's activations and gradients is {_percent(saved)} below that "
            f"without checkpointing, and {_times(beside)} that with {TORCH}."
        )
    if len(series) > 1 and max(beside) - min(beside) < _EQUAL:
        sentence += " The lines of Backhaul coincide."
    return ReportChart(f"peak-{axis.name.replace('_', '-')}", f"Memory by {axis.label.split(';')[0]}", chart, sentence)


def _peaks(row: Sequence[CellResult], at: dict[Value, float], axis: Axis, variant: str) -> list[ChartPoint]:
    """Returns the peaks of a variant along an axis, the largest of the results with the same value of it."""
    megabytes: dict[float, float] = {}
    for result in row:
        if result.peak_bytes is not None:
            x = at[result.cell[axis.name]]
            megabytes[x] = max(megabytes.get(x, 0.0), result.peak_bytes[variant] / _MEGABYTE)
    return [ChartPoint(x, peak) for x, peak in sorted(megabytes.items())]


def _same_baseline(series: Series, axis: Axis) -> Series:
    """Returns the results along an axis, one list for all that train the same, so that they have the same baseline.

    Workers, links and what travels on them do not change a step without Backhaul.
    """
    rows = [result for _, row in series for result in row]
    own = [name for name in _OF_TRAINING if name != axis.name and len({result.cell[name] for result in rows}) > 1]
    groups: dict[str, list[CellResult]] = {}
    for result in rows:
        groups.setdefault(result.cell.shown(own) if own else "", []).append(result)
    return list(groups.items())


def _percent(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0%}" if high - low < _EQUAL else f"{low:.0%} to {high:.0%}"


def _times(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f} times" if high - low < _EQUAL else f"{low:.2f} to {high:.2f} times"


def _carried(series: Series, axis: Axis) -> ReportChart:
    at, ticks = _ticks(series, axis)
    lines = []
    has_devices = any(result.workers_bytes_per_s for _, row in series for result in row)
    for color, (name, row) in zip(_colors(), series, strict=False):
        rows: tuple[tuple[str, str, Callable[[CellResult], float]], ...] = (
            (
                ("trainers' devices", "", lambda result: result.trainers_bytes_per_s),
                ("workers' devices", "3 3", lambda result: result.workers_bytes_per_s),
            )
            if has_devices
            else (("sessions", "", lambda result: result.carried_bytes_per_s),)
        )
        for side, dash, value in rows:
            points = [
                ChartPoint(at[result.cell[axis.name]], rate, is_hollow=result.is_core_bound)
                for result in row
                if (rate := value(result) / _MEGABYTE)
            ]
            lines.append(ChartLine(_named(side, name), color, points, dash))
    chart = LineChart(f"Bytes carried over {axis.label}", axis.label, "carried, both directions (MB/s)", ticks, lines)
    heading = f"Bytes carried by {axis.label.split(';')[0]}"
    return ReportChart(f"carried-{axis.name.replace('_', '-')}", heading, chart, carried_sentence(series, axis))


def carried_sentence(series: Series, axis: Axis) -> str:
    """Returns what the chart of carried bytes shows."""
    texts = []
    for name, row in series:
        usable = [result for result in row if result.carried_bytes_per_s and not result.is_core_bound]
        if len(usable) < 2:  # noqa: PLR2004
            continue
        first, last = usable[0], usable[-1]

        def grown(value: Callable[[CellResult], float], first: CellResult = first, last: CellResult = last) -> float:
            return value(last) / value(first) if value(first) else 0.0

        values = f"{axis.said(first.cell[axis.name])} to {axis.said(last.cell[axis.name])}"
        prefix = f"With {name}, from" if name else "From"
        trainers, workers = (grown(lambda r: r.trainers_bytes_per_s), grown(lambda r: r.workers_bytes_per_s))
        if trainers:
            texts.append(
                f"{prefix} {values}, the links carry {trainers:.2f} times as many bytes per second as the trainers' "
                f"devices count them, and {workers:.2f} times as the workers' devices do."
            )
        else:
            carried = grown(lambda r: r.carried_bytes_per_s)
            texts.append(f"{prefix} {values}, the sessions carry {carried:.2f} times as many bytes per second.")
    return " ".join(texts) or "Too few cells were measured to compare them."


def _timeline(result: CellResult, events: Sequence[dict[str, Any]]) -> ReportChart | None:
    """Returns the chart of single steps around the events of a cell, None if it was not measured."""
    if not result.timeline:
        return None
    count = max(map(len, result.timeline))
    lines = [
        ChartLine(NONE, GREY, [ChartPoint(x, 1.0) for x in (0.0, count - 1.0)], "2 4", has_marks=False),
    ]
    if result.torch_over_none is not None:
        ratio = result.torch_over_none.value
        ends = [ChartPoint(x, ratio) for x in (0.0, count - 1.0)]
        lines.append(ChartLine(TORCH, DARK, ends, "8 4", has_marks=False))
    for color, (number, steps) in zip(_colors(), enumerate(result.timeline, start=1), strict=False):
        points = [ChartPoint(float(x), y) for x, y in enumerate(steps)]
        lines.append(ChartLine(f"{BACKHAUL}, repeat {number}", color, points))
    sentence, heading = loss_sentence(result, events), f"Single steps ({_cell_name(result)})"
    marks = [(float(event["at_step"]), f"worker {event['kill_worker']} is killed") for event in events]
    chart = LineChart(
        "Single steps around the loss of a worker",
        "timed step",
        "step time (without checkpointing = 1)",
        [(float(x), str(x)) for x in range(count)],
        lines,
        marks,
    )
    heading = f"Single steps ({_cell_name(result)})"
    return ReportChart(f"steps-cell-{result.cell.number}", heading, chart, sentence)


def _cell_name(result: CellResult) -> str:
    return AXES["workers"].said(result.cell["workers"])


def loss_sentence(result: CellResult, events: Sequence[dict[str, Any]]) -> str:
    """Returns what happened to the steps when a worker was killed."""
    places = sorted({event["at_step"] for event in events})
    first, last = places[0], places[-1]
    before = [step for steps in result.timeline for step in steps[:first]]
    after = [step for steps in result.timeline for step in steps[last + 1 :]]
    parts: list[str] = []
    for at in places:
        lost = [steps[at] for steps in result.timeline if len(steps) > at]
        if not lost:
            continue
        killed = sum(event["at_step"] == at for event in events)
        who = "A worker is" if killed == 1 else f"{killed} workers are"
        parts.append(
            f"{who if not parts else who.replace('A', 'a')} killed in the middle of step {at}, which then takes "
            f"{Spread.of(lost).value:.2f} times as long as a step without checkpointing"
        )
    if before:
        parts.append(
            f"steps before {'it' if first == last else 'them'} take {Spread.of(before).value:.2f} times as long"
        )
    if after:
        parts.append(f"those after {'it' if first == last else 'them'} {Spread.of(after).value:.2f} times")
    return f"{'; '.join(parts)}. The training loop goes on, and all gradients are equal to the last bit."


def _colors() -> Iterator[str]:
    while True:
        yield from COLORS
