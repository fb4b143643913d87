"""Draws line charts as SVG with the standard library alone. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 20, 62
_LEGEND_ROW, _LEGEND_GAP, _CHARACTER = 22, 26, 6.6
COLORS = ("#1f6feb", "#b45309", "#0f766e", "#a21caf", "#b91c1c", "#4d7c0f")
"""Colours of lines that can be told apart, also by people who do not see red and green apart."""
GREY, DARK = "#6b7280", "#111827"


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A point of a line.

    Attributes:
        x: Position of the point, in units of the axis.
        y: Value of the point.
        low: Lower end of its spread; None if it has none.
        high: Upper end of its spread; None if it has none.
        is_hollow: Whether the point is drawn hollow, because it says nothing about scaling.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    is_hollow: bool = False

    @property
    def values(self) -> tuple[float, ...]:
        """The value and the ends of its spread."""
        return tuple(value for value in (self.y, self.low, self.high) if value is not None)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: What the legend calls it.
        color: Colour of the line, as in "#1f6feb".
        points: The points, from left to right.
        dash: Lengths of dashes and gaps, as in "6 4"; empty for a solid line.
        has_marks: Whether points are marked, with their spread.
    """

    name: str
    color: str
    points: Sequence[ChartPoint]
    dash: str = ""
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class LineChart:
    """A chart.

    Attributes:
        title: What the chart shows, for people who cannot see it.
        x_label: Name of the horizontal axis, with its unit.
        y_label: Name of the vertical axis, with its unit.
        ticks: Position and label of each tick of the horizontal axis.
        lines: The lines, the most important last, so that it is drawn over the others.
        marks: Positions of vertical lines, each with a label.
        high: Highest value of the vertical axis, at which higher ones are drawn. None: the axis fits the values.
    """

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[tuple[float, str]]
    lines: Sequence[ChartLine]
    marks: Sequence[tuple[float, str]] = ()
    high: float | None = None


def nice_ticks(high: float, most: int = 6) -> list[float]:
    """Returns ticks from 0 to at least `high`, at most `most` + 1, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    high = max(high, 1e-9)
    power = 10.0 ** floor(log10(high / most))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if high / (size * power) <= most)
    return [round(step * number, 12) for number in range(ceil(high / step - 1e-9) + 1)]


def draw(charts: Sequence[LineChart], width: int = WIDTH) -> str:
    """Returns charts side by side as one SVG document. Points that are no finite numbers are left out.

    Args:
        charts: The charts, from left to right. They share one legend, which has the lines of the first.
        width: Width of each chart.
    """
    rows = _legend_rows(charts[0].lines, width * len(charts))
    height = HEIGHT + _LEGEND_ROW * len(rows)
    titles = escape("; ".join(chart.title for chart in charts))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(charts)} {height}" role="img" '
        f'aria-label="{titles}" font-family="system-ui, sans-serif" font-size="13" fill="{DARK}">',
        f'<rect width="{width * len(charts)}" height="{height}" fill="#fff"/>',
    ]
    for number, chart in enumerate(charts):
        parts.append(f'<svg x="{number * width}" width="{width}" height="{HEIGHT}">')
        parts += [*_draw_chart(chart, width), "</svg>"]
    return "\n".join([*parts, *_draw_legend(rows, width * len(charts)), "</svg>"]) + "\n"


def _draw_chart(chart: LineChart, width: int) -> list[str]:
    lines = [
        replace(line, points=[point for point in line.points if all(map(isfinite, point.values))])
        for line in chart.lines
    ]
    chart = replace(chart, lines=lines)
    highest = max((max(point.values) for line in chart.lines for point in line.points), default=1.0) * 1.04
    ticks = nice_ticks(highest if chart.high is None else chart.high)
    x_of, y_of = _horizontal(chart, width), _vertical(ticks[-1])
    bottom = HEIGHT - _BOTTOM
    parts = []
    for value in ticks:
        y = y_of(value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{width - _RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{value:g}</text>')
    parts += [
        f'<text x="{x_of(x):.1f}" y="{bottom + 20}" text-anchor="{anchor}">{escape(label)}</text>'
        f'<path d="M{x_of(x):.1f} {bottom}v5" stroke="{GREY}"/>'
        for x, label, anchor in _without_overlaps(chart.ticks, x_of, width)
    ]
    parts.append(f'<path d="M{_LEFT} {bottom}H{width - _RIGHT}" stroke="{GREY}"/>')
    middle = (_LEFT + width - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 16}" text-anchor="middle">{escape(chart.x_label)}</text>')
    center = (_TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(18 {center:.0f}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    for at, label in chart.marks:
        x = x_of(at)
        anchor, shift = ("end", -6) if x > middle else ("start", 6)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#b91c1c" stroke-dasharray="3 3"/>')
        parts.append(
            f'<text x="{x + shift:.1f}" y="{_TOP + 12}" text-anchor="{anchor}" fill="#b91c1c">{escape(label)}</text>'
        )
    for line in chart.lines:
        parts += _draw_line(line, x_of, y_of)
    return parts


def _draw_line(line: ChartLine, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    path = " ".join(f"{x_of(point.x):.1f},{y_of(point.y):.1f}" for point in line.points)
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"{dash}/>']
    if not line.has_marks:
        return parts
    for point in line.points:
        x, y = x_of(point.x), y_of(point.y)
        if (highest := max(point.values)) > (lowest := min(point.values)):
            top, foot = y_of(highest), y_of(lowest)
            bar = f"M{x:.1f} {foot:.1f}V{top:.1f}M{x - 4:.1f} {foot:.1f}h8M{x - 4:.1f} {top:.1f}h8"
            parts.append(f'<path d="{bar}" stroke="{line.color}" stroke-width="1.2" fill="none"/>')
        fill = "#fff" if point.is_hollow else line.color
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{line.color}" stroke-width="1.6"/>'
        )
    return parts


def _legend_rows(lines: Sequence[ChartLine], most: int) -> list[list[tuple[float, ChartLine]]]:
    """Returns the legend's entries in rows that fit the width, each with its position."""
    rows: list[list[tuple[float, ChartLine]]] = [[]]
    x = float(_LEFT)
    for line in lines:
        width = 34 + _CHARACTER * len(line.name)
        if rows[-1] and x + width > most - _RIGHT:
            rows.append([])
            x = float(_LEFT)
        rows[-1].append((x, line))
        x += width + _LEGEND_GAP
    return rows


