"""What the documents tell a reader to type and to write: commands with their expected output, YAML, Python.

A fenced block of the language `console` holds commands behind `$ `, with what they print below them; a command goes on over
lines that end with a backslash, and over a here-document. In what is printed, `...` stands for anything. A comment of the
form `<!-- WORD: why -->` directly before a block marks it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "runbooks").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^:>]+):[^>]*-->\n)?```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S)
_HERE = re.compile(r"<<-?\s*'?(\w+)'?")
_INLINE = re.compile(r"(?<!`)`(gcore [^`]+)`(?!`)")


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
        return f"{self.file.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """What a reader types, and what it is said to print, line by line."""

    text: str
    printed: tuple[str, ...]


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
    found: list[tuple[list[str], list[str]]] = []
    until = None
    for line in block.text.splitlines():
        typed, printed = found[-1] if found else ([], [])
        if until is not None:
            typed.append(line)
            until = None if line == until else until
        elif typed and not printed and typed[-1].endswith("\\"):
            typed.append(line)
        elif line.startswith("$ "):
            found.append(([line[2:]], []))
            here = _HERE.search(line)
            until = here[1] if here else None
        else:
            printed.append(line)
    return [Command("\n".join(typed), tuple(printed)) for typed, printed in found]


def inline_commands(file: Path) -> list[str]:
    """`gcore ...` in running text."""
    return _INLINE.findall(file.read_text(encoding="utf-8"))


def mismatch(expected: tuple[str, ...], output: str) -> str | None:
    """The first expected line that `output` does not have in its place, or None.

    A line `...` stands for any lines; in a line it stands for anything. White space at the ends does not count.
    """
    given = [line.strip() for line in output.splitlines()]
    at, gap = 0, False
    for line in expected:
        if line.strip() == "...":
            gap = True
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.strip().split("...")))
        places = range(at, len(given)) if gap else range(at, at + 1)
        place = next((i for i in places if i < len(given) and pattern.fullmatch(given[i])), None)
        if place is None:
            return line
        at, gap = place + 1, False
    return None
