"""docs/configuration.md and connect() are what the settings say."""

import inspect
import re
import typing
from dataclasses import fields

import pytest

import backhaul
from backhaul._cli.typos import variables_of_commands, variables_of_sessions
from backhaul._config import ARGUMENTS, Config, Settings
from contract.generate_configuration import API, PAGE, api, missing_commands, page

pytestmark = pytest.mark.skipif(
    bool(missing_commands()), reason="the environment lacks commands of the tree: run `make`"
)


def test_the_page_is_what_make_docs_writes() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_each_setting_has_one_row_and_says_what_it_does() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    variables = [re.findall(r"`(BACKHAUL_\w+)`", " ".join(row[:2])) for row in rows]
    named = [variable for group in variables for variable in group]
    assert sorted(named) == sorted([*variables_of_sessions(), *variables_of_commands()])
    assert all(len(row) > 2 and len(row[-1]) > 10 for row in rows)


def test_connect_is_what_make_docs_writes() -> None:
    assert API.read_text() == api(API.read_text()), "run `make docs`"


def test_connect_has_few_arguments_and_they_are_those_of_the_settings() -> None:
    parameters = inspect.signature(backhaul.connect).parameters
    assert list(parameters) == [*ARGUMENTS, "settings"]
    assert len(parameters) <= 14
    hints = typing.get_type_hints(Config)
    for name, parameter in parameters.items():
        assert parameter.annotation == hints.get(name, Settings) | None
        assert parameter.default is None


def test_connect_says_where_a_setting_belongs() -> None:
    with pytest.raises(TypeError, match="'silence_s': it is a field of Settings"):
        backhaul.connect("nowhere:1", silence_s=60)  # type: ignore[call-arg]


def test_nothing_hidden_is_shown() -> None:
    assert "--parent" not in page()
    assert len(fields(Config)) == page().split("## `backhaul ")[0].count("\n| `")
