"""docs/on-the-trainer.md and docs/compiled.md list every reason that a report can show, in the words of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.parsed_files import parsed

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("on-the-trainer", "compiled", "whole-micro-batches"))

CALLS = {
    "Refusal",
    "refuse",
    "_note_refusal",
    "undivided",
    "on_trainer",
    "fallback",
    "kept",
    "blocked",
    "inside",
    "Local",
    "KeepInside",
    "_noting",
    "_note_activations",
}
"""Functions, methods and classes whose first argument is a reason."""
VARIABLES = {"local_reason", "inside_reason", "obstacle", "other"}
"""Variables and attributes whose value is a reason."""
FUNCTIONS = {
    "why_not_function",
    "why_not_type",
    "why_not_op",
    "_why_not",
    "_why_not_package",
    "why_no_place",
    "_needs_graph",
    "why_not_cut",
    "why_not_compiled",
    "why_not_program",
    "why_not_deferred",
    "unsupported_reason",
    "_chain",
    "named",
    "_contexts",
    "kind_of_call",
    "kind_of",
    "note",
    "why_not_captured",
    "_why_not_now",
    "_why_unsuited",
}
"""Functions that return a reason, alone or in a tuple."""
TABLES = {"_MEANINGS"}
"""Dictionaries whose values are parts of a reason."""


def trees() -> list[ast.Module]:
    """The modules that reasons come from."""
    folders = ROOT / "client/backhaul", ROOT / "runtime/backhaul_runtime"
    return [parsed(path) for folder in folders for path in folder.rglob("*.py")]


@cache
def constants() -> dict[str, str]:
    """The texts that modules give a name, which f-strings and calls use."""
    return {
        target.id: node.value.value
        for tree in trees()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def text_of(node: ast.expr) -> str:
    """The text of an expression, with an ellipsis for each value that is not constant; "" if it has no words."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants().get(name, "")
        case ast.JoinedStr(values=values):
            return re.sub("…+", "…", "".join(text_of(value) or "…" for value in values))
        case ast.FormattedValue(value=ast.Name(id=name)):
            return constants().get(name, "…")
        case _:
            return ""


def texts_in(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression may have: its own, or those of its branches or items."""
    match node:
        case None:
            return
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*texts_in(body), *texts_in(orelse))
        case ast.BoolOp(values=items) | ast.Tuple(elts=items):
            for item in items:
                yield from texts_in(item)
        case _:
            if " " in (text := text_of(node)).strip("… "):
                yield text


def reasons_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]) if name in CALLS:
            yield from texts_in(first)
        case ast.Call(func=ast.Name(id="cls"), args=[first]):  # Refusal.of
            yield from (text for text in texts_in(first) if text.startswith("recording failed"))
        case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value) if name in VARIABLES:
            yield from texts_in(value)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(values=values)) if name in TABLES:
            for value in values:
                yield from texts_in(value)
        case ast.FunctionDef(name=name) if name in FUNCTIONS:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    yield from texts_in(inner.value)
                if isinstance(inner, ast.Assign) and text_of(inner.targets[0]) == "" and name == "_contexts":
                    yield from texts_in(inner.value)


def reasons() -> set[str]:
    """Every reason in the code, with an ellipsis for what differs from case to case."""
    return {text for tree in trees() for node in ast.walk(tree) for text in reasons_of(node)}


def listed() -> set[str]:
    """The reasons in the first columns of the pages' tables."""
    return set(rows())


def rows() -> list[str]:
    return [reason for page in PAGES for reason in re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)]


def test_the_pages_list_every_reason_and_no_other() -> None:
    assert sorted(reasons() - listed()) == []
    assert sorted(listed() - reasons()) == []


def test_no_reason_is_listed_twice() -> None:
    assert len(rows()) == len(listed())
