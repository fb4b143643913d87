"""The engine of a worker hides its parts: its executor, its speculation, and what it counts."""

import ast
from pathlib import Path

from support.parsed_files import parsed

SERVER = Path(__file__).parents[2] / "server/backhaul_server"


def reaches_through(node: ast.AST) -> bool:
    """Whether an expression takes a member of a member of an engine, such as `worker.engine.executor.busy_s`."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)):
        return False
    owner = node.value.value
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name in {"engine", "_engine"}


def test_nothing_reaches_through_the_engine() -> None:
    assert reaches_through(ast.parse("worker.engine.executor.busy_s", mode="eval").body)
    assert [
        f"{path.relative_to(SERVER)}: {ast.unparse(node)}"
        for path in SERVER.rglob("*.py")
        for node in ast.walk(parsed(path))
        if reaches_through(node)
    ] == []
