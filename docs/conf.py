"""The site of the docs, `make docs`: Sphinx reads the Markdown where it lies, README.md as the first page, and copies nothing.

Links between pages lead where they lead in the repository; a link to a file that is not a page gives that file.
"""

from __future__ import annotations

import re
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

from toolkit import __version__

project = "shardtune"
html_title = f"shardtune {__version__}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"  # light and dark; loads nothing from elsewhere
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
smartquotes = False  # quotes and dashes stay what was typed

root_doc = "README"
CHAPTERS = {
    "Start": ["docs/data_flow", "docs/configuration", "docs/data_formats", "docs/preview"],
    "Run": ["docs/checkpoints", "docs/run_folder", "docs/report", "docs/tracking", "docs/troubleshooting"],
    "Scale": ["docs/scaling_out", "accelerate_configs/README", "docs/planning", "docs/process_groups", "docs/compare"],
    "Use the model": ["docs/export", "docs/generate"],
    "Python": ["docs/python_api", "docs/own_code", "docs/reference"],
    "Trust": ["docs/support", "docs/guarantees", "docs/verify", "benchmarks/README", "docs/gpu_first_run", "SECURITY"],
    "Project": ["toolkit/config/migrating", "docs/decisions", "CONTRIBUTING", "AGENTS", "docs/releasing", "CHANGELOG"],
}
"""Pages in a reader's order. One that is missing here is a warning, which ends `make docs`."""
include_patterns = ["*.md", "docs/*", "accelerate_configs/*", "benchmarks/*.md", "benchmarks/results/*", "toolkit/config/*.md"]

myst_heading_anchors = 4  # named as on GitHub
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["torch", "transformers", "accelerate", "datasets", "peft", "evaluate", "safetensors", "tokenizers"]
"""Only their names are needed, and the site can be built where they are not installed."""


def add_chapters(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the order of pages behind the first page's text, and that of measurements behind theirs."""
    tables = CHAPTERS if page == root_doc else {"Measurements": ["results/*"]} if page == "benchmarks/README" else {}
    for caption, pages in tables.items():
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def read_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """What stands in `one pair` is code, as in Markdown; `Args:` and `Raises:` are lists. A field's text is a sentence."""
    lines[:] = re.sub(r"(?<!`)`([^`]+?) ?`(?!`)", r"\\ ``\1``\\ ", "\n".join(lines)).split("\n")
    if what != "attribute":
        lines[:] = GoogleDocstring(lines, what=what).lines()


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_chapters)
    app.connect("autodoc-process-docstring", read_docstring)
    for name in ("csv", "tsv", "text_file"):  # files of rows in docs/data_formats.md
        app.add_lexer(name, TextLexer)
