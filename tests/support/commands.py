"""Commands of `backhaul`, read by their own parsers without running them."""

import argparse
from collections.abc import Sequence
from importlib.metadata import entry_points

from backhaul._cli.registry import GROUP


def parse(command: Sequence[str]) -> argparse.Namespace:
    """Parses a subcommand with its options. Raises SystemExit for options that it does not have."""
    (entry,) = entry_points(group=GROUP, name=command[0])
    parser = argparse.ArgumentParser()
    entry.load().add_arguments(parser)
    return parser.parse_args(command[1:])
