"""The documentation names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
FOLDERS = [
    ROOT,
    *(ROOT / folder for folder in ("client/backhaul", "runtime/backhaul_runtime", "server/backhaul_server")),
    ROOT / "server/backhaul_server/dashboard",
    ROOT / "deploy/grafana",
]


def exists(name: str, page: Path) -> bool:
    return any((folder / name).exists() for folder in [page.parent, *FOLDERS])


def test_every_file_that_a_page_names_is_there() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text()
        linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        quoted = re.findall(r"`(\w(?:[\w.-]*/)+[\w.-]*|[\w-]+\.py)`", text)
        missing += [f"{page.name}: {name}" for name in {*linked, *quoted} if not exists(name, page)]
    assert sorted(missing) == []
