"""The file of a plan: `backhaul plan` writes it, and `connect(plan=...)` reads it. Does not import torch."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backhaul_runtime.errors import SettingError

VERSION = 1
"""Version of the file's form. A session refuses files of later versions."""
SETTINGS = ("worker", "segment_layers", "kept_layers", "returns", "boundaries", "local")
"""The settings that a plan may hold. Secrets and paths of this machine are not among them."""
_LAST = "prediction"
"""The table that ends a plan."""
_HEAD = """\
# Written by `backhaul plan`. A session uses [settings]: backhaul.connect(plan="{name}"). What connect() is given, and
# variables of the environment, take precedence. The other tables say what the plan was made for and what it predicts.
version = {version}
"""


def write_plan(path: Path, settings: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a plan as TOML.

    Args:
        path: The file to write, which is replaced.
        settings: Values of some of `SETTINGS`.
        tables: What the plan was made for and what it predicts, by the name of the table. The last one is `prediction`.

    Raises:
        OSError: The file cannot be written.
    """
    lines = [_HEAD.format(name=path.name, version=VERSION)]
    for name, table in {"settings": settings, **tables}.items():
        lines.append(f"[{name}]")
        # Texts, finite numbers, booleans and lists of these look the same in JSON and in TOML.
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def read_plan(path: str) -> dict[str, Any]:
    """Returns the settings of a plan.

    Raises:
        SettingError: The file cannot be read, or is not a plan that this version understands.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"plan={path!r} cannot be read: {error.strerror}. Write one with `backhaul plan`") from None
    except ValueError as error:
        raise SettingError(f"plan={path!r} is not a plan: {error}. Write one with `backhaul plan`") from None
    version, settings = content.get("version"), content.get("settings")
    if version != VERSION:
        raise SettingError(
            f"plan={path!r} has version {version!r}, and this version of Backhaul reads plans of version {VERSION}. "
            "Write it again with `backhaul plan`"
        )
    if not isinstance(settings, dict) or _LAST not in content:  # without the last table the others may be incomplete
        raise SettingError(
            f"plan={path!r} is cut off: it has no [settings], or no [{_LAST}] after them. Write it again with "
            "`backhaul plan`"
        )
    unknown = settings.keys() - {*SETTINGS}
    if unknown:
        raise SettingError(f"plan={path!r} has the setting {min(unknown)!r}, and may have only {', '.join(SETTINGS)}")
    return settings
