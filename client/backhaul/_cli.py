"""The `backhaul` command. Subcommands are entry points, so an installed wheel finds those of the server too."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from backhaul_runtime.version import version

GROUP = "backhaul.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="backhaul", description="Activation checkpointing for PyTorch that recomputes on another machine."
    )
    parser.add_argument("--version", action="version", version=f"backhaul {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        command = entry.load()
        subparser = commands.add_parser(entry.name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
