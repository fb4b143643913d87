"""Options of commands that the environment can also set: argument over environment over default (NOTE [Names])."""

import argparse
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import boolean, in_environment, items, variable_of

Options = Mapping[str, argparse.Action]
"""The options of a command, by the names of their variables."""

_NARROWEST = 20
"""The least width of the footnote in characters, for terminals that report none."""

FOOTNOTE = (
    "The variable in brackets sets an option that the command line does not set. Items of a list are separated by "
    "commas or spaces; a switch is true or false."
)


def options_of(command: str, parser: argparse.ArgumentParser) -> Options:
    """Returns the options that the environment can set: all but --help and hidden ones."""
    options = {}
    for action in parser._actions:  # argparse offers no public way to list options
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
            long = [option for option in action.option_strings if option.startswith("--")]
            options[variable_of(command, (long or action.option_strings)[0])] = action
    return options


def explain(options: Options, parser: argparse.ArgumentParser) -> None:
    """Adds the variable of each option to the command's help."""
    for variable, action in options.items():
        action.help = f"{action.help or ''} [{variable}]".lstrip()
    if options:
        footnote = textwrap.fill(FOOTNOTE, max(_NARROWEST, shutil.get_terminal_size().columns - 2))
        parser.epilog = "\n\n".join(filter(None, [parser.epilog, footnote]))


def parse(
    parser: argparse.ArgumentParser, options: Mapping[str, Options], argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line, and takes missing options from the environment. The parser cannot be used again.

    Args:
        parser: The parser of all commands. Its result has the command's name as `command`.
        options: The options of each command, by its name.
        argv: The arguments without the program's name; None for those of this process.

    Returns:
        The values, and the names of the variables that set some of them.

    Raises:
        SettingError: A variable has an invalid value. Names the variable.
        SystemExit: The arguments are wrong, or include --help.
    """
    for own in options.values():
        for variable, action in own.items():
            if in_environment(variable) is not None:
                action.required = False
    arguments = parser.parse_args(argv)
    for action in options[arguments.command].values():
        action.default = argparse.SUPPRESS
    given = parser.parse_args(argv)  # without defaults: only what the command line sets
    read = []
    for variable, action in options[arguments.command].items():
        text = in_environment(variable)
        if text is not None and not hasattr(given, action.dest):
            try:
                setattr(arguments, action.dest, _value(action, text, getattr(arguments, action.dest)))
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise SettingError(f"{variable}: {error}") from None
            read.append(variable)
    return arguments, read


def _value(action: argparse.Action, text: str, default: Any) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        return boolean(text)
    if action.nargs == 0:  # a switch
        return action.const if boolean(text) else default
    if action.nargs in {None, "?"}:
        return _item(action, text)
    values = [_item(action, item) for item in items(text)]
    if not values:
        raise ValueError(f'"{text}" has no item')
    return values


def _item(action: argparse.Action, text: str) -> Any:
    kind: Any = action.type or str
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a valid {getattr(kind, "__name__", "value")}') from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(f'"{text}" is not one of {", ".join(map(str, action.choices))}')
    return value


def obstacle_to(path: Path | None) -> str:
    """Returns why a file that an option names can't be written; empty if it can, or if the option was not given."""
    if path is None:
        return ""
    if path.is_dir():
        return "it is a directory"
    target = path if path.exists() else path.absolute().parent
    return "" if os.access(target, os.W_OK) else "it is not writable, or its directory is missing or not writable"
