"""The file of a run's moves has each of them, and whoever writes it remembers the newest only."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.cli.commands.placement import collect_stays
from controllers.planning import history as moves_file
from controllers.planning.history import NAME, MovesFile, read_lines_by_number, read_moves
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.records.job import NEWEST_MOVES, HoldPeriod, Move, MoveKind, Moves
from placement.moves import split_part
from placement.slots import Split

ONE, OTHER = split_part(Split("coexisting", 4, 1, 1)), split_part(Split("coexisting", 3, 2, 1))


def move(number: int) -> Move:
    return Move(generation=number, step=number, kind=MoveKind.LEND, before=ONE, after=OTHER, reason="r" * 200)


def many(count: int) -> Moves:
    moves = Moves()
    for number in range(count):
        moves = moves.plus(move(number))
    return moves


def test_the_file_has_every_move_and_who_writes_it_remembers_the_newest(tmp_path: Path) -> None:
    moves, file = Moves(), MovesFile(tmp_path)
    for number in range(140):
        moves = moves.plus(move(number))
        file.keep(moves)
    assert list(read_lines_by_number(tmp_path / NAME)) == list(range(140))
    assert len((tmp_path / NAME).read_text().splitlines()) == 140
    assert file._known is not None
    assert list(file._known) == list(range(140 - NEWEST_MOVES, 140))
    file.keep(Moves())  # nothing is heard of it for a moment
    file.keep(moves)
    assert len((tmp_path / NAME).read_text().splitlines()) == 140


def test_who_goes_on_with_the_file_reads_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, file = many(NEWEST_MOVES), MovesFile(tmp_path)
    file.keep(moves)
    for number in range(NEWEST_MOVES, 140):
        moves = moves.plus(move(number))
        file.keep(moves)
    monkeypatch.setattr(moves_file, "read_lines_by_number", None)
    monkeypatch.setattr(moves_file, "TAIL", 100 * 400)
    MovesFile(tmp_path).keep(moves)
    assert len((tmp_path / NAME).read_text().splitlines()) == 140


def test_after_a_line_that_was_cut_off_the_next_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    MovesFile(tmp_path).keep(many(2))
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-20])
    file = MovesFile(tmp_path)
    file.keep(many(2))
    file.keep(many(3))
    assert [one.generation for one in read_moves(tmp_path / NAME)] == [0, 1, 2]


def test_what_stands_too_far_up_to_be_found_is_written_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = many(20)
    MovesFile(tmp_path).keep(moves)
    monkeypatch.setattr(moves_file, "TAIL", 1000)
    MovesFile(tmp_path).keep(moves.plus(move(20)))
    assert [one.generation for one in read_moves(tmp_path / NAME)] == list(range(21))
    assert 21 < len((tmp_path / NAME).read_text().splitlines()) < 41


def test_of_a_stretch_without_moves_that_is_told_which_is_known_last_wherever_it_stands(tmp_path: Path) -> None:
    def stays(*steps: int) -> Moves:
        return Moves(
            stays=tuple(HoldPeriod(since=1, step=step, began=float(n), time=step) for n, step in enumerate(steps))
        )

    MovesFile(tmp_path).keep(stays(3, 5, 9), to_the_end=True)
    reply = pb.PlacementReply(folder=str(tmp_path), moves=stays(3, 7, 8).encode())
    assert [one.step for one in collect_stays(reply)] == [3, 7, 9]
    elsewhere = pb.PlacementReply(folder=str(tmp_path / "elsewhere"), moves=stays(3, 7, 8).encode())
    assert [one.step for one in collect_stays(elsewhere)] == [3, 7, 8]
