"""Prints the dependencies of a project and some of its extras, one per line, for `pip install --requirement`.

Usage: python requirements.py pyproject.toml EXTRA,EXTRA
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Returns the requirements in the text of a pyproject.toml. Raises ValueError for an unknown extra."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        raise ValueError(f"no extra {', '.join(unknown)}: the extras are {', '.join(sorted(optional))}")
    return [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]).read_text(), sys.argv[2].split(",")), sep="\n")
