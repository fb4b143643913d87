"""docs/calculator.html and docs/arithmetic.md are what the formulas say."""

from pathlib import Path

import pytest

from backhaul import _arithmetic as arithmetic
from contract.generate_calculator import INPUTS, OUTPUTS, PAGE, _formulas, calculate, page

ARITHMETIC = PAGE.with_name("arithmetic.md")


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


def test_a_formula_that_cannot_be_translated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "arithmetic.py"
    module.write_text('def power(x: float) -> float:\n    """Returns a power."""\n    return x ** 2\n')
    monkeypatch.setattr(arithmetic, "__file__", str(module))
    with pytest.raises(ValueError, match=r"x \*\* 2 cannot be translated"):
        page()


def test_names_are_unique() -> None:
    names = [one.name for one in (*INPUTS, *OUTPUTS)]
    assert len({*names}) == len(names)
