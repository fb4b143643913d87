"""docs/calculator.html and docs/arithmetic.md are what the formulas say."""

from itertools import dropwhile, takewhile
from math import ceil
from pathlib import Path

import pytest

from backhaul import _arithmetic as arithmetic
from contract.generate_calculator import INPUTS, OUTPUTS, PAGE, _formulas, calculate, page

ARITHMETIC = PAGE.with_name("arithmetic.md")
SCALE = PAGE.with_name("scale.md")
RACK_WORKERS, RACK_GBIT_PER_S = 40, 100.0
"""A rack in the tables of docs/scale.md: its workers, and its link."""


def test_the_calculator_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_each_formula_has_a_derivation() -> None:
    text = ARITHMETIC.read_text(encoding="utf-8")
    assert [name for name in _formulas() if f"`{name}`" not in text] == []


def test_the_example_of_the_page_is_that_of_the_calculator() -> None:
    outputs = calculate({field.name: field.default for field in INPUTS})
    text = " ".join(ARITHMETIC.read_text(encoding="utf-8").split())
    assert f"{outputs['threshold']:.2f}" in text
    assert f"{outputs['deferred']:.2f}" in text


def table_below(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of docs/scale.md, without its head."""
    section = SCALE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    lines = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: line[:1] != "|", section.splitlines()))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def example(gbit_per_s: float = 10.0) -> tuple[dict[str, float], float]:
    """The outputs of the calculator's example over a link, and the sessions that the link of a rack carries."""
    outputs = calculate({field.name: field.default for field in INPUTS} | {"bytes_per_s": gbit_per_s})
    sent = arithmetic.link_bytes(outputs["boundary_bytes"], outputs["segments"], 1, 8, outputs["trained_bytes"])
    return outputs, arithmetic.sessions_per_link(sent, outputs["torch_s"], RACK_GBIT_PER_S * 1.25e8)


def test_what_each_worker_serves_follows_from_the_formulas() -> None:
    rows = table_below("Trainers that wait")
    assert len(rows) == 4
    for link, *said, binds in rows:
        outputs, rack = example(float(link.removesuffix(" Gbit/s")))
        sessions_by = {
            "core": outputs["core_sessions"],
            "worker's link": outputs["link_sessions"],
            "rack's link": rack / RACK_WORKERS,
        }
        assert said == [f"{sessions:.2f}" for sessions in sessions_by.values()]
        assert binds == min(sessions_by, key=lambda resource: sessions_by[resource])


def test_what_binds_from_one_worker_to_ten_thousand_follows_from_the_formulas() -> None:
    outputs, rack = example()
    rows = table_below("From one worker to 10,000")
    assert [row[0] for row in rows] == ["1", "10", "100", "1,000", "10,000"]
    for number, *said, binds, cores in rows:
        workers = int(number.replace(",", ""))
        sessions_by = {
            "workers' cores": int(workers * outputs["core_sessions"]),
            "workers' links": int(workers * outputs["link_sessions"]),
            "racks' links": int(ceil(workers / RACK_WORKERS) * rack),
        }
        assert said == [f"{sessions:,}" for sessions in sessions_by.values()]
        assert binds == min(sessions_by, key=lambda resource: sessions_by[resource])
        assert cores == f"{arithmetic.dashboard_cores(workers, min(sessions_by.values())):.2f}"


def test_the_table_of_blocks_follows_from_the_formula() -> None:
    rows = table_below("Accumulation blocks")
    assert len(rows) == 5
    for workers, *said in rows:
        backwards = (arithmetic.LORA_BACKWARD, arithmetic.FULL_BACKWARD)
        assert said == [f"{arithmetic.deferred_ratio(float(workers), backward, 0.05):.2f}" for backward in backwards]


def test_a_formula_that_cannot_be_translated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "arithmetic.py"
    module.write_text('def power(x: float) -> float:\n    """Returns a power."""\n    return x ** 2\n')
    monkeypatch.setattr(arithmetic, "__file__", str(module))
    with pytest.raises(ValueError, match=r"x \*\* 2 cannot be translated"):
        page()


def test_names_are_unique() -> None:
    names = [one.name for one in (*INPUTS, *OUTPUTS)]
    assert len({*names}) == len(names)
