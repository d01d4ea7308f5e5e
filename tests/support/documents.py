"""Read the documents in tests: their blocks and commands, and a comparison of a program's output with the documented one."""

from __future__ import annotations

import re

from tools.documents import Block, Command, blocks, commands
from tools.problem import ROOT

__all__ = ["ROOT", "Block", "Command", "blocks", "commands", "mismatch"]


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
