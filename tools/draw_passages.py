"""Draw passages of the project's texts at random, for readers who rate how clear they are.

The passages come in equal numbers from six kinds of text: sections of the documents, error messages, help texts of commands, docstrings,
events of recorded jobs and commit messages. The same seed draws the same passages from the same tree and the same event files.

    python -m tools.draw_passages --seed 1 --since COMMIT runs/*/events.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.problem import ROOT, nodes, relative, sources

LENGTHS = 12, 220
"""The least and greatest number of words of a passage. A longer one is cut at the end of a paragraph or a line."""

Passage = tuple[str, str]
"""Where it is from, and its text."""

BRIEF = "error message", "event in a log", "commit message"
"""Kinds of which four words are enough."""

_NUMBER = re.compile(r"\d[\d.]*")


def sections(root: Path) -> Iterator[Passage]:
    """The sections of the documents, the records of decisions among them, without code blocks of over five lines."""
    for file in (root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))):
        page = re.sub(r"^```.*?^```$\n?", _short_block, file.read_text(encoding="utf-8"), flags=re.M | re.S)
        for section in re.split(r"^(?=#+ )", page, flags=re.M):
            yield relative(file, root), section.strip()


def _short_block(block: re.Match[str]) -> str:
    return block[0] if block[0].count("\n") <= 7 else ""


def errors(root: Path) -> Iterator[Passage]:
    """The messages of the errors that the product raises. A value is printed as the expression in braces."""
    for path, _, tree in sources(root):
        for node in nodes(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                parts = [*call.args, *(one.value for one in call.keywords)]
                text = ". ".join(
                    _text(part) for part in parts if isinstance(part, ast.Constant | ast.JoinedStr | ast.Name)
                )
                yield f"{path}:{node.lineno} {ast.unparse(call.func)}", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


def helps(root: Path) -> Iterator[Passage]:
    """What `gcore COMMAND --help` prints for each command."""
    reference = (root / "docs/reference/commands.md").read_text(encoding="utf-8")
    for section in re.split(r"^(?=#+ )", reference, flags=re.M):
        name = re.match(r"#+ `?(gcore [a-z -]+)`?", section)
        if name:
            yield f"{name[1].strip()} --help", section.strip()


def docstrings(root: Path) -> Iterator[Passage]:
    """The docstrings of public modules, classes and functions, with the line that defines them."""
    for path, _, tree in sources(root):
        for node in nodes(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", "")
                text = ast.get_docstring(node)
                if text and not name.startswith("_"):
                    yield path, f"{_definition(node)}\n{text}".strip()


def _definition(node: ast.AST) -> str:
    match node:
        case ast.ClassDef(name=name):
            return f"class {name}:"
        case (
            ast.FunctionDef(name=name, args=args, returns=returns)
            | ast.AsyncFunctionDef(name=name, args=args, returns=returns)
        ):
            result = f" -> {ast.unparse(returns)}" if returns else ""
            return f"def {name}({ast.unparse(args)}){result}:"
        case _:
            return ""


def events(files: list[Path]) -> Iterator[Passage]:
    """The messages in files of events, one of those that differ only in numbers."""
    seen = set()
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            text = f"{event['kind']}: {event['message']}"
            if (form := _NUMBER.sub("0", text)) not in seen:
                seen.add(form)
                yield "event", text


def commits(root: Path, since: str) -> Iterator[Passage]:
    """The messages of the commits after `since`, without merges."""
    log = subprocess.run(
        ["git", "-C", str(root), "log", "--no-merges", "--format=%h%x00%B%x01", f"{since}..HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for one in log.split("\x01"):
        if one.strip():
            name, _, text = one.strip().partition("\0")
            yield name, text.strip()


def shorten(text: str, words: int) -> str:
    """The first lines of a text, as many as have at most `words` words; at least one line."""
    lines: list[str] = []
    count = 0
    for line in text.splitlines():
        count += len(line.split())
        if lines and count > words:
            lines.append("[...]")
            break
        lines.append(line)
    return "\n".join(lines).strip()


def draw(kinds: dict[str, list[Passage]], seed: int, count: int) -> Iterator[tuple[str, Passage]]:
    """`count` passages of each kind: (kind, passage)."""
    chance = random.Random(seed)
    for kind, passages in kinds.items():
        least = 4 if kind in BRIEF else LENGTHS[0]
        for place, text in chance.sample([one for one in passages if len(one[1].split()) >= least], count):
            yield kind, (place, shorten(text, LENGTHS[1]))


def main() -> int:
    """Print the passages as Markdown; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--since", required=True, metavar="COMMIT", help="Draw from the commits after this one.")
    parser.add_argument("--each", type=int, default=2, metavar="N", help="Passages of each kind (default: 2).")
    parser.add_argument("--places", action="store_true", help="Print where each passage is from, and not its text.")
    parser.add_argument("events", type=Path, nargs="+", help="Files of events of recorded jobs (events.jsonl).")
    given = parser.parse_args()
    collect: dict[str, Callable[[], Iterator[Passage]]] = {
        "document": lambda: sections(ROOT),
        "error message": lambda: errors(ROOT),
        "help of a command": lambda: helps(ROOT),
        "docstring": lambda: docstrings(ROOT),
        "event in a log": lambda: events(given.events),
        "commit message": lambda: commits(ROOT, given.since),
    }
    kinds = {kind: list(passages()) for kind, passages in collect.items()}
    for number, (kind, (place, text)) in enumerate(draw(kinds, given.seed, given.each), 1):
        print(f"{number}. {kind}: {place}" if given.places else f"## Passage {number} ({kind})\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
