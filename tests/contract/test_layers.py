"""The layers inside each package, by the table in docs/architecture.md, and the folder for private names of torch."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.parsed_files import parsed

ROOT = Path(__file__).parents[2]
ROOTS = [ROOT / "proto", ROOT / "runtime", ROOT / "client", ROOT / "server", ROOT / "lab"]
PACKAGES = ("backhaul", "backhaul_lab", "backhaul_runtime", "backhaul_server")
PRIVATE_ATTRIBUTES = re.compile(
    r"_(base|version|cdata|is_view|is_zerotensor|schema|sequence_nr|set_sequence_nr|backward_cls|backward_hooks|"
    r"post_accumulate_grad_hooks|checkpoint_wrapped_module|modules|saved_\w+|raw_saved_\w+)"
)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of our own by its dotted name, generated ones aside."""
    trees = {}
    for root in ROOTS:
        for path in root.rglob("*.py"):
            if "_pb2" not in path.name:
                name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                trees[name] = parsed(path)
    return trees


def imports_of(name: str) -> set[str]:
    """The modules of our own that a module imports, anywhere in it."""
    imported = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {full if full in modules() else node.module for full in full_names}
    return imported & modules().keys() - {name}


def layers() -> Iterator[tuple[str, list[list[str]]]]:
    """The rows of the table: a package and its layers, the highest first."""
    section = (ROOT / "docs/architecture.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    for package, cell in re.findall(r"^\| `([\w.]+)` \| (.+) \|$", section, re.MULTILINE):
        yield package, [re.findall(r"`(\w+)`", layer) for layer in cell.split(">")]


def room_of(name: str, package: str) -> str:
    """The folder or module of a package that a module belongs to."""
    return name.removeprefix(package).lstrip(".").split(".")[0] or "__init__"


@pytest.mark.parametrize("package", [package for package, _ in layers()])
def test_imports_go_down_the_layers(package: str) -> None:
    rank = {room: number for number, layer in enumerate(dict(layers())[package]) for room in layer}
    inside = [name for name in modules() if name == package or name.startswith(f"{package}.")]
    has_code = {room_of(name, package) for name in inside if len(modules()[name].body) > 1 or name != package}
    assert has_code == set(rank)
    upward = [
        f"{name} imports {imported}"
        for name in inside
        for imported in imports_of(name)
        if imported in inside
        and room_of(imported, package) != room_of(name, package)
        and rank[room_of(imported, package)] <= rank[room_of(name, package)]
    ]
    assert upward == []


def test_every_package_has_layers() -> None:
    rows = {package for package, _ in layers()}
    assert set(PACKAGES) <= rows


def test_imports_have_no_circles() -> None:
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for imported in imports_of(name):
                visit(imported, (*path, name))
            finished.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize(("folder", "interface"), [("record", "custom_functions"), ("replay", "custom_execution")])
def test_custom_functions_have_one_interface(folder: str, interface: str) -> None:
    """So that recording and replaying read without them."""
    package = f"backhaul_runtime.{folder}"
    outside = [name for name in modules() if name.startswith(package) and not name.startswith(f"{package}.custom")]
    imported = {inner for name in outside for inner in imports_of(name) if inner.startswith(f"{package}.custom")}
    assert imported == {f"{package}.custom.{interface}"}


def dotted(node: ast.expr) -> str:
    """An expression such as `torch.autograd.graph` as text, or nothing for any other."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            full_names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            full_names = [alias.name for alias in node.names]
        else:
            full_names = [dotted(node)] if isinstance(node, ast.Attribute) else []
        for full in full_names:
            is_private = any(part.startswith("_") and not part.startswith("__") for part in full.split("."))
            if full.startswith("torch.") and is_private:
                yield full
        if isinstance(node, ast.Attribute) and PRIVATE_ATTRIBUTES.fullmatch(node.attr) and dotted(node.value) != "self":
            yield node.attr


@pytest.mark.slow
def test_private_names_of_torch_are_used_in_one_folder() -> None:
    outside = {
        name: sorted(set(private_names(tree)))
        for name, tree in modules().items()
        if not name.startswith("backhaul_runtime.torch_internals")
    }
    assert {name: names for name, names in outside.items() if names} == {}
