"""The subcommands of `backhaul`. They are entry points, so that other distributions can add some.

Does not import torch.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, NoReturn

from backhaul_runtime.version import version

GROUP = "backhaul.commands"
EXTRAS = dict.fromkeys(("bench", "experiment", "plan", "simulate"), "lab")
"""Commands of separate distributions, each with the extra that installs it."""


class CommandParser(argparse.ArgumentParser):
    """A parser that knows each option by its whole name only, and says what may have been meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown arguments itself, so that a wrong option of a command shows the command's usage."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for one in unknown for option in self._nearest(one.partition("=")[0], self._options())]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(options)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and ends the process with code 2."""
        wrong = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if wrong is not None:
            message = f"there is no command {wrong[1]!r}{_hint(self._nearest(wrong[1], self._commands()))}"
        super().error(message)

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _commands(self) -> list[str]:
        return [name for action in self._actions if isinstance(action.choices, dict) for name in action.choices]

    @staticmethod
    def _nearest(word: str, known: Sequence[str]) -> list[str]:
        return get_close_matches(word, known, n=1)


def _hint(meant: Iterable[str]) -> str:
    return "".join(f"; did you mean {one}?" for one in meant)


def build() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of all commands, and the parser of each command by name.

    Each is a module with HELP, EXAMPLES (whole command lines), `add_arguments` and `run`. The name of a subcommand is
    that of its command and its own, as in "fleet up". The parsed arguments have the name as
    `command` and the command's function as `run`.
    """
    parser: argparse.ArgumentParser = CommandParser(
        prog="backhaul", description="Activation checkpointing for PyTorch that recomputes on another machine."
    )
    parser.add_argument("--version", action="version", version=f"backhaul {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers = {}
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted(entries.keys() | EXTRAS):
        if name not in entries:
            parsers[name] = _add_missing(commands, name)
            continue
        module = entries[name].load()
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        _add_examples(command, name, getattr(module, "EXAMPLES", ()))
        for full_name, parser_of_one in _with_subcommands(name, command):
            parser_of_one.set_defaults(run=module.run, command=full_name)
            _add_examples(parser_of_one, full_name, getattr(module, "EXAMPLES", ()))
            parsers[full_name] = parser_of_one
    return parser, parsers


def _with_subcommands(name: str, command: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the names and parsers of a command's subcommands, or of the command itself if it has none."""
    parsers = [action.choices for action in command._actions if isinstance(action.choices, dict)]  # as in `options_of`
    if not parsers:
        yield name, command
    for subcommands in parsers:
        for own, parser in subcommands.items():
            yield f"{name} {own}", parser


def _add_examples(parser: argparse.ArgumentParser, full_name: str, examples: Iterable[str]) -> None:
    """Adds those of a module's examples that are of one command to the end of its help."""
    own = [example for example in examples if re.match(rf"backhaul {full_name}(?![\w-])", example)]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the default joins the lines of the epilog
    parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in own)]) if own else None


def _add_missing(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str) -> argparse.ArgumentParser:
    """Adds a command that is not installed. With any arguments it says what to install and exits with code 2."""
    needs = f"needs pip install 'backhaul[{EXTRAS[name]}]'"
    # No argument begins with NUL, so all options, including --help, are accepted as positional arguments.
    command = commands.add_parser(name, help=needs, description=needs, prefix_chars="\0", add_help=False)
    command.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    command.set_defaults(run=lambda _: command.exit(2, f"backhaul {name} {needs}\n"), command=name)
    return command
