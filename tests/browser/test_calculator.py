"""The calculator of the documentation computes what Python computes, in a browser without a network."""

from collections.abc import Iterator
from random import Random

import pytest
from playwright.sync_api import Browser, Page

from contract.generate_calculator import INPUTS, OUTPUTS, PAGE, calculate

pytestmark = pytest.mark.browser


@pytest.fixture
def calculator(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(offline=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(PAGE.as_uri())
    yield page
    context.close()
    assert errors == []


def fields() -> list[dict[str, float]]:
    """The values at first, and random ones from a hundredth of these to a hundred times as much."""
    random = Random(0)
    first = {field.name: field.default for field in INPUTS}
    counts = {"layers", "workers", "segment_layers"}
    others = [
        {
            name: max(1, round(value * 10 ** random.uniform(-1, 1)))
            if name in counts
            else value * 10 ** random.uniform(-2, 2)
            for name, value in first.items()
        }
        for _ in range(20)
    ]
    return [first, *others]


def test_the_page_computes_what_python_computes(calculator: Page) -> None:
    for values in fields():
        computed = calculator.evaluate("fields => calculate(fields)", values)
        assert {output.name: computed[output.name] for output in OUTPUTS} == pytest.approx(calculate(values), rel=1e-12)


def test_a_change_of_a_field_changes_the_results(calculator: Page) -> None:
    before = calculator.locator("#verdict").inner_text()
    assert "A step takes at least 0." in before
    calculator.fill("#worker_flop_per_s", "10")
    assert calculator.locator("#output-speed").inner_text() == "0.09"
    assert calculator.locator("#verdict").inner_text() != before
    calculator.fill("#layers", "")
    assert calculator.locator("#verdict").inner_text() == "Enter a number above 0 in each field."


def test_each_field_has_a_label(calculator: Page) -> None:
    for field in INPUTS:
        assert calculator.get_by_label(field.label, exact=True).input_value() == f"{field.default:g}"
