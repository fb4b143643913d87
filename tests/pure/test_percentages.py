"""Percentages have one format in all that the dashboard and `backhaul top` write."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import backhaul_server
from backhaul_server.dashboard.collect.percentages import in_percent

SERVER = Path(backhaul_server.__file__).parent
SCRIPTS = SERVER / "dashboard" / "static" / "js"


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0 %"),
        (1e-9, "0.1 %"),
        (0.0104, "1 %"),
        (0.02, "2 %"),
        (0.0365, "3.7 %"),
        (0.1225, "12.3 %"),
        (0.3, "30 %"),
        (0.9983, "99.8 %"),
        (0.99999, "99.9 %"),
        (1.0, "100 %"),
        (1.275, "127.5 %"),
    ],
)
def test_a_percentage_has_at_most_one_decimal_and_a_space(share: float, shown: str) -> None:
    assert in_percent(share) == shown


def own_formats(source: Path) -> Iterator[str]:
    """Yields strings and format specifications, such as ".1%", that write a percent sign without a space before it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\d%|^%$", node.value):
            yield f"{source.name}:{node.lineno}: {node.value}"


def test_no_module_of_the_server_formats_percentages_by_itself() -> None:
    assert [one for source in sorted(SERVER.rglob("*.py")) for one in own_formats(source)] == []


def test_no_script_of_the_page_formats_percentages_by_itself() -> None:
    found_in = {
        script.name
        for script in SCRIPTS.glob("*.js")
        if script.name != "format.js" and re.search(r"\} ?%|\d%(?!\")|\"%", script.read_text())
    }
    assert found_in == set()


def test_the_search_for_other_formats_sees_them(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('print(f"{share:.1%} of it", f"{share:{width}.0%}", f"{share:%}", "at 80% and 80 %")\n')
    assert len(list(own_formats(module))) == 4
