"""The project's own Python files, parsed once for all tests that read them."""

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, shared by all callers, who must not change it."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of that tree: to walk it takes as long as to parse it."""
    return list(ast.walk(parsed(path)))
