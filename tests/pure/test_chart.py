"""Charts as SVG."""

import re
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from backhaul_lab.harness.chart import WIDTH, ChartLine, ChartPoint, LineChart, draw, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def chart_of(points: list[tuple[float, float]], name: str = "line", high: float | None = None) -> LineChart:
    line = ChartLine(name, "#000", [ChartPoint(x, y, y, y * 1.5) for x, y in sorted(points)])
    ticks = [(x, f"{x:g}") for x, _ in sorted(points)]
    return LineChart(name, name, "y", ticks, [line], [(points[0][0], "here")], high)


@given(st.floats(1e-6, 1e12))
def test_ticks_cover_the_values_and_are_few(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), min_size=1, max_size=12),
    st.text(max_size=40),
    st.sampled_from([(1, WIDTH), (3, 380)]),
)
def test_charts_are_xml_and_nothing_is_outside(
    points: list[tuple[float, float]], name: str, shape: tuple[int, int]
) -> None:
    count, width = shape
    name = re.sub(r"[^\x20-\x7e]", "?", name)
    root = ElementTree.fromstring(draw([chart_of(points, name)] * count, width))
    _, _, across, height = map(float, root.attrib["viewBox"].split())
    panels = root.findall(f"{SVG}svg")
    assert across == count * width
    assert [float(panel.attrib["x"]) for panel in panels] == [number * width for number in range(count)]
    for part, most in ((root, across), *((panel, float(width)) for panel in panels)):
        for element in part if part is root else part.iter():
            for key, limit in (("cx", most), ("cy", height), ("x", most), ("y", height)):
                if key in element.attrib and element is not part:
                    assert -1e-6 <= float(element.attrib[key]) <= limit + 1e-6


def test_values_above_the_highest_of_the_axis_are_drawn_at_its_top() -> None:
    root = ElementTree.fromstring(draw([chart_of([(0.0, 1.0), (1.0, 2.0), (2.0, 50.0), (3.0, 80.0)], high=2.5)]))
    heights = [float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle")][:4]
    assert all(one > other for one, other in pairwise(heights[:3]))
    assert heights[2] == heights[3]


def test_points_that_are_no_numbers_are_left_out() -> None:
    points = [ChartPoint(x, y) for x, y in ((0.0, float("nan")), (1.0, float("inf")), (2.0, 2.0))]
    ticks = [(x, str(x)) for x in (0.0, 1.0, 2.0)]
    drawn = draw([LineChart("title", "x", "y", ticks, [ChartLine("line", "#000", points)])])
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert drawn.count('r="4"') == 1


def test_a_name_that_is_too_long_for_the_legend_is_drawn_narrower() -> None:
    line = ChartLine("a name " * 20, "#000", [ChartPoint(0.0, 1.0)])
    assert 'lengthAdjust="spacingAndGlyphs"' in draw([LineChart("title", "x", "y", [(0.0, "0")], [line])])
