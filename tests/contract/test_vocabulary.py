"""The glossary's claim: the code has one word for each thing, in Python, in the messages and in the tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.sources import parsed

ROOT = Path(__file__).parents[2]
FOLDERS = ("proto", "runtime", "client", "server", "lab", "tests")


def unused() -> list[str]:
    """The words of the last table."""
    table = (ROOT / "docs/glossary.md").read_text().partition("## Words that no name has")[2]
    return re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]


def names_of(path: Path) -> Iterator[str]:
    """All that a file names: in Python what it defines, in messages every word of its code."""
    if path.suffix == ".proto":
        yield from re.findall(r"\w+", re.sub(r"//.*", "", path.read_text()))
        return
    for node in ast.walk(parsed(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def test_no_name_has_a_word_that_the_glossary_has_another_for() -> None:
    words = unused()
    assert len(words) >= 3
    forms = {form for word in words for form in (word, f"{word}s", f"{word}es", f"{word}ed", f"{word}ing")}
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".proto"}]
    named = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        if "_pb2" not in path.name
        for name in names_of(path)
        if forms & set(words_of(name))
    }
    assert named == set()
