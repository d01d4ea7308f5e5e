"""Where each line of a folder of `*.jsonl` files begins, so that millions of them can be read one by one and in any order.

What stands after a file's last line end was being written when its writer died; nobody was told of it, so it is no line.
Knows nothing of what the lines say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A line: bytes [start, start + length) of a file, without its line end. `number` counts from 1."""

    file: Path
    number: int
    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}:{self.number}"

    def read(self) -> bytes:
        """The line. Raises OSError."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.length)


def lines_of(folder: Path) -> Iterator[tuple[Place, bytes]]:
    """Every whole line of the folder's files, file by file in the order of their names. Raises OSError."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            start, rest, number = 0, b"", 0
            while block := file.read(READ_BYTES):
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    number += 1
                    yield Place(path, number, start, len(line)), line
                    start += len(line) + 1
