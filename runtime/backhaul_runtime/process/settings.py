"""Settings in the environment: names of variables, parsing, and suggestions for misspelled ones. Does not import torch.

NOTE [Names]
1. The variable of a setting of connect() is BACKHAUL_ and its name: BACKHAUL_WORKER. That of a command's option also
   has the command's name: BACKHAUL_WORKER_LISTEN, or BACKHAUL_FLEET_UP_NAME. A test checks that all names are
   different.
2. An argument has precedence over the environment, and the environment over the default.
3. An empty variable counts as unset, because container tools pass unset variables as empty.
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping

PREFIX = "BACKHAUL_"
OTHERS = frozenset({"BACKHAUL_CHROMIUM"})
"""Variables that are not settings of a session or a command: the browser of the browser tests."""

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Kubernetes describes each Service to all containers: for "backhaul-worker" it sets BACKHAUL_WORKER_PORT and others.
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)")
_SERVICE_PORT = re.compile(r"(\w+_)?PORT")


def variable_of(*words: str) -> str:
    """Returns the name of a setting's variable (Rule 1)."""
    return PREFIX + "_".join(re.sub("[- ]", "_", word.strip("-")).upper() for word in words)


def in_environment(variable: str) -> str | None:
    """Returns the value of a variable, None if it is unset or empty (Rule 3)."""
    return os.environ.get(variable, "").strip() or None


def boolean(text: str) -> bool:
    """Parses a boolean. Raises ValueError that lists the accepted words."""
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f'"{text}" is not one of {", ".join(_TRUE + _FALSE)}')
    return text.lower() in _TRUE


def items(text: str) -> list[str]:
    """Splits a list at commas, or at spaces if there is no comma."""
    parts = text.split(",") if "," in text else text.split()
    return [part.strip() for part in parts if part.strip()]


def names_code(text: object) -> bool:
    """Whether a value can be the name of a module, or of something in a module as "module:qualified name"."""
    if not isinstance(text, str) or text.count(":") > 1:
        return False
    return all(part.isidentifier() for part in text.replace(":", ".").split("."))


def unknown(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Returns variables that look like settings but are not, each with the nearest setting, or "" if none is near."""
    suggestions = {}
    for variable, text in sorted(environment.items()):
        if variable.startswith(PREFIX) and variable not in known and variable not in OTHERS:
            name = variable.removeprefix(PREFIX)
            if not _SERVICE_LINK.fullmatch(name) and not (_SERVICE_PORT.fullmatch(name) and "://" in text):
                names = [other.removeprefix(PREFIX) for other in sorted(known)]
                nearest = difflib.get_close_matches(name, names, n=1)
                suggestions[variable] = PREFIX + nearest[0] if nearest else ""
    return suggestions
