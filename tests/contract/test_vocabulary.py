"""The glossary's claim: the code has one word for each thing, in Python, in the messages and in the tests."""

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from support.parsed_files import nodes_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("proto", "runtime", "client", "server", "lab", "tests")


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the glossary."""
    section = (ROOT / "docs/glossary.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]


@cache
def paths() -> list[Path]:
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".proto"}]
    return [path for path in code if "_pb2" not in path.name]


@cache
def names_of(path: Path, *, with_functions: bool = True) -> list[tuple[str, set[str]]]:
    """All that a file names, each name with its words: what Python defines, every word of a message's code.

    Without functions, also arguments and attributes that hold one are left out: their names may begin with a verb.
    """
    return [(name, set(words_of(name))) for name in _names_of(path, with_functions)]


def _names_of(path: Path, with_functions: bool) -> Iterator[str]:
    if path.suffix == ".proto":
        yield from re.findall(r"\w+", re.sub(r"//.*", "", path.read_text()))
        return
    functions: set[ast.AST] = set()
    for node in nodes_of(path):
        match node:
            case ast.AnnAssign(target=target, annotation=kind) if is_function(kind):
                functions.add(target)
            case ast.arg(annotation=ast.AST() as kind) if is_function(kind):
                functions.add(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.add(node)
    for node in nodes_of(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if with_functions or node not in functions:
            yield name
        elif not name.startswith("test_"):  # which is a sentence; of other functions the first word may be a verb
            yield "_".join(words_of(name)[1:])


def is_function(annotation: ast.expr) -> bool:
    return "Callable" in ast.unparse(annotation)


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def misplaced(word: str, places: Sequence[str], path: Path) -> set[str]:
    """The names in a file that have a word although they must not."""
    where = str(path.relative_to(ROOT))
    if where.startswith(tuple(beginning.rstrip("*") for beginning in places if "/" in beginning)):
        return set()
    forms, is_test = {word, f"{word}s"}, where.startswith("tests/")
    return {
        f"{where}: {name}"
        for name, words in [*names_of(path, with_functions=False), (path.stem, set(words_of(path.stem)))]
        if forms & words and name not in places and not (is_test and len(words) == 1)
    }


@pytest.mark.parametrize(("word", "places"), [(row[0], row[2]) for row in rows_of("Words with one meaning")])
def test_a_word_with_one_meaning_stands_where_the_glossary_says(word: str, places: str) -> None:
    allowed = re.findall(r"`([^`]+)`", places)
    assert set().union(*(misplaced(word, allowed, path) for path in paths())) == set()
    missing = [pattern for pattern in allowed if "/" in pattern and not any(ROOT.glob(pattern))]
    assert missing == []


def test_no_name_has_a_word_that_the_glossary_has_another_for() -> None:
    words = [row[0] for row in rows_of("Words that no name has")]
    assert len(words) >= 3
    forms = {form for word in words for form in (word, f"{word}s", f"{word}es", f"{word}ed", f"{word}ing")}
    named = {f"{path.relative_to(ROOT)}: {name}" for path in paths() for name, words in names_of(path) if forms & words}
    assert named == set()
