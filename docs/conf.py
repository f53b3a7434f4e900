"""Sphinx: `make docs` builds docs/ into build/docs, with warnings as errors."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import torchdali

try:
    import tomllib
except ImportError:  # before Python 3.11, where Sphinx requires tomli
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = METADATA["urls"]["Repository"]

project = "torchdali"
author = "the torchdali developers"
release = version = torchdali.__version__
html_title = f"torchdali {version}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["notebooks"]  # GitHub shows them; pages link to ../docs/notebooks/

html_theme = "furo"
html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them, so that links to headings work in both places
myst_fence_as_directive = ["mermaid"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torchvision": "https://docs.pytorch.org/vision/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
}


def reachable_inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the inventories that can be had, from this folder or from their hosts.

    An inventory that cannot be fetched is a warning for Sphinx, and so an error here. The site must also build where
    there is no network: names of that project are then no links.
    """
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, url in INVENTORIES.items():
        file = folder / f"{name}.inv"
        if not file.exists():
            try:
                with urllib.request.urlopen(f"{url}objects.inv", timeout=5) as answer:
                    content = answer.read()
            except OSError:
                continue
            if not content.startswith(b"# Sphinx inventory"):
                continue  # a proxy's page
            file.write_bytes(content)
        found[name] = (url, str(file))
    return found


intersphinx_mapping = reachable_inventories(ROOT / "build" / "inventories")


def prepare(app: Any, name: str, source: list[str]) -> None:  # noqa: ARG001
    """Make of a page that GitHub shows one for the site.

    Links to files that are not in docs/ lead to the repository. The lists of the first page become trees of pages.
    """

    def absolute(match: re.Match[str]) -> str:
        kind = "tree" if (ROOT / match[1].partition("#")[0]).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{match[1]})"

    source[0] = re.sub(r"\]\(\.\./([^)]*)\)", absolute, source[0])
    if name == "index":
        _, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
        for section in sections:
            pages = re.findall(r"^- \[[^]]*\]\((\w+)\.md\)", section, re.MULTILINE)
            options = [":hidden:", f":caption: {section.splitlines()[0]}"]
            source[0] += "\n".join(["\n```{toctree}", *options, "", *pages, "```\n"])


def setup(app: Any) -> None:
    """Connect the function above."""
    app.connect("source-read", prepare)
