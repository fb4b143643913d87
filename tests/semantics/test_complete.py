"""Each numbered statement and each lettered case has a test."""

import re
from pathlib import Path

STATEMENTS = [*map(str, range(1, 42)), *"abcdefghijklmnopq"]


def test_each_statement_and_each_case_has_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"^def test_(?:s(?=\d)|case_(?=[a-q]_))(\d+|[a-q])_", tests, re.MULTILINE))
    assert tested == set(STATEMENTS)
