"""Hooks of the documentation site (`mkdocs.yml`), which is built from the same Markdown that is read as it is.

A link out of `docs/` becomes plain text with the path, since the site has no such page. Anchors are those of GitHub, so that a link works in both
places. The Python API page gets the docstrings of each module below its heading.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+(?:examples|protos|deploy|benchmarks|tests|tools|gcore|controllers|placement|[A-Z]+\.md)[^)\s]*)\)"
)
MODULE = re.compile(r"^## (gcore[\w.]*)$", re.MULTILINE)


def slugify(title: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Use GitHub's anchors."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page as the site shows it."""
    markdown = OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].replace('../', '')}`)", markdown)
    if page.file.src_path == "reference/python-api.md":
        markdown = MODULE.sub(lambda heading: f"{heading[0]}\n\n::: {heading[1]}\n", markdown)
    return markdown
