"""Commands show examples that work, and complete in shells."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from backhaul._cli.completion import run as complete
from backhaul._cli.registry import build
from support.commands import parse

PARSER, COMMANDS = build()
TRY = """
source ./script
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
$(complete -p backhaul | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def examples(name: str) -> list[list[str]]:
    """The command lines at the end of a command's help."""
    _, _, text = (COMMANDS[name].epilog or "").partition("examples:\n")
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("  backhaul ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_examples_that_its_parser_accepts(name: str) -> None:
    assert examples(name)
    for example in examples(name):
        end = example.index(">") if ">" in example else None  # the rest is the shell's
        words = example[1:end]
        assert words[: len(name.split())] == name.split()
        parse(words)


def test_help_shows_examples_and_how_the_environment_sets_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args(["worker", "--help"])
    shown = capsys.readouterr().out
    assert "\nexamples:\n  backhaul worker --memory 8GiB" in shown


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the script for bash, and the program that asks it."""
    assert complete(PARSER.parse_args(["completion", "bash"])) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "try").write_text(TRY)
    (tmp_path / "costs.json").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("backhaul wor", {"worker"}),
        ("backhaul sim", {"simulate"}),
        ("backhaul worker --lis", {"--listen"}),
        ("backhaul fleet d", {"drain", "down"}),
        ("backhaul completion z", {"zsh"}),
        ("backhaul demo --json cos", {"costs.json"}),
    ],
)
def test_bash_completes(words: str, completed: set[str], scripts: Path) -> None:
    command = ["bash", "try", *words.split()]
    asked = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=240, check=True)
    assert set(asked.stdout.split()) == completed


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef backhaul"), ("fish", "complete -c backhaul")])
def test_other_shells_get_a_script(shell: str, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(PARSER.parse_args(["completion", shell])) == 0
    script = capsys.readouterr().out
    assert mark in script
    assert "simulate" in script
    assert "%(default)" not in script


def test_without_shtab_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert complete(PARSER.parse_args(["completion", "bash"])) == 2
    assert "pip install 'backhaul[completion]'" in capsys.readouterr().err
