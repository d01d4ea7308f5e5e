"""Reads the documents: fenced blocks, console commands with their expected output, commands in running text.

A fenced block of the language `console` holds commands behind `$ `, with what they print below them; a command goes on over
lines that end with a backslash, and over a here-document. In what is printed, `...` stands for anything. A comment of the
form `<!-- WORD: why -->` directly before a block marks it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.problem import ROOT, relative

_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^:>]+):[^>]*-->\n)?```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S)
_HERE = re.compile(r"<<-?\s*'?(\w+)'?")
_INLINE = re.compile(r"(?<!`)`(gcore [^`]+)`(?!`)")


def documents(root: Path) -> list[Path]:
    """What people read, except the records of decisions."""
    return [
        *(file for file in (root / "README.md", root / "CONTRIBUTING.md") if file.exists()),
        *sorted(page for page in (root / "docs").rglob("*.md") if page.parent.name != "adr"),
        *sorted((root / "examples").glob("*/README.md")),
    ]


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: where its text begins, from 1."""

    file: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        """For the name of a test."""
        return f"{relative(self.file, ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """What a reader types, and what it is said to print, line by line."""

    text: str
    printed: tuple[str, ...]
    line: int
    """In the document, from 1."""


def blocks(file: Path, language: str) -> list[Block]:
    """The document's blocks of a language, in order."""
    text = file.read_text(encoding="utf-8")
    return [
        Block(file, text.count("\n", 0, m.start("text")) + 1, m["language"], (m["mark"] or "").strip(), m["text"])
        for m in _BLOCK.finditer(text)
        if m["language"] == language
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[tuple[list[str], list[str], int]] = []
    until = None
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        typed, printed, _ = found[-1] if found else ([], [], 0)
        if until is not None:
            typed.append(line)
            until = None if line == until else until
        elif typed and not printed and typed[-1].endswith("\\"):
            typed.append(line)
        elif line.startswith("$ "):
            found.append(([line[2:]], [], number))
            here = _HERE.search(line)
            until = here[1] if here else None
        else:
            printed.append(line)
    return [Command("\n".join(typed), tuple(printed), line) for typed, printed, line in found]


def inline_commands(file: Path) -> list[tuple[int, str]]:
    """(line, command) of each `gcore ...` in running text."""
    text = file.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start()) + 1, match[1]) for match in _INLINE.finditer(text)]
