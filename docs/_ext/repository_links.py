"""Lets pages use the links that work on GitHub, also those to files outside of docs/.

NOTE [Links]
1. A link to a file at the top of the repository that a page includes, such as `../SECURITY.md`, leads to that page.
2. A link to another file or folder outside of docs/ leads to the repository, whose address is in pyproject.toml.
3. A link to an HTML file in docs/ stays a link to that file. It is copied to its place among the pages, and so are the
   pictures of raw HTML, which Sphinx does not know.
4. A link to a folder in docs/ leads to its `index.md`.
5. A link to a file that is not there is a warning, and so fails the build.
"""

import re
import shutil
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

logger = logging.getLogger(__name__)

INCLUDES = {"CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing", "SECURITY.md": "security"}
"""Pages that consist of a file at the top of the repository: the file, and the name of the page."""

_COPIED = "copied_files"
"""Key of a page's metadata for the files that it needs besides those that Sphinx knows."""

_ABSOLUTE = re.compile(r"[a-z]+:")
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'(!\[[^\]]*\]\(|\b(?:src|srcset)=")([^)\s"]+)')
_FENCE = re.compile(r"^(```.*?^```[^\n]*$|(?: {4}[^\n]*\n?)+)", re.DOTALL | re.MULTILINE)


class _Rewriter:
    """Rewrites the links of one page.

    Args:
        app: The running build.
        docname: Sphinx's name of the page.
        written_in: The file that the text was written in, to which its links are relative.
    """

    def __init__(self, app: "Sphinx", docname: str, written_in: Path) -> None:
        self._app = app
        self._docname = docname
        self._page = Path(app.env.doc2path(docname)).resolve()
        self._folder = written_in.parent
        self._docs = Path(app.srcdir)

    def text(self, text: str) -> str:
        """Returns a text with its links rewritten, except in code."""
        parts = _FENCE.split(text)  # odd parts are code
        return "".join(part if index % 2 else self._prose(part) for index, part in enumerate(parts))

    def _prose(self, text: str) -> str:
        text = _LINK.sub(self._link, text)
        return _IMAGE.sub(self._image, text)

    def _image(self, match: re.Match[str]) -> str:
        before, target = match[1], match[2]
        if _ABSOLUTE.match(target):
            return match[0]
        path = (self._folder / target).resolve()
        if not before.startswith("!"):
            self._copy(path)
        return before + self._relative(path)

    def _link(self, match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if _ABSOLUTE.match(target):
            return match[0]
        path = (self._folder / target).resolve()
        if not path.exists():
            logger.warning("%s links to %s, which is not there", self._page.name, target, location=self._docname)
            return match[0]
        if path.suffix == ".html" and path.is_relative_to(self._docs):  # Rule 3
            self._copy(path)
            return f'<a href="{self._relative(path)}{anchor}">{text}</a>'
        return f"[{text}]({self._address(path)}{anchor})"

    def _copy(self, path: Path) -> None:
        self._app.env.metadata[self._docname].setdefault(_COPIED, set()).add(path)

    def _address(self, path: Path) -> str:
        root: Path = self._app.config.repository_root
        if path.is_relative_to(self._docs):
            return self._relative(path / "index.md" if path.is_dir() else path)
        name = path.relative_to(root).as_posix()
        if name in INCLUDES:  # Rule 1
            return self._relative(self._docs / f"{INCLUDES[name]}.md")
        return f"{self._app.config.repository_url}/{'tree' if path.is_dir() else 'blob'}/main/{name}"  # Rule 2

    def _relative(self, path: Path) -> str:
        return Path(relpath(path, self._page.parent)).as_posix()


def rewrite(app: "Sphinx", docname: str, content: list[str]) -> None:
    """Replaces includes by the files that they name, and rewrites all links. Called for each page."""
    page = Path(app.env.doc2path(docname)).resolve()

    def included(match: re.Match[str]) -> str:
        file = (page.parent / match[1]).resolve()
        app.env.note_dependency(str(file))
        return _Rewriter(app, docname, file).text(file.read_text(encoding="utf-8"))

    text = _Rewriter(app, docname, page).text(content[0])
    content[0] = _INCLUDE.sub(included, text)


def copy_linked(app: "Sphinx", error: Exception | None) -> None:
    """Copies the files of Rule 3. Called after the build."""
    if error is None and app.builder.format == "html":
        for path in sorted(set().union(*(page.get(_COPIED, ()) for page in app.env.metadata.values()))):
            to = Path(app.outdir) / path.relative_to(app.srcdir)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


def setup(app: "Sphinx") -> dict[str, object]:
    """Registers the extension with Sphinx."""
    app.add_config_value("repository_root", Path(), "env")
    app.add_config_value("repository_url", "", "env")
    app.connect("source-read", rewrite)
    app.connect("build-finished", copy_linked)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
