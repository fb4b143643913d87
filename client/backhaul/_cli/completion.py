"""The command `backhaul completion`."""

import argparse
import sys
from collections.abc import Iterator

HELP = "print a script that completes commands, options and file names in a shell"
EXAMPLES = (
    "backhaul completion bash > ~/.local/share/bash-completion/completions/backhaul",
    "backhaul completion zsh > ~/.zfunc/_backhaul    # a directory in $fpath, before compinit runs",
    "backhaul completion fish > ~/.config/fish/completions/backhaul.fish",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul completion` to its parser."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script. Returns the exit code: 0, or 2 if the package shtab is missing."""
    try:
        import shtab
    except ImportError as error:
        print(f"backhaul completion: {error}; install it with: pip install 'backhaul[completion]'", file=sys.stderr)
        return 2
    from backhaul._cli.registry import build

    parser, _ = build()
    for action in _actions(parser):
        if action.metavar in {"FILE", "DIR"}:  # what shtab completes is an attribute that it adds to actions
            action.complete = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the options and arguments of a parser and of the parsers of its subcommands."""
    for action in parser._actions:  # argparse offers no public way to list options
        yield action
        if isinstance(action.choices, dict):
            for subcommand in action.choices.values():
                yield from _actions(subcommand)
