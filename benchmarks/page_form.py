"""The form of pages of figures: tables, a median with its spread, when and where it was taken, and the parts between marks.

A page keeps its words; each part between `<!-- NAME -->` and `<!-- /NAME -->` is made anew from the result of that name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Result, form: str = "{:.2f}") -> str:
    """Median, and least to most in brackets."""
    middle, least, most = (form.format(values[name]) for name in ("median", "least", "most"))
    return f"{middle} ({least}–{most})"


def taken(result: Result) -> str:
    """Where and when."""
    versions = ", ".join(f"{name} {number}" for name, number in result.get("versions", {}).items())
    where = f"{result['machine']}; {result['date'][:10]}, commit {result['commit']}"
    return f"*{where}{f'; {versions}' if versions else ''}.*"


def renewed(page: str, name: str, content: str, file: Path | str) -> str:
    """The page with `content` between the marks of that name. Raises SystemExit unless they are there once."""
    place = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.DOTALL)
    made, count = place.subn(lambda found: f"{found[1]}{content}{found[2]}", page)
    if count != 1:
        raise SystemExit(f"{file}: the part {name} is there {count} times, not once")
    return made
