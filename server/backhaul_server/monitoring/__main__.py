"""Writes the generated files of the project: `make monitoring`."""

import sys
from pathlib import Path

from backhaul_server.monitoring.files import files


def main(root: Path) -> None:
    """Writes all of them under the project's root."""
    for path, content in files(root).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
