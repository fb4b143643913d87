"""The command `backhaul token`."""

import argparse
import sys
from pathlib import Path

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.credentials import make_token, read_token

HELP = "create a file with a token that a worker or a dashboard requires"
EXAMPLES = ("backhaul token worker.token",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="file to create, readable only by its owner; an existing file is not changed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Creates the file and says so, never printing the token. Returns the exit code: 0 if the file has a token now."""
    try:
        is_new = make_token(arguments.file)
        read_token(arguments.file)
    except SettingError as error:
        print(f"backhaul token: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"backhaul token: can't write {arguments.file}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{arguments.file} " + ("has a new token" if is_new else "already has a token and was not changed"))
    return 0
