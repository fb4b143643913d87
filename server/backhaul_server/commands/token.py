"""`backhaul token`."""

import argparse
import sys
from pathlib import Path

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.credentials import make_token, read_token

HELP = "make the token that a worker or a dashboard wants to be shown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="made for its owner's eyes alone; a file that is there is left as it is"
    )


def run(arguments: argparse.Namespace) -> int:
    """Says what is in the file, never the token. Returns 0 where there is a token now."""
    try:
        is_new = make_token(arguments.file)
        read_token(arguments.file)
    except SettingError as error:
        print(f"backhaul token: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"backhaul token: can't write {arguments.file}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{arguments.file} " + ("has a new token" if is_new else "has a token already and was left as it is"))
    return 0
