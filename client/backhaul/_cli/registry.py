"""The subcommands of `backhaul`: entry points, so an installed wheel finds those of the server too. Free of torch."""

import argparse
import sys
from importlib.metadata import entry_points

from backhaul_runtime.version import version

GROUP = "backhaul.commands"
NEEDS_BENCH = "the package backhaul-bench: pip install 'backhaul[bench]'"


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
    if "bench" not in found:
        # Options have no prefix here, so that every argument is accepted, and the answer is always what is missing.
        missing = found["bench"] = commands.add_parser(
            "bench", help=f"needs {NEEDS_BENCH}", prefix_chars="\0", add_help=False
        )
        missing.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
        missing.set_defaults(run=_explain_missing, command="bench")
    return parser, found


def _explain_missing(arguments: argparse.Namespace) -> int:
    print(f"backhaul bench: this command needs {NEEDS_BENCH}", file=sys.stderr)
    return 2
