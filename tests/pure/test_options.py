"""Options of commands from the environment."""

import argparse
import os
import subprocess
import sys
from collections import Counter

import pytest

from backhaul._cli.environment_options import options_of, parse
from backhaul._cli.registry import build
from backhaul._cli.typos import variables_of_commands, variables_of_sessions
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import OTHERS, unknown

KINDS = {"_ExtendAction", "_StoreAction", "_StoreTrueAction", "_StoreFalseAction", "BooleanOptionalAction"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("BACKHAUL_")]:
        monkeypatch.delenv(variable)


def read(*argv: str) -> argparse.Namespace:
    """A command line of a command that has an option of each kind."""
    parser = argparse.ArgumentParser(prog="backhaul")
    command = parser.add_subparsers().add_parser("paint")
    command.add_argument("canvas", nargs="?")
    command.add_argument("--coats", type=int, default=2)
    command.add_argument("--paint-colour", choices=["red", "blue"], default="red")
    command.add_argument("--brush", nargs="+", action="extend", required=True)
    command.add_argument("--layers", type=int, nargs="?", const=3)
    command.add_argument("--dry", action="store_true")
    command.add_argument("--varnish", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--secret", default="kept", help=argparse.SUPPRESS)
    command.set_defaults(command="paint")
    namespace, _ = parse(parser, {"paint": options_of("paint", command)}, ["paint", *argv])
    return namespace


def test_argument_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--brush", "a").coats == 2
    monkeypatch.setenv("BACKHAUL_PAINT_COATS", "3")
    assert read("--brush", "a").coats == 3
    assert read("--brush", "a", "--coats", "2").coats == 2  # also one that says what the default says


def test_a_list_may_be_given_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_PAINT_BRUSH", "a b")
    assert read("--brush", "c", "d", "--brush", "e").brush == ["c", "d", "e"]
    assert read().brush == ["a", "b"]


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("BACKHAUL_PAINT_PAINT_COLOUR", "blue", {"paint_colour": "blue"}),
        ("BACKHAUL_PAINT_BRUSH", "thin,thick, old one", {"brush": ["thin", "thick", "old one"]}),
        ("BACKHAUL_PAINT_BRUSH", " thin  thick ", {"brush": ["thin", "thick"]}),
        ("BACKHAUL_PAINT_LAYERS", "5", {"layers": 5}),
        ("BACKHAUL_PAINT_DRY", "Yes", {"dry": True}),
        ("BACKHAUL_PAINT_DRY", "0", {"dry": False}),
        ("BACKHAUL_PAINT_VARNISH", "off", {"varnish": False}),
        ("BACKHAUL_PAINT_COATS", "", {"coats": 2}),
        ("BACKHAUL_PAINT_SECRET", "told", {"secret": "kept"}),
        ("BACKHAUL_PAINT_CANVAS", "wall", {"canvas": None}),
    ],
)
def test_each_kind_of_option(
    variable: str, text: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKHAUL_PAINT_BRUSH", "a")
    monkeypatch.setenv(variable, text)
    values = vars(read())
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("BACKHAUL_PAINT_COATS", "many", 'BACKHAUL_PAINT_COATS: "many" is not a valid int'),
        ("BACKHAUL_PAINT_PAINT_COLOUR", "green", 'BACKHAUL_PAINT_PAINT_COLOUR: "green" is not one of red, blue'),
        ("BACKHAUL_PAINT_BRUSH", ",", 'BACKHAUL_PAINT_BRUSH: "," has no item'),
        ("BACKHAUL_PAINT_DRY", "perhaps", 'BACKHAUL_PAINT_DRY: "perhaps" is not one of 1, true'),
    ],
)
def test_what_can_not_be_read_is_named(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_PAINT_BRUSH", "a")
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=message):
        read()


def test_no_two_settings_share_a_variable() -> None:
    counts = Counter([*variables_of_sessions(), *variables_of_commands(), *OTHERS])
    assert {variable for variable, count in counts.items() if count > 1} == set()
    assert {"BACKHAUL_WORKER", "BACKHAUL_WORKER_LISTEN", "BACKHAUL_DASHBOARD_WORKER", "BACKHAUL_LOG_LEVEL"} <= set(
        counts
    )


def test_every_option_is_of_a_kind_that_the_environment_can_give() -> None:
    _, commands = build()
    actions = [action for name, command in commands.items() for action in options_of(name, command).values()]
    assert {type(action).__name__ for action in actions} <= KINDS
    assert {action.nargs for action in actions} <= {None, 0, "?", "+", "*"}


@pytest.mark.parametrize(
    ("variable", "text", "meant"),
    [
        ("BACKHAUL_WORKER_LISTN", "x", {"BACKHAUL_WORKER_LISTN": "BACKHAUL_WORKER_LISTEN"}),
        ("BACKHAUL_WORKERS", "x", {"BACKHAUL_WORKERS": "BACKHAUL_WORKER"}),
        ("BACKHAUL_QZX", "x", {"BACKHAUL_QZX": ""}),
        ("BACKHAUL_WORKER", "x", {}),
        ("BACKHAUL_CHROMIUM", "x", {}),
        ("BACKHAUL_WORKER_SERVICE_HOST", "10.0.0.1", {}),  # Kubernetes says where a Service is
        ("BACKHAUL_WORKER_PORT", "tcp://10.0.0.1:50051", {}),
        ("BACKHAUL_PORT_8080_TCP_ADDR", "10.0.0.1", {}),
        ("OTHER", "x", {}),
    ],
)
def test_misspelt_variables_are_told_from_others(variable: str, text: str, meant: dict[str, str]) -> None:
    assert unknown({variable: text}, ["BACKHAUL_WORKER", "BACKHAUL_WORKER_LISTEN", "BACKHAUL_SILENCE_S"]) == meant


def test_a_port_that_is_no_service_is_misspelt() -> None:
    assert "BACKHAUL_WORKER_PORT" in unknown({"BACKHAUL_WORKER_PORT": "50051"}, ["BACKHAUL_WORKER_LISTEN"])


def backhaul(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "backhaul", *arguments]
    surroundings = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=surroundings, check=False)


@pytest.mark.slow
def test_a_command_names_the_variable_of_a_bad_value() -> None:
    process = backhaul("worker", BACKHAUL_WORKER_LEASE="0")
    assert process.returncode == 2
    assert 'BACKHAUL_WORKER_LEASE: "0" is not a number of seconds above 0' in process.stderr
    assert backhaul("worker", "--help", BACKHAUL_WORKER_LEASE="0").returncode == 0


@pytest.mark.slow
def test_a_value_that_is_refused_later_is_named_too() -> None:
    process = backhaul("dashboard", BACKHAUL_DASHBOARD_WORKER="a:1", BACKHAUL_DASHBOARD_LISTEN="nowhere")
    assert process.returncode == 2
    given = "BACKHAUL_DASHBOARD_WORKER, BACKHAUL_DASHBOARD_LISTEN"
    assert process.stderr.endswith(f"backhaul dashboard: these variables of the environment were used: {given}\n")


def test_help_names_each_variable() -> None:
    shown = backhaul("worker", "--help").stdout
    _, commands = build()
    assert all(variable in shown for variable in options_of("worker", commands["worker"]))


def test_a_command_says_which_variable_is_misspelt() -> None:
    said = backhaul("worker", "--listen", "nowhere", BACKHAUL_WORKER_LISTN="x", BACKHAUL_LOG_FORMAT="text").stderr
    assert said.count("BACKHAUL_WORKER_LISTN is set but is not a setting: did you mean BACKHAUL_WORKER_LISTEN?") == 1
