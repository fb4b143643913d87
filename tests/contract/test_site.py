"""The documentation builds as a site without a warning and without the network, and has all public names."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch.utils.checkpoint
from sphinx.util.inventory import InventoryFile

import backhaul

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """The ids and the references of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.references: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in {"id", "name"}:
                self.ids.add(value)
            elif value and name in {"href", "src", "srcset"}:
                self.references.add(value)


def dead_links(site: Path) -> list[str]:
    """References inside the site to a file or an anchor that it does not have."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts}
    dead = []
    for path, page in pages.items():
        for reference in page.references:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].ids):
                dead.append(f"{path.relative_to(site)}: {reference}")
    return sorted(dead)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html"]
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "site")]
    built = subprocess.run([*command, *folders], capture_output=True, text=True, timeout=240, check=False)
    assert (built.returncode, built.stderr) == (0, "")

    assert dead_links((tmp_path / "site").resolve()) == []

    inventory = InventoryFile.loads((tmp_path / "site/objects.inv").read_bytes(), uri="").data
    documented = {name for kind in ("py:class", "py:function", "py:exception") for name in inventory[kind]}
    of_torch = {
        name for name in backhaul.__all__ if getattr(torch.utils.checkpoint, name, None) is getattr(backhaul, name)
    }
    assert {f"backhaul.{name}" for name in backhaul.__all__ if name not in of_torch} - documented == set()

    summary = (tmp_path / "site/llms.txt").read_text()
    pages = {
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md") if path.name[0] != "_"
    }
    listed = {page for page in pages if f"_sources/{page}.txt)" in summary}
    assert pages - listed == {"index.md", "_inventories/README.md"}
