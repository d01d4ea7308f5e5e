"""`moves.jsonl` in a run's folder: every move of the placement, for people, of which the store keeps the newest only.

A line a move, by its number; what is known of it later (its outcome) is a line more with the same number, and the last one holds. A
stretch of decisions that moved nothing is a line once it is over, by when it began.
Whoever leads writes it, beside everything else: a folder that takes nothing loses lines and holds nothing up.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gcore.json_line import object_in
from gcore.ledger.placing import NEWEST_MOVES, Move, Moves, Stay
from gcore.schema import Part

log = logging.getLogger(__name__)

NAME = "moves.jsonl"
TAIL = 1 << 20
"""Bytes at the end of the file in which who begins to write it looks for the newest moves. What stands further up is written once more."""


One = TypeVar("One", bound=Part)


class MovesFile:
    """Of one run, as one controller writes it. Blocks: call it in a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / NAME
        self._known: dict[int, dict[str, Any]] | None = None
        self._stays: dict[float, dict[str, Any]] = {}

    def keep(self, moves: Moves, *, to_the_end: bool = False) -> None:
        """Write down what is new in `moves`; `to_the_end`: the stretch without moves that goes on, too. Never raises."""
        try:
            if self._known is None:
                lines = _last_lines(self._file)
                self._known, self._stays = _by_number(lines), _by_beginning(lines)
            known = self._known
            first = moves.total - len(moves.moves)
            trees = {
                first + place: tree
                for place, move in enumerate(moves.moves)
                if (tree := _tree(move, self._file)) is not None
            }
            news = {number: tree for number, tree in trees.items() if known.get(number) != tree}
            over = moves.stays if to_the_end else moves.stays[:-1]
            stays = {stay.began: tree for stay in over if (tree := _tree(stay, self._file)) is not None}
            more = [{"stay": tree} for began, tree in stays.items() if self._stays.get(began) != tree]
            if news or more:
                told = [*({"number": n, "move": tree} for n, tree in news.items()), *more]
                with self._file.open("a", encoding="utf-8") as file:
                    if _is_torn(self._file):
                        file.write("\n")  # or the first line would be lost with the one that was cut off
                    file.writelines(json.dumps(tree) + "\n" for tree in told)
            # The store tells of no others any more.
            self._known = dict(sorted((known | trees).items())[-NEWEST_MOVES:])
            self._stays = stays
        except OSError as error:
            self._known = None
            log.warning("%s takes no move: %s", self._file, error)


def _tree(move: Move | Stay, file: Path) -> dict[str, Any] | None:
    """As it is written; None for one whose words are no text, as half of a character that a policy made up."""
    try:
        tree: dict[str, Any] = json.loads(move.model_dump_json(exclude_defaults=True))
    except ValueError as error:
        log.warning("%s takes nothing of step %s: %s", file, move.step, error)
        return None
    return tree


def read(file: Path) -> dict[int, dict[str, Any]]:
    """The moves that stand in a file, by number; a line that was cut off is passed over. Raises OSError, but for a file that is not there."""
    return _by_number(_lines(file))


def _lines(file: Path) -> list[str]:
    """Raises OSError, but for a file that is not there."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _last_lines(file: Path) -> list[str]:
    """Those at the end of a file. Raises OSError, but for a file that is not there."""
    try:
        with file.open("rb") as whole:
            size = whole.seek(0, 2)
            whole.seek(max(size - TAIL, 0))
            return whole.read().decode(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _is_torn(file: Path) -> bool:
    """Whether its last line was cut off, as where who wrote it was killed or the disk was full. Raises OSError."""
    with file.open("rb") as whole:
        size = whole.seek(0, 2)
        whole.seek(max(size - 1, 0))
        return whole.read(1) not in (b"", b"\n")


def _by_number(lines: Iterable[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        tree = object_in(line)
        if tree is not None and isinstance(tree.get("number"), int) and isinstance(tree.get("move"), dict):
            found[tree["number"]] = tree["move"]
    return dict(sorted(found.items()))


def _by_beginning(lines: Iterable[str]) -> dict[float, dict[str, Any]]:
    found: dict[float, dict[str, Any]] = {}
    for line in lines:
        stay = (object_in(line) or {}).get("stay")
        if isinstance(stay, dict):
            with contextlib.suppress(ValueError, TypeError):
                found[float(stay.get("began", 0.0))] = stay
    return dict(sorted(found.items()))


def moves_in(file: Path) -> list[Move]:
    """The same as records, oldest first; what cannot be read is passed over. Raises OSError."""
    return list(_records(read(file).values(), Move))


def stays_in(file: Path) -> list[Stay]:
    """The stretches without moves that stand there, oldest first. Raises OSError."""
    return list(_records(_by_beginning(_lines(file)).values(), Stay))


def _records(trees: Iterable[dict[str, Any]], kind: type[One]) -> Iterator[One]:
    for tree in trees:
        with contextlib.suppress(ValueError):
            yield kind.model_validate_json(json.dumps(tree))
