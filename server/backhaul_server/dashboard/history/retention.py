"""The options that say where and how long history is kept. Imports nothing that would slow down `--help`."""

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path

MEMORY = ":memory:"
"""The path that keeps history in memory only."""
RETENTION_DAYS = 30.0
_LONGEST_DAYS = 36_500.0


def default_path(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the default path of the history; in memory for a user without a home directory."""
    state = Path(environment.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # also where it is not set: the specification ignores relative ones
        home = environment.get("HOME", "")
        if not home:
            return MEMORY
        state = Path(home) / ".local/state"
    return str(state / "backhaul/history.sqlite3")


def parse_retention(text: str) -> float:
    """Returns a number of days above 0. Raises ArgumentTypeError for any other text."""
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= _LONGEST_DAYS:
        raise ArgumentTypeError(f'"{text}" is not a number of days above 0 and up to {_LONGEST_DAYS:g}')
    return days
