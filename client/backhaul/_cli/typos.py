"""Warns once about variables that look like settings but are not read."""

import logging
import os
from dataclasses import fields

from backhaul._cli.environment_options import options_of
from backhaul._cli.registry import build
from backhaul._config import Config
from backhaul_runtime.process import logs
from backhaul_runtime.process.settings import PREFIX, unknown, variable_of

logger = logging.getLogger("backhaul")
_said: set[str] = set()


def variables_of_sessions() -> list[str]:
    """Returns the variables that connect() reads."""
    return [variable_of(field.name) for field in fields(Config)]


def variables_of_commands() -> list[str]:
    """Returns the variables that commands read."""
    _, commands = build()
    own = [variable for name, command in commands.items() for variable in options_of(name, command)]
    return [*own, logs.FORMAT_VARIABLE, logs.LEVEL_VARIABLE]


def warn_of_unknown() -> None:
    """Warns about variables that look like settings but are not read, once per process."""
    known = variables_of_sessions()
    if not any(name.startswith(PREFIX) and name not in known for name in os.environ):
        return
    try:
        known += variables_of_commands()
    except Exception:  # a broken command of another package must not prevent training
        logger.debug("The commands cannot be listed.", exc_info=True)
        return
    for variable, nearest in unknown(os.environ, known).items():
        if variable not in _said:
            _said.add(variable)
            hint = f"did you mean {nearest}?" if nearest else "docs/configuration.md lists them"
            logger.warning("%s is set but is not a setting: %s", variable, hint)
