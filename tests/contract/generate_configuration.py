"""Writes docs/configuration.md, and the signature and docstring of connect(), from the settings: `make docs`.

`test_configuration.py` holds them in sync.
"""

import argparse
import re
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from backhaul import _config
from backhaul._cli.environment_options import options_of
from backhaul._cli.registry import GROUP, build
from backhaul._config import ARGUMENTS, RARE, Config, Settings
from backhaul._setting import default_of, texts_of
from backhaul_runtime.process.logs import FORMAT_VARIABLE, FORMATS, LEVEL_VARIABLE
from backhaul_runtime.process.settings import variable_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/configuration.md"
API = ROOT / "client/backhaul/_api.py"
_MIB = 1 << 20

_INTRODUCTION = """# Settings

Written by `make docs` from the code.

An argument of `connect()`, a field of `Settings` or an option of a command goes before the environment, the environment
before the plan that `connect(plan=...)` names, and the plan before the default. Arguments of other calls, such as
`accumulate(local=...)` and `wrap(segment_layers=...)`, go before the settings of the session.

An empty variable counts as none. Booleans are `1`, `true`, `yes`, `on`, or `0`, `false`, `no`, `off`. Lists have commas
between their items, or spaces where there is no comma. A variable that begins with `BACKHAUL_` and is none of these is
named in a warning, with the one that it is nearest to.

A worker that `connect()` starts has its settings from its session: variables of `backhaul worker` don't reach it.
"""

_OF_SETTINGS = 'Settings that few programs set, as in `backhaul.Settings(silence_s=60, compression="off")`.'

_LOGS = f"""
## Logs of commands

Commands log to stderr: on a terminal text for people, elsewhere one JSON object per line, with `time` (RFC 3339, UTC),
`level`, `command`, `logger`, `message`, where they are known `session`, `segment` and `step`, and `exception` where
there is one. `session` is the same on a trainer and all its workers. What ends a command before it begins, such as a
bad option, is plain text. In a training program Backhaul logs to `backhaul`, with `session`, `segment` and `step` as
attributes of its records, and configures nothing.

| variable | default |  |
| --- | --- | --- |
| `{FORMAT_VARIABLE}` | `text` on a terminal, else `json` | One of {", ".join(f"`{name}`" for name in FORMATS)}. |
| `{LEVEL_VARIABLE}` | `info` for what the command itself says, `warning` for all else | The least urgent level shown. |
"""


def missing_commands() -> list[str]:
    """The commands of the tree that the environment lacks, because it was installed before the tree had them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    _, commands = build()
    return sorted(declared.keys() - {name.partition(" ")[0] for name in commands})


def page() -> str:
    """The page as it should be."""
    assert not (missing := missing_commands()), f"this environment was installed without {missing}: run `make`"
    _, commands = build()
    sections = [_INTRODUCTION, _of_settings()]
    for name, command in commands.items():
        sections.append(_of_command(name, command))
    return "".join(sections) + _LOGS


def api(source: str) -> str:
    """The source of `_api.py` with the arguments of connect() as `Config` declares them."""
    said = {**texts_of(Config), "settings": _OF_SETTINGS}
    types = {name: node for name, node in Config.__annotations__.items() if name in ARGUMENTS}
    parameters, lines = [], []
    for name, text in said.items():
        kind = _type_name(types.get(name, Settings))
        parameters.append(f"    {name}: {kind} | None = None,\n" + ("    *,\n" if name == "worker" else ""))
        lines.append(textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n")
    before, signature, rest = source.partition("def connect(\n")
    rest = rest[rest.index(") -> Session:") :]
    description, args, rest = rest.partition("    Args:\n")
    rest = rest[rest.index("\n    Raises:") :]
    return "".join([before, signature, *parameters, description, args, *lines, rest])


def _type_name(kind: Any) -> str:
    """A type as `_api.py` writes it."""
    aliases = {getattr(_config, name): name for name in ("Returns", "Durability", "Numerics", "GraphUse", "Check")}
    if kind in aliases:
        return aliases[kind]
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else re.sub(r"[\w.]+\.", "", str(kind))


def _of_settings() -> str:
    sections = (
        ("backhaul.connect()", "argument", ARGUMENTS, texts_of(Config)),
        ("backhaul.Settings", "field", RARE, texts_of(Settings)),
    )
    text = ""
    for title, kind, names, said in sections:
        rows = [
            (
                f"`{field.name}`",
                f"`{variable_of(field.name)}`",
                _default(field.name, default_of(field)),
                said[field.name],
            )
            for field in fields(Config)
            if field.name in names
        ]
        text += f"\n## `{title}`\n\n" + _table((kind, "variable", "default", ""), rows)
    return text


def _of_command(name: str, command: argparse.ArgumentParser) -> str:
    variables = {id(action): variable for variable, action in options_of(name, command).items()}
    rows = []
    for action in command._actions:
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            text, default = _said_of(action)
            variable = variables.get(id(action))
            rows.append((f"`{_usage(action)}`", f"`{variable}`" if variable else "", default, text))
    table = _table(("option", "variable", "default", ""), rows) if rows else ""
    return f"\n## `backhaul {name}`: {command.description}\n\n{table}"


def _usage(action: argparse.Action) -> str:
    shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        shown = " or ".join(map(str, action.choices))
    value = "" if action.nargs == 0 else f"{shown}..." if action.nargs in {"+", "*"} else shown
    return " ".join(
        [*(["/".join(action.option_strings)] if action.option_strings else []), *([value] if value else [])]
    )


def _said_of(action: argparse.Action) -> tuple[str, str]:
    """What an option's help says, and its default, which the help may say in words."""
    text = (action.help or "") % {**vars(action), "prog": "backhaul"}
    words = re.search(r" ?\(default: (.+?)\)(?=\W*$|;|,)", text)
    if words is not None:
        is_code = "%(default)" in (action.help or "")
        return text.replace(words[0], ""), f"`{words[1]}`" if is_code else words[1]
    return text, "must be given" if action.required else _default("", action.default)


def _default(name: str, value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes") and value and value % _MIB == 0:
        return f"`{value}` ({value // _MIB} MiB)"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    API.write_text(api(API.read_text()))
