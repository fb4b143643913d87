"""Settings in the environment: how variables are called, read, and told from misspelt ones. Free of torch.

NOTE [Names]
1. connect()'s settings are BACKHAUL_ and their name: BACKHAUL_WORKER. A command's have the command's name before
   theirs: BACKHAUL_WORKER_LISTEN. A test holds that no two come out the same.
2. An argument goes before the environment, and the environment before the default.
3. An empty variable is none: container tools pass on what is not set as empty.
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping

PREFIX = "BACKHAUL_"
OTHERS = frozenset({"BACKHAUL_CHROMIUM"})
"""Variables that are no setting of a session or a command: the browser that browser tests use."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Kubernetes describes each Service to all containers: one called "backhaul-worker" as BACKHAUL_WORKER_PORT and others.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)")
_SERVICE_PORT = re.compile(r"(\w+_)?PORT")


def variable_of(*words: str) -> str:
    """The variable of a setting (Rule 1)."""
    return PREFIX + "_".join(word.strip("-").replace("-", "_").upper() for word in words)


def in_environment(variable: str) -> str | None:
    """What a variable says, None where it says nothing (Rule 3)."""
    return os.environ.get(variable, "").strip() or None


def boolean(text: str) -> bool:
    """Reads yes or no. Raises ValueError naming what can be written."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f'"{text}" is not one of {", ".join(_TRUE + _FALSE)}')
    return text.lower() in _TRUE


def items(text: str) -> list[str]:
    """The items of a list: with commas between, or spaces where there is no comma."""
    parts = text.split(",") if "," in text else text.split()
    return [part.strip() for part in parts if part.strip()]


def unknown(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Variables that look like settings and are none, each with the one that it is nearest to, "" if none is near."""
    suggestions = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and variable not in known and variable not in OTHERS:
            name = variable.removeprefix(PREFIX)
            if not _SERVICE_LINK.fullmatch(name) and not (_SERVICE_PORT.fullmatch(name) and "://" in text):
                names = [other.removeprefix(PREFIX) for other in sorted(known)]
                nearest = difflib.get_close_matches(name, names, n=1)
                suggestions[variable] = PREFIX + nearest[0] if nearest else ""
    return suggestions
