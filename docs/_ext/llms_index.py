"""Writes llms.txt: the pages of the site in the order of its table of contents, each with its first sentence."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

_LONGEST = 300


def first_sentence(document: nodes.document) -> str:
    """Returns the first sentence of a page's first paragraph, at most 300 characters; empty if it has none."""
    for paragraph in document.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            sentence = re.split(r"(?<=[.:?])\s", " ".join(paragraph.astext().split()))[0]
            return sentence if len(sentence) <= _LONGEST else f"{sentence[: _LONGEST - 1]}…"
    return ""


def lines(app: "Sphinx") -> "Iterator[str]":
    """Yields the lines of the file."""
    env, base = app.env, app.config.html_baseurl
    root = env.get_doctree(app.config.root_doc)
    yield f"# {app.config.project}\n"
    yield f"> {first_sentence(root)}\n"
    for toctree in root.findall(addnodes.toctree):
        yield f"\n## {toctree['caption']}\n"
        for page in _pages(app, toctree):
            # Sphinx publishes the Markdown of each page, which a language model reads better than HTML.
            address = f"{base}_sources/{page}.md.txt"
            yield f"- [{env.titles[page].astext()}]({address}): {first_sentence(env.get_doctree(page))}"


def _pages(app: "Sphinx", toctree: addnodes.toctree) -> "Iterator[str]":
    for page in toctree["includefiles"]:
        yield page
        for inner in app.env.get_doctree(page).findall(addnodes.toctree):
            yield from _pages(app, inner)


def write(app: "Sphinx", error: Exception | None) -> None:
    """Writes the file beside the pages. Called after the build."""
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "llms.txt").write_text("\n".join(lines(app)) + "\n", encoding="utf-8")


def setup(app: "Sphinx") -> dict[str, object]:
    """Registers the extension with Sphinx."""
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
