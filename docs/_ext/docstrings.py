"""Turns what docstrings refer to into links.

NOTE [Docstrings]
1. Public names are defined in private modules. References by the modules that define them, such as those of type
   annotations, lead to the public names.
2. A docstring that names a page, such as docs/accumulation.md, links to it.
3. References to torch and Python that nothing else resolves lead to their documentation, by the inventories in
   docs/_inventories.
"""

import re
from typing import TYPE_CHECKING

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

TORCHS = {"torch.nn.modules.module.Module": "torch.nn.Module", "torch._tensor.Tensor": "torch.Tensor"}
"""Classes of torch by the modules that define them, with the names under which PyTorch documents them."""

_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


def documented_name(target: str) -> str:
    """Returns the documented name of something, given its name in the module that defines it."""
    if target.startswith("backhaul._"):
        return f"backhaul.{target.rpartition('.')[2]}"
    return TORCHS.get(target, target)


def resolve(
    app: "Sphinx", env: "BuildEnvironment", node: "pending_xref", content: nodes.TextElement
) -> nodes.reference | None:
    """Resolves a reference that leads nowhere (Rule 1). The extension intersphinx gets what it leaves (Rule 3)."""
    if node.get("refdomain") != "py":
        return None
    name = documented_name(node["reftarget"])
    if name == node["reftarget"]:
        return None
    node["reftarget"] = name
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)


def link_pages(app: "Sphinx", what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Links the pages that a docstring names (Rule 2). Called for each docstring."""
    lines[:] = [_PAGE.sub(r":doc:`docs/\1.md </\1>`", line) for line in lines]


def set_dashes(app: "Sphinx", doctree: nodes.document) -> None:
    """Replaces the two hyphens that Sphinx puts between a parameter and its description. Called for each page."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: "Sphinx") -> dict[str, object]:
    """Registers the extension with Sphinx."""
    app.connect("missing-reference", resolve, priority=400)  # intersphinx has 500
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("doctree-read", set_dashes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
