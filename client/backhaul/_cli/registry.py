"""The subcommands of `backhaul`: entry points, so an installed wheel finds those of the server too. Free of torch."""

import argparse
from importlib.metadata import entry_points

from backhaul_runtime.version import version

GROUP = "backhaul.commands"


def build() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, and each one's own by its name.

    What is parsed says as `command` which one was called, and as `run` what to call with it.
    """
    parser = argparse.ArgumentParser(
        prog="backhaul", description="Activation checkpointing for PyTorch that recomputes on another machine."
    )
    parser.add_argument("--version", action="version", version=f"backhaul {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        module = entry.load()
        command = found[entry.name] = commands.add_parser(entry.name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=entry.name)
    return parser, found
