"""What docstrings and names must say: fields with content, locals that tell what they hold, unique classes."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from support.parsed_files import nodes_of, parsed

ROOT = Path(__file__).parents[2]
MODULES = [
    path
    for folder in ("runtime", "client", "server", "lab")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FEWEST_WORDS = 4
EMPTY = re.compile(r"Of |It\.|Itself|Likewise|See above")
VAGUE = {"found", "each", "place", "told"}


def fields(docstring: str) -> Iterator[tuple[str, str]]:
    """The names and texts of the fields in the sections of a docstring that have some."""
    for section in re.findall(r"^(?:Args|Attributes|Raises):\n((?:    .*\n?|\n)+)", docstring, re.MULTILINE):
        for name, text in re.findall(r"^ {4}([\w.*]+): ((?:.+\n?)(?:^ {5,}.+\n?)*)", section, re.MULTILINE):
            yield name, " ".join(text.split())


def test_every_field_says_what_its_value_is() -> None:
    empty = []
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                empty += [
                    f"{path.relative_to(ROOT)}: {node.name}: {name}: {text}"
                    for name, text in fields(ast.get_docstring(node) or "")
                    if len(text.split()) < FEWEST_WORDS or EMPTY.match(text)
                ]
    assert empty == []


@pytest.mark.slow
def test_the_check_finds_an_empty_field() -> None:
    docstring = "What.\n\nArgs:\n    tensor: Of it.\n    count: How many tensors\n        there are.\n\nMore."
    assert list(fields(docstring)) == [("tensor", "Of it."), ("count", "How many tensors there are.")]


def test_locals_say_what_they_hold() -> None:
    vague = []
    for path in [*MODULES, *TESTS]:
        if not stored(nodes_of(path)) & VAGUE:  # looking into each function takes long
            continue
        functions = [
            node for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        ]
        for function in functions:
            vague += [
                f"{path.relative_to(ROOT)}:{function.lineno}: {name}" for name in stored(ast.walk(function)) & VAGUE
            ]
    assert vague == []


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the variables and arguments among nodes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def test_no_public_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
