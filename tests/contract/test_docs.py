"""The documentation names files that exist, and commands with options that exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.generate_configuration import missing_commands
from support.commands import parse

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "lab/README.md"]
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


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_anchor_that_a_page_names_is_there() -> None:
    missing = []
    for page in [*PAGES, *(ROOT / "docs").glob("*/*.md")]:
        for name, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
            target = page.parent / name if name else page
            if target.suffix == ".md" and anchor not in anchors(target):
                missing.append(f"{page.name}: {name}#{anchor}")
    assert missing == []


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of `backhaul` in the indented lines and shell blocks of a page, without placeholders."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:shell|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in re.findall(
        r"^(?:    |)backhaul (.*)$", "\n".join([*re.findall(r"^    .*", text, re.MULTILINE), *blocks]), re.MULTILINE
    ):
        words = [word for word in shlex.split(line, comments=True) if word != "..."]
        yield words[: words.index(">")] if ">" in words else words


@pytest.mark.skipif(bool(missing_commands()), reason="the environment lacks commands of the tree: run `make`")
def test_commands_are_those_that_exist() -> None:
    parsed = 0
    for page in PAGES:
        for command in commands(page):
            if command[-1] == "--tls-cert":  # the rest is a placeholder
                command.pop()
            if command[0] != "bench":
                parse(command)
                parsed += 1
    assert parsed > 20


def test_decisions_are_numbered_once() -> None:
    decisions = sorted((ROOT / "docs/decisions").glob("0*.md"))
    headings = [int(re.match(r"# (\d+)\. ", page.read_text())[1]) for page in decisions]  # type: ignore[index]
    assert [int(page.name[:4]) for page in decisions] == headings == [*range(1, len(decisions) + 1)]
