"""`moves.jsonl` in a run's folder: every move of the placement, for people, of which the store keeps the newest only.

A line a move, by its number; what is known of it later (its outcome) is a line more with the same number, and the last one holds.
Whoever leads writes it, beside everything else: a folder that takes nothing loses lines and holds nothing up.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from gcore.ledger.placing import Move, Moves

log = logging.getLogger(__name__)

NAME = "moves.jsonl"


class MovesFile:
    """Of one run, as one controller writes it. Blocks: call it in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NAME
        self._known: dict[int, dict[str, Any]] | None = None

    def keep(self, moves: Moves) -> None:
        """Write down what is new in `moves`. Never raises."""
        try:
            if self._known is None:
                self._known = dict(read(self._file))
            first = moves.total - len(moves.moves)
            trees = {
                first + place: json.loads(move.model_dump_json(exclude_defaults=True))
                for place, move in enumerate(moves.moves)
            }
            news = {number: tree for number, tree in trees.items() if self._known.get(number) != tree}
            if news:
                with self._file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps({"number": n, "move": tree}) + "\n" for n, tree in news.items())
                self._known |= news
        except OSError as error:
            self._known = None
            log.warning("%s takes no move: %s", self._file, error)


def read(file: Path) -> dict[int, dict[str, Any]]:
    """The moves that stand in a file, by number; a line that was cut off is passed over. Raises OSError, but for a file that is not there."""
    found: dict[int, dict[str, Any]] = {}
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            tree = json.loads(line)
            found[int(tree["number"])] = dict(tree["move"])
        except (ValueError, TypeError, KeyError):
            continue
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
