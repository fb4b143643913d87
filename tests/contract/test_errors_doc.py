"""docs/errors.md is complete, and says of each error what the code says."""

import builtins
import re

import pytest

import backhaul
from backhaul import BackhaulError
from backhaul_runtime.errors import STATUS_NAMES
from contract.test_layout import ROOT

PAGE = (ROOT / "docs/errors.md").read_text()
ROWS = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (.+?) \| (.*?) ?\|$", PAGE, re.MULTILINE)
ERRORS = {
    name: kind
    for name in backhaul.__all__
    if isinstance(kind := getattr(backhaul, name), type) and issubclass(kind, BackhaulError)
}


def called(kind: type) -> str:
    """What people call a class: with its module where it is neither Python's nor ours."""
    is_plain = kind.__module__ == "builtins" or kind in ERRORS.values()
    return kind.__name__ if is_plain else f"{kind.__module__}.{kind.__name__}"


def test_each_error_has_a_row_and_a_section_and_there_are_no_others() -> None:
    assert [name for name, *_ in ROWS] == re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert sorted(name for name, *_ in ROWS) == sorted(ERRORS)


@pytest.mark.parametrize(("name", "anchor", "bases", "status"), ROWS, ids=[name for name, *_ in ROWS])
def test_a_row_agrees_with_the_code(name: str, anchor: str, bases: str, status: str) -> None:
    kind = ERRORS[name]
    assert anchor == name.lower()
    assert bases == ", ".join(f"`{called(base)}`" for base in kind.__bases__)
    assert status == (f"`{STATUS_NAMES[kind]}`" if kind in STATUS_NAMES else "")


def test_errors_named_in_passing_exist() -> None:
    assert {name for name in re.findall(r"`(\w+Error)`", PAGE) if not hasattr(builtins, name)} <= set(ERRORS)
