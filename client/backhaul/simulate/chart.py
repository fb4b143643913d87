"""Draws predictions as SVG with the standard library alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _FOOT = 220, 170, 44, 44, 56, 74
COLORS = ("#2f6fb0", "#c2410c", "#8c8c8c")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ChartPanel:
    """One chart of a row of charts.

    Attributes:
        title: Text above the chart, which names the x axis.
        lines: Points of each line, by its name in the legend.
        ticks: Position and label of each tick on the x axis.
        is_log: Whether the x axis is logarithmic.
    """

    title: str
    lines: Mapping[str, Points]
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False


def draw(panels: Sequence[ChartPanel], low: float, high: float, steps: Sequence[float]) -> str:
    """Returns the charts as an SVG document.

    Args:
        panels: The charts, from left to right. All have lines of the same names.
        low: Lowest value of the shared y axis.
        high: Highest value of the shared y axis.
        steps: Values that are labelled on the y axis.
    """
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_TOP + _HEIGHT + _FOOT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{_TOP + _HEIGHT + _FOOT}" fill="#fff"/>',
    ]

    def y_of(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))

    for number, panel in enumerate(panels):
        left = _LEFT + number * (_WIDTH + _GAP)
        x_of = _scale(panel, left)
        parts.append(f'<text x="{left}" y="{_TOP - 14}" font-size="12">{panel.title}</text>')
        for value in steps:
            y = y_of(value)
            parts.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for at, label in panel.ticks:
            parts.append(f'<text x="{x_of(at):.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{label}</text>')
        for color, points in zip(COLORS, panel.lines.values(), strict=False):
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    x = _LEFT
    for color, name in zip(COLORS, panels[0].lines, strict=False):
        y = _TOP + _HEIGHT + 46
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{y}">{name}</text>')
        x += 40 + 7 * len(name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(panel: ChartPanel, left: float) -> Callable[[float], float]:
    def of(value: float) -> float:
        return log10(value) if panel.is_log else value

    values = [of(x) for points in panel.lines.values() for x, _ in points]
    first, last = min(values), max(values)
    return lambda value: left + _WIDTH * (of(value) - first) / (last - first)