def _draw_legend(rows: Sequence[Sequence[tuple[float, ChartLine]]], width: int) -> list[str]:
    parts = []
    for number, row in enumerate(rows):
        y = HEIGHT + 6 + number * _LEGEND_ROW
        for x, line in row:
            dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
            parts.append(f'<path d="M{x:.1f} {y - 4}h26" stroke="{line.color}" stroke-width="2"{dash}/>')
            if line.has_marks:
                parts.append(f'<circle cx="{x + 13:.1f}" cy="{y - 4}" r="3.5" fill="{line.color}"/>')
            room = width - _RIGHT - x - 34
            # A name that is too long for a row of its own is drawn narrower, so that nothing of it is cut off.
            narrow = f' textLength="{room:.0f}" lengthAdjust="spacingAndGlyphs"' * (_CHARACTER * len(line.name) > room)
            parts.append(f'<text x="{x + 34:.1f}" y="{y}"{narrow}>{escape(line.name)}</text>')
    return parts


def _horizontal(chart: LineChart, width: int) -> Callable[[float], float]:
    positions = [x for x, _ in chart.ticks] + [point.x for line in chart.lines for point in line.points]
    first, last = min(positions), max(positions)
    inner, across = 24, width - _LEFT - _RIGHT - 48
    if last == first:
        return lambda _: _LEFT + inner + across / 2
    return lambda x: _LEFT + inner + across * (x - first) / (last - first)


def _vertical(high: float) -> Callable[[float], float]:
    height = HEIGHT - _BOTTOM - _TOP
    return lambda value: _TOP + height * (1 - max(0.0, min(value, high)) / high)


def _without_overlaps(
    ticks: Sequence[tuple[float, str]], x_of: Callable[[float], float], width: int
) -> list[tuple[float, str, str]]:
    """Returns the ticks whose labels do not touch the one before, each with its anchor. The last one stays."""
    shown: list[tuple[float, str, str]] = []
    free = 0.0
    for number, (x, label) in enumerate(ticks):
        half = _CHARACTER * len(label) / 2
        is_last = number == len(ticks) - 1
        at = min(x_of(x), width - 2 - half)
        while is_last and shown and at - half < free:
            shown.pop()
            free = x_of(shown[-1][0]) + _CHARACTER * len(shown[-1][1]) / 2 + 8 if shown else 0.0
        if at - half >= free:
            shown.append((x, label, "middle"))
            free = at + half + 8
    return shown
