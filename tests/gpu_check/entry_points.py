"""Writes what an installation would say of the checkout: commands of `backhaul` are entry points of distributions."""

import sys
import tomllib
from pathlib import Path


def main(repository: Path, site: Path) -> None:
    """Writes a `.dist-info` for each distribution of the checkout into a folder of sys.path."""
    for file in (repository / "pyproject.toml", repository / "lab/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        name, version = project["name"], project["version"]
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "RECORD").touch()
        (folder / "entry_points.txt").write_text(
            "\n".join(
                f"[{group}]\n" + "".join(f"{command} = {target}\n" for command, target in entries.items())
                for group, entries in project.get("entry-points", {}).items()
            )
        )


main(*map(Path, sys.argv[1:]))
