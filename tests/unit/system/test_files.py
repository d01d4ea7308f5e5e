"""A file is written completely, or stays as it was before.

Damaged files of JSON lines are read or skipped without an error.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.planning.history import NAME, MovesFile, read_lines_by_number, read_moves
from gcore.ledger.records.job import Move, MoveKind, Moves, SplitPart
from gcore.ledger.records.slot_accounting import (
    AccountLine,
    Span,
    StepAccount,
    WorkerTotals,
    append_line,
    encode_line,
    newest_line,
    parse_line,
)
from gcore.system.files import parse_number, parse_object, replace_file
from gcore.types import Version


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "cursor.json"
    for data in (b"one", b"the second, longer"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert [file.name for file in tmp_path.iterdir()] == ["cursor.json"]


def test_a_secret_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "launch.json", b"key", mode=0o600)
    assert (tmp_path / "launch.json").stat().st_mode & 0o777 == 0o600


def test_failed_replacement_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cursor.json"
    replace_file(path, b"one")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"two")
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (b"one", ["cursor.json"])


SPLIT = SplitPart(mode="coexisting", rollout=2, reward=1, train=1)
BOOK = StepAccount(version=Version(0, 3), began=100.0, seconds=5.0, slots=1, booked={"unallocated": 5.0})
LINE = AccountLine(
    "a",
    BOOK,
    (Span(0.0, 5.0, {"collect": 5.0}),),
    {"cpu:0": (Span(0.0, 5.0, {"unallocated": 5.0}),)},
    {"e": WorkerTotals("cpu:0", 4.0, {"busy_s": 1.0})},
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1]", "[" * 100_000, '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e400}', '{"a": 1' + "0" * 5000 + "}"],
    ids=lambda line: line[:20],
)
def test_invalid_lines_are_parsed_as_nothing(line: str) -> None:
    assert parse_object(line) is None


def test_a_truth_value_and_a_word_are_no_numbers() -> None:
    assert (parse_number(1), parse_number(2.5)) == (1.0, 2.5)
    for other in (True, "1", None, [1]):
        with pytest.raises(TypeError):
            parse_number(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"kept": {"x": ["cpu:0", None, {}]}},
        {"kept": {"x": ["cpu:0", "y", {}]}},
        {"kept": {"x": ["cpu:0", 0.0, "x"]}},
        {"kept": {"x": [None, 0.0, {}]}},
        {"kept": {"x": ["cpu:0", 0.0, {"busy_s": "much"}]}},
        {"spans": {"cpu:0": [["0", 5.0, {}]]}},
        {"spans": {"cpu:0": [[0.0, 5.0, {"unallocated": None}]]}},
        {"spans": {"cpu:0": [[0.0, 5.0, ["unallocated"]]]}},
        {"phases": [[0.0, None, {}]]},
        {"book": {**json.loads(BOOK.model_dump_json()), "slots": 10**17}},
    ],
    ids=str,
)
def test_a_step_of_the_books_that_has_something_of_another_kind_is_passed_over(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    append_line(tmp_path, LINE)
    damaged = json.dumps({**json.loads(encode_line(LINE)), **changes})
    with (tmp_path / "books" / "a.jsonl").open("a") as file:
        file.write(damaged + "\n" + "[" * 100_000 + "\n")
    assert parse_line(damaged) is None
    found = newest_line(tmp_path, "a")
    assert found is not None
    assert found.kept == LINE.kept


@given(key=st.sampled_from(["node", "book", "phases", "spans", "kept"]), value=VALUES)
def test_any_line_of_the_accounts_is_read_or_skipped(key: str, value: Any) -> None:
    found = parse_line(json.dumps({**json.loads(encode_line(LINE)), key: value}))
    if found is not None:
        json.dumps(encode_line(found), allow_nan=False)
        assert all(isinstance(one.at, float) for one in found.kept.values())


def move(number_of: int, reason: str = "r", time: float = 0.0) -> Move:
    return Move(generation=number_of, step=1, kind=MoveKind.LEND, before=SPLIT, after=SPLIT, reason=reason, time=time)


def test_moves_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    tree = json.loads(move(3).model_dump_json())
    numbers = ("Infinity", "1e400", "null", '"3"', "[3]", "9" * 5000)
    lines = [f'{{"number": {one}, "move": {json.dumps(tree)}}}' for one in numbers]
    lines += ["[" * 100_000, json.dumps({"number": 1, "move": [1]}), json.dumps({"number": 2, "move": {"time": "x"}})]
    lines += [json.dumps({"number": 4, "move": {**tree, "time": float("nan")}})]
    lines += [json.dumps({"number": 5, "move": {**tree, "reason": "\ud800"}})]
    lines += [json.dumps({"number": 0, "move": tree})]
    (tmp_path / NAME).write_text("\n".join(lines) + "\n")
    assert read_moves(tmp_path / NAME) == [move(3)]


def test_a_move_whose_reason_is_no_text_is_left_out_and_the_others_are_written(tmp_path: Path) -> None:
    MovesFile(tmp_path).keep(Moves().plus(move(0)).plus(move(1, "half of \udcff")).plus(move(2)))
    assert sorted(read_lines_by_number(tmp_path / NAME)) == [0, 2]


def test_threads_that_replace_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(replace_file, path, b"%d" % number * 1000) for number in range(200)]:
            done.result()
    assert len(set(path.read_bytes())) <= 3
    assert [one.name for one in tmp_path.iterdir()] == ["reward.py"]
