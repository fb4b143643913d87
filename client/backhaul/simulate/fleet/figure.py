"""Draws panels of lines as SVG with the standard library alone. Colours follow the reader's light or dark scheme."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _AXIS, _LINE = 310, 210, 66, 42, 30, 44, 18
_COLUMNS, _MOST_LINES = 2, 8
_LIGHT = ("#1f5fa8", "#c2410c", "#15803d", "#7c3aed", "#b45309", "#0e7490", "#be185d", "#525252")
_DARK = ("#7db7f5", "#fb923c", "#4ade80", "#c4b5fd", "#fbbf24", "#22d3ee", "#f472b6", "#b8b8b8")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "", "6 3", "2 3", "8 3 2 3")
"""Lines also differ in their dashes, for readers who do not see the colours."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class FigurePanel:
    """One chart of a figure.

    Attributes:
        title: Text above the chart.
        x_label: Quantity and unit of the x axis.
        y_label: Quantity and unit of the y axis.
        lines: Points of each line, by its name in the legend; at most eight lines.
        dots: Points that are drawn as circles, by their name in the legend.
        has_log_x: Whether the x axis is logarithmic.
        has_log_y: Whether the y axis is logarithmic.
        low: Lowest value of the y axis; None for the lowest point's.
        high: Highest value of the y axis; None for the highest point's.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    dots: Mapping[str, Points] = field(default_factory=dict)
    has_log_x: bool = True
    has_log_y: bool = True
    low: float | None = None
    high: float | None = None


def draw_figure(panels: Sequence[FigurePanel], description: str) -> str:
    """Returns panels, two beside each other, as an SVG document.

    Args:
        panels: The panels, row by row from left to right.
        description: What the figure shows, for readers who do not see it.
    """
    rows = [panels[first : first + _COLUMNS] for first in range(0, len(panels), _COLUMNS)]
    heights = [_TOP + _HEIGHT + _AXIS + _LINE * max(len(p.lines) + len(p.dots) for p in row) + 12 for row in rows]
    width, height = min(_COLUMNS, len(panels)) * (_LEFT + _WIDTH + _RIGHT), sum(heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(description)}</title>",
        _style(),
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for number, row in enumerate(rows):
        parts.append(f'<g transform="translate(0 {sum(heights[:number])})">')
        for column, panel in enumerate(row):
            parts += _draw_panel(panel, column * (_LEFT + _WIDTH + _RIGHT) + _LEFT)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style() -> str:
    def colors(values: Sequence[str]) -> str:
        return "".join(f".l{i}{{stroke:{color}}}.d{i}{{fill:{color}}}" for i, color in enumerate(values))

    return (
        "<style>.paper{fill:#fff}text{fill:#1f2328}.grid{stroke:#d8dee4}.frame{stroke:#6e7781;fill:none}"
        f".line{{fill:none;stroke-width:2}}{colors(_LIGHT)}"
        "@media(prefers-color-scheme:dark){.paper{fill:#0d1117}text{fill:#e6edf3}.grid{stroke:#30363d}"
        f".frame{{stroke:#8b949e}}{colors(_DARK)}}}</style>"
    )


def _draw_panel(panel: FigurePanel, left: int) -> list[str]:
    all_points = [point for points in (*panel.lines.values(), *panel.dots.values()) for point in points]
    finite = [(x, y) for x, y in all_points if isfinite(y) and (y > 0 or not panel.has_log_y)]
    x_first, x_last = min(x for x, _ in finite), max(x for x, _ in finite)
    low = min(y for _, y in finite) if panel.low is None else panel.low
    high = max(y for _, y in finite) if panel.high is None else panel.high
    if panel.low is None or panel.high is None:
        low, high = _widened(low, high, is_log=panel.has_log_y)
    x_of = _axis(x_first, x_last, left, left + _WIDTH, is_log=panel.has_log_x)
    y_of = _axis(low, high, _TOP + _HEIGHT, _TOP, is_log=panel.has_log_y)
    parts = [f'<text x="{left - _LEFT + 10}" y="20" font-size="13" font-weight="600">{escape(panel.title)}</text>']
    for value in _ticks(low, high, is_log=panel.has_log_y):
        y = y_of(value)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{_WIDTH}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value in _ticks(x_first, x_last, is_log=panel.has_log_x):
        x = x_of(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}v{_HEIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{_short(value)}</text>')
    parts.append(f'<rect class="frame" x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>')
    middle = _TOP + _HEIGHT // 2
    parts.append(
        f'<text x="{left + _WIDTH // 2}" y="{_TOP + _HEIGHT + 34}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    turned = f'transform="translate({left - 48} {middle}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{escape(panel.y_label)}</text>")
    legend_y = _TOP + _HEIGHT + _AXIS + 12

    def inside(points: Points) -> list[tuple[float, float]]:
        top = high * (1 + 1e-9)
        return [(x_of(x), y_of(min(max(y, low), top))) for x, y in points if isfinite(y)]

    for i, (name, points) in enumerate(panel.lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside(points))
        dash = f' stroke-dasharray="{_DASHES[i]}"' if _DASHES[i] else ""
        parts.append(f'<polyline class="line l{i}"{dash} points="{path}"/>')
        parts.append(f'<path class="line l{i}"{dash} d="M{left} {legend_y - 4}h26"/>')
        parts.append(f'<text x="{left + 34}" y="{legend_y}">{escape(name)}</text>')
        legend_y += _LINE
    for i, (name, points) in enumerate(panel.dots.items(), start=len(panel.lines)):
        shape = '<circle class="d{}" cx="{:.1f}" cy="{:.1f}" r="4"/>'
        parts += [shape.format(i % _MOST_LINES, x, y) for x, y in [*inside(points), (left + 13, legend_y - 4)]]
        parts.append(f'<text x="{left + 34}" y="{legend_y}">{escape(name)}</text>')
        legend_y += _LINE
    return parts


def _widened(low: float, high: float, *, is_log: bool) -> tuple[float, float]:
    """Returns the limits of an axis that leave some room around the points."""
    if is_log:
        return low / 1.3, high * 1.3
    room = 0.06 * (high - low or abs(high) or 1.0)
    return (0.0 if 0 <= low < 0.3 * high else low - room), high + room


def _axis(first: float, last: float, begin: float, end: float, *, is_log: bool) -> Callable[[float], float]:
    def of(value: float) -> float:
        return log10(value) if is_log else value

    spread = of(last) - of(first) or 1.0
    return lambda value: begin + (end - begin) * (of(value) - of(first)) / spread


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if is_log:
        powers = range(floor(log10(low)), ceil(log10(high)) + 1)
        decades = log10(high / low)
        steps = (1,) if decades > 2 else (1, 2, 5) if decades > 1 else range(1, 10)  # noqa: PLR2004
        every = 2 if log10(high / low) > 7 else 1  # noqa: PLR2004
        return [
            step * 10.0**power
            for power in powers
            if power % every == 0
            for step in steps
            if low * (1 - 1e-9) <= step * 10.0**power <= high * (1 + 1e-9)
        ]
    raw = (high - low) / 5
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """Returns a number with at most three digits and a prefix, as in 2.5M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{prefix}"
    return f"{value:.3g}"
