"""docs/configuration.md is what the code says."""

import re
from dataclasses import fields

from backhaul._cli.typos import variables_of_commands, variables_of_sessions
from backhaul._config import Config
from contract.generate_configuration import PAGE, page


def test_the_page_is_what_make_docs_writes() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_each_setting_has_one_row_and_says_what_it_does() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    variables = [re.findall(r"`(BACKHAUL_\w+)`", " ".join(row[:2])) for row in rows]
    named = [variable for group in variables for variable in group]
    assert sorted(named) == sorted([*variables_of_sessions(), *variables_of_commands()])
    assert all(len(row) > 2 and len(row[-1]) > 10 for row in rows)


def test_nothing_hidden_is_shown() -> None:
    assert "--parent" not in page()
    assert len(fields(Config)) == page().split("## `backhaul ")[0].count("\n| `")
