"""docs/measured.md has the values of the raw files, other pages have no dates, and limits follow from the formulas."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backhaul import _arithmetic as arithmetic

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/measured.md"
DEMO = ROOT / "lab/results/2026-11-28-xeon-2-cores-demo.json"
MONTHS = "January February March April May June July August September October November December"
DATE = re.compile(rf"\b\d{{1,2}} (?:{MONTHS.replace(' ', '|')})\b")
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/integrations").glob("*.md")]
DATED = {"measured.md", "compatibility.md"}
"""Pages that say when something was measured; the others link to the first."""


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """The cells of all rows of tables below a heading, heads included."""
    section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_each_figure_has_the_value_of_its_raw_file() -> None:
    compared = 0
    for name, value, half, verdict, *_, raw in (row for row in rows(MEASURED, "The bench") if len(row) == 6):
        link = re.search(r"\]\((.+\.json)\)", raw)
        if link is None:  # the table's head
            continue
        figure = json.loads((MEASURED.parent / link[1]).read_text())["figures"][name.strip("`")]
        low, high = figure["low"], figure["high"]
        assert value == f"{figure['value']:.2f}", name
        assert half == ("" if low == high else f"{low:.2f} to {high:.2f}"), name
        assert verdict == figure["verdict"], name
        compared += 1
    assert compared > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_one_page_says_when_something_was_measured(page: Path) -> None:
    assert page.name in DATED or DATE.findall(page.read_text(encoding="utf-8")) == []


def demo() -> Iterator[tuple[dict[str, Any], str, str]]:
    """The variants of the demo's raw file, each with its time and its peak as the pages write them."""
    for variant in json.loads(DEMO.read_text())["variants"]:
        yield variant, f"{variant['median_step_s'] * 1000:,.0f} ms", f"{variant['peak_bytes'] / 2**20:.1f} MiB"


def test_the_demos_table_has_the_values_of_its_raw_file() -> None:
    table = list(rows(ROOT / "docs/should-i-use-it.md", "What was measured"))[2:]
    assert [row[1:3] for row in table] == [[step, peak] for _, step, peak in demo()]
    assert all(variant["gradients_equal"] and variant["losses_equal"] for variant, *_ in demo())


def test_the_readme_has_the_values_of_the_demos_raw_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    times = re.findall(r"(\d\.\d\d) s ", re.search(r"\*\*Time of a step\*\*.*", text)[0])  # type: ignore[index]
    measured = {variant["name"]: f"{variant['median_step_s']:.2f}" for variant, *_ in demo()}
    assert times == [
        measured[name] for name in ("no checkpointing", "torch checkpoint", "backhaul gradients", "backhaul deferred")
    ]


def test_limits_beside_other_methods_follow_from_the_formulas() -> None:
    backward, recording, micro_batches = arithmetic.LORA_BACKWARD, 0.05, 8
    speeds = (0.3, 1.0, 3.0)
    shared = [arithmetic.data_parallel_ratio(speed, 0, 1, 1, 0) for speed in speeds]
    expected = [
        shared,
        [ratio * (1 + 1 / micro_batches) for ratio in shared],
        [arithmetic.deferred_ratio(speed, backward, recording) for speed in speeds],
        [arithmetic.blocking_ratio(speed, backward, recording) for speed in speeds],
    ]
    table = list(rows(ROOT / "docs/compared.md", "Calculated: two machines, LoRA on Llama-3-8B"))[2:]
    assert [row[1:] for row in table] == [[f"{ratio:.2f}" for ratio in ratios] for ratios in expected]
