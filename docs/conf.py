"""Sphinx's configuration: `make site` builds this folder into build/site."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
_project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = "Backhaul"
author = copyright = "the Backhaul authors"
version = release = _project["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "repository_links",
    "llms_index",
    "docstrings",
]
exclude_patterns = ["_ext", "_inventories"]
source_suffix = {".md": "markdown"}

# Docstrings put names in single backticks. Those that are documented become links; the rest is code.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*"), ("py:class", r"backhaul\.(_config\.)?Config")]

myst_enable_extensions = ["colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# The build reads nothing from the network, so the inventories are part of this folder: see _inventories/README.md.
intersphinx_mapping = {
    name: (url, f"_inventories/{name}.inv")
    for name, url in {
        "torch": "https://docs.pytorch.org/docs/stable/",
        "python": "https://docs.python.org/3/",
    }.items()
}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

smartquotes = False  # quotes in prose are often those of Python, and two dashes those of an option

html_theme = "furo"
html_title = "Backhaul"
html_baseurl = _project["urls"]["Documentation"]
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = True
html_show_sourcelink = True
html_theme_options = {
    "light_logo": "icon.svg",
    "dark_logo": "icon.svg",
    "source_repository": _project["urls"]["Source"],
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#1b6179", "color-brand-content": "#1b6179"},
    "dark_css_variables": {"color-brand-primary": "#7cc4dc", "color-brand-content": "#7cc4dc"},
}
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

# Where the site's extensions find what they link to.
repository_root = HERE.parent
repository_url = _project["urls"]["Source"]
