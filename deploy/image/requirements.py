"""Prints what a project and some of its extras depend on, one requirement a line, for `pip install --requirement`.

python requirements.py pyproject.toml EXTRA,EXTRA
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Of the text of a pyproject.toml. Raises ValueError for an extra that it does not have."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        raise ValueError(f"no extra {', '.join(unknown)}: there are {', '.join(sorted(optional))}")
    return [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]).read_text(), sys.argv[2].split(",")), sep="\n")
