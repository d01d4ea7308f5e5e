"""`moves.jsonl` in a run's folder: every move of the placement, for people, of which the store keeps the newest only.

A line a move, by its number; what is known of it later (its outcome) is a line more with the same number, and the last one holds.
Whoever leads writes it, beside everything else: a folder that takes nothing loses lines and holds nothing up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcore.json_line import object_in
from gcore.ledger.placing import NEWEST_MOVES, Move, Moves

log = logging.getLogger(__name__)

NAME = "moves.jsonl"
TAIL = 1 << 20
"""Bytes at the end of the file in which who begins to write it looks for the newest moves. What stands further up is written once more."""


class MovesFile:
    """Of one run, as one controller writes it. Blocks: call it in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NAME
        self._known: dict[int, dict[str, Any]] | None = None

    def keep(self, moves: Moves) -> None:
        """Write down what is new in `moves`. Never raises."""
        try:
            known = _newest(self._file) if self._known is None else self._known
            first = moves.total - len(moves.moves)
            trees = {
                first + place: tree
                for place, move in enumerate(moves.moves)
                if (tree := _tree(move, self._file)) is not None
            }
            news = {number: tree for number, tree in trees.items() if known.get(number) != tree}
            if news:
                with self._file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps({"number": n, "move": tree}) + "\n" for n, tree in news.items())
            # The store tells of no others any more.
            self._known = dict(sorted((known | trees).items())[-NEWEST_MOVES:])
        except OSError as error:
            self._known = None
            log.warning("%s takes no move: %s", self._file, error)


def _tree(move: Move, file: Path) -> dict[str, Any] | None:
    """As it is written; None for one whose words are no text, as half of a character that a policy made up."""
    try:
        tree: dict[str, Any] = json.loads(move.model_dump_json(exclude_defaults=True))
    except ValueError as error:
        log.warning("%s takes no move of step %s: %s", file, move.step, error)
        return None
    return tree


def read(file: Path) -> dict[int, dict[str, Any]]:
    """The moves that stand in a file, by number; a line that was cut off is passed over. Raises OSError, but for a file that is not there."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    return _by_number(lines)


def _newest(file: Path) -> dict[int, dict[str, Any]]:
    """The same of the end of a file. Raises OSError, but for a file that is not there."""
    try:
        with file.open("rb") as whole:
            size = whole.seek(0, 2)
            whole.seek(max(size - TAIL, 0))
            return _by_number(whole.read().decode(encoding="utf-8", errors="replace").splitlines())
    except FileNotFoundError:
        return {}


def _by_number(lines: Iterable[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        tree = object_in(line)
        if tree is not None and isinstance(tree.get("number"), int) and isinstance(tree.get("move"), dict):
            found[tree["number"]] = tree["move"]
    return dict(sorted(found.items()))


def moves_in(file: Path) -> list[Move]:
    """The same as records, oldest first; what cannot be read is passed over. Raises OSError."""
    found = []
    for tree in read(file).values():
        try:
            found.append(Move.model_validate_json(json.dumps(tree)))
        except ValueError:
            continue
    return found
