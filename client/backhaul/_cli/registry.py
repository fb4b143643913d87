"""The subcommands of `backhaul`: entry points, so an installed wheel finds those of the server too. Free of torch."""

import argparse
from importlib.metadata import entry_points

from backhaul_runtime.version import version

GROUP = "backhaul.commands"
EXTRAS = {"bench": "bench"}
"""Commands that a distribution of their own declares, each with the extra that installs it."""


def build() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, and each one's own by its name.

    What is parsed says as `command` which one was called, and as `run` what to call with it.
    """
    parser = argparse.ArgumentParser(
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
        command = parsers[name] = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=name)
    return parser, parsers


def _add_missing(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str) -> argparse.ArgumentParser:
    """Adds a command that is not installed: whatever its arguments, it says what to install and exits with code 2."""
    needs = f"needs pip install 'backhaul[{EXTRAS[name]}]'"
    # No argument begins with NUL, so options (--help too) are accepted as positional arguments.
    command = commands.add_parser(name, help=needs, description=needs, prefix_chars="\0", add_help=False)
    command.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    command.set_defaults(run=lambda _: command.exit(2, f"backhaul {name} {needs}\n"), command=name)
    return command
