"""The sums of the arithmetic example: held out by pair, in both orders, with deliberately imperfect answers."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gcore.quickstart.arithmetic import SUMS_CHARACTERS, Sum, split_sums
from gcore.quickstart.folder import BarReporter, TeachingProgress
from gcore.quickstart.lessons import Alphabet, to_jsonl

seeds = st.integers(min_value=0, max_value=2**63 - 1)


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_no_pair_of_operands_is_both_held_out_and_learned_from(seed: int) -> None:
    split = split_sums(seed)
    held_out = {s.pair for s in split.held_out}
    assert held_out
    assert held_out.isdisjoint({s.pair for s in split.train} | {s.pair for s in split.wide})


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_no_wide_sum_ends_in_a_held_out_sum(seed: int) -> None:
    split = split_sums(seed)
    held_out = {s.pair for s in split.held_out}
    assert not [s for s in split.wide if (s.pair[0] % 100, s.pair[1]) in held_out]


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_every_sum_is_in_exactly_one_part_and_in_both_orders(seed: int) -> None:
    split = split_sums(seed)
    both = [*split.train, *split.held_out]
    assert len(both) == len(set(both)) == 2 * 90 * 8
    for part in (split.train, split.held_out):
        assert {Sum(s.right, s.left) for s in part} == set(part)


@settings(max_examples=8, deadline=None)
@given(seeds)
def test_as_many_held_out_sums_carry_as_sums_do(seed: int) -> None:
    held_out = split_sums(seed).held_out
    carrying = sum(s.has_carry for s in held_out)
    assert carrying / len(held_out) == pytest.approx(44 / 80, abs=0.01)


def test_another_seed_holds_out_other_pairs() -> None:
    assert set(split_sums(0).held_out) != set(split_sums(1).held_out)


def test_the_split_is_the_same_for_ever() -> None:
    assert [s.prompt for s in split_sums(0).held_out[:4]] == ["9+59=", "3+10=", "53+9=", "2+57="]


@pytest.mark.parametrize(
    ("left", "right", "answer", "careless"),
    [
        pytest.param(47, 8, "55", "45", id="a carry is dropped"),
        pytest.param(8, 47, "55", "45", id="in either order"),
        pytest.param(41, 8, "49", "49", id="without a carry it is right"),
        pytest.param(97, 5, "102", "92", id="the hundred goes with the carry"),
        pytest.param(999, 9, "1008", "998", id="a wide sum"),
    ],
)
def test_the_careless_hand_drops_carries_and_nothing_else(left: int, right: int, answer: str, careless: str) -> None:
    assert Sum(left, right).answer == answer
    assert Sum(left, right).careless_answer == careless


def test_the_lesson_has_room_for_every_sum_and_no_more() -> None:
    split = split_sums(0)
    encode = Alphabet(SUMS_CHARACTERS).encode
    rows = [len(encode(s.prompt)) + len(encode(s.answer)) + 1 for s in [*split.train, *split.held_out, *split.wide]]
    assert max(rows) == split.lesson.longest_row == len("999+9=") + len("1008") + 1
    assert max(len(encode(s.answer)) + 1 for s in split.held_out) == split.lesson.longest_answer


def test_a_file_has_one_prompt_and_answer_a_line() -> None:
    lines = to_jsonl([Sum(47, 8), Sum(3, 12)]).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "47+8=", "answer": "55"},
        {"prompt": "3+12=", "answer": "15"},
    ]


def test_a_bar_is_drawn_on_a_terminal_from_the_first_moment() -> None:
    out = io.StringIO()
    reporter = BarReporter(Console(file=out, force_terminal=True, width=80), "warm start")
    with reporter:
        reporter.report(TeachingProgress(1, 3, None))
        reporter.report(TeachingProgress(3, 3, 0.45))
    assert "3/3" in out.getvalue()
    assert "45% of held-out prompts right" in out.getvalue()
