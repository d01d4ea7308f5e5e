"""The starter tasks of `gcore init`: correct answers score high, careless ones mostly low, and held-out data are not trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.quickstart.lessons import CONTEXT, Alphabet
from gcore.quickstart.starter import CHARACTERS, TASKS, StarterTask, bubble_pass, split_task, write_data

numbers = st.integers(min_value=0, max_value=2**64 - 1)
tasks = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


@given(numbers)
def test_sorting_is_answered_with_the_same_digits_in_order(number: int) -> None:
    item = TASKS["sort"].draw(number)
    assert len(item.given) == 5
    assert list(item.answer) == sorted(item.given)
    assert sorted(item.careless_answer) == sorted(item.given)


@given(numbers)
def test_reversing_is_answered_backwards_and_carelessly_only_at_the_ends(number: int) -> None:
    item = TASKS["reverse"].draw(number)
    assert item.answer == "".join(reversed(item.given))
    assert (item.careless_answer == item.answer) == (item.given[1:-1] == item.given[1:-1][::-1])
    assert item.careless_answer[0] + item.careless_answer[-1] == item.given[-1] + item.given[0]


@given(st.text("0123456789", max_size=8))
def test_going_through_once_carries_the_largest_to_the_end(digits: str) -> None:
    passed = bubble_pass(digits)
    assert sorted(passed) == sorted(digits)
    assert passed[-1:] == max(digits, default="")


@tasks
@pytest.mark.parametrize("seed", [0, 7])
def test_no_prompt_is_in_two_parts(task: StarterTask, seed: int) -> None:
    split = split_task(task, seed)
    parts = [{item.prompt for item in part} for part in (split.train, split.held_out, split.warm)]
    assert [len(part) for part in parts] == [2000, 200, 8000]
    assert len(set.union(*parts)) == 10_200


@tasks
def test_the_careless_hand_is_right_on_a_part_that_leaves_room_to_learn(task: StarterTask) -> None:
    held_out = split_task(task, 0).held_out
    right = sum(item.answer == item.careless_answer for item in held_out) / len(held_out)
    assert 0.15 <= right <= 0.5


@tasks
def test_every_exercise_fits_the_alphabet_and_the_models_context(task: StarterTask) -> None:
    split, alphabet = split_task(task, 0), Alphabet(CHARACTERS)
    for item in (*split.train[:200], *split.held_out, *split.warm[:200]):
        ids = [*alphabet.encode(item.prompt), *alphabet.encode(item.answer), *alphabet.encode(item.careless_answer)]
        assert max(ids) < alphabet.pad
        assert len(item.answer) <= task.longest_answer
    assert split.lesson.longest_row <= CONTEXT
    assert alphabet.vocabulary_size > alphabet.eos


@tasks
def test_the_data_are_the_same_for_ever_and_spelt_out_for_a_model_of_ones_own(task: StarterTask, tmp_path) -> None:  # type: ignore[no-untyped-def]
    expected = {"sort": '{"prompt": "sort 14567:", "answer": "14567"}', "reverse": None}[task.name]
    write_data(task, tmp_path, seed=0, spelt_out=False)
    first = (tmp_path / "train.jsonl").read_text().splitlines()[0]
    assert expected is None or first == expected
    write_data(task, tmp_path, seed=0, spelt_out=True)
    assert task.instruction in (tmp_path / "train.jsonl").read_text().splitlines()[0]
