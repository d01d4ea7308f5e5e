"""The training set for the judge of the arithmetic example: every question has the correct verdict, and all kinds occur."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcore.config.load import load_spec
from gcore.quickstart import arithmetic as sums
from gcore.quickstart.arithmetic import (
    JUDGE_CHARACTERS,
    MEASURED,
    RESPONSE_TOKENS,
    AnsweredSum,
    Sum,
    answer_kinds,
    carry_mistakes,
    held_out_answers,
    judge_lesson,
    malformed_answers,
    near_misses,
    score_verdicts,
    split_sums,
)

SPEC = Path(__file__).parents[3] / "examples" / "arithmetic" / "grpo.yaml"
ordered = st.builds(
    lambda wide, narrow, turned: Sum(narrow, wide) if turned else Sum(wide, narrow),
    st.integers(10, 99),
    st.integers(2, 9),
    st.booleans(),
)
policys_text = st.text(alphabet=sums.SUMS_CHARACTERS, max_size=RESPONSE_TOKENS)


@given(ordered, policys_text)
def test_a_response_is_right_exactly_if_the_reward_exact_says_so(one: Sum, response: str) -> None:
    asked = AnsweredSum(one, response)
    assert asked.is_right == (response == str(one.left + one.right))
    assert asked.answer == f"{one.left + one.right}:{'Y' if asked.is_right else 'N'}"
    assert asked.prompt == f"{one.left}+{one.right}={response}?"


@given(ordered, st.text(max_size=5))
def test_of_the_kinds_of_responses_the_first_is_right_and_all_others_are_wrong(one: Sum, key: str) -> None:
    right, *wrong = answer_kinds(one, key)
    assert right == [one.answer]
    for kind in wrong:
        assert kind
        assert one.answer not in kind
        assert len(set(kind)) == len(kind)


@given(ordered, st.text(max_size=5))
def test_every_response_of_every_kind_is_one_that_a_policy_can_write(one: Sum, key: str) -> None:
    for response in (response for kind in answer_kinds(one, key) for response in kind):
        assert len(response) <= RESPONSE_TOKENS
        assert set(response) <= set(sums.SUMS_CHARACTERS)


@given(ordered)
def test_the_careless_answer_is_among_the_tens_wherever_it_is_wrong(one: Sum) -> None:
    assert one.careless_answer in [one.answer, *carry_mistakes(one)]


def test_the_kinds_are_what_they_are_called() -> None:
    one = Sum(47, 8)
    assert carry_mistakes(one) == ["45", "65"]
    assert {"54", "56", "45", "65", "57", "95"} <= set(near_misses(one))
    assert {"", "5", "055", "55=", "55+", "+55", "=55", "555", "550", "47", "8"} <= set(malformed_answers(one, ""))
    assert {"", "1", "10", "08", "8", "1080", "0108", "108="} <= set(malformed_answers(Sum(99, 9), ""))


@settings(max_examples=2, deadline=None)
@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_every_example_of_the_lesson_is_labelled_right_and_on_every_sum_there_is_one_of_every_kind(seed: int) -> None:
    lesson = judge_lesson(split_sums(seed))
    everything = {(left, right) for left in range(10, 100) for right in range(2, 10)}
    for source in lesson.sources:
        pairs = set()
        for exercise in source:
            left, right, response = read_question(exercise.prompt)
            assert exercise.answer == f"{left + right}:{'Y' if response == str(left + right) else 'N'}"
            assert exercise.careless_answer == exercise.answer
            pairs.add((left, right))
        assert pairs == everything | {(right, left) for left, right in everything}


def read_question(prompt: str) -> tuple[int, int, str]:
    asked, _, response = prompt.removesuffix("?").partition("=")
    left, right = asked.split("+")
    return int(left), int(right), response


def test_a_judge_is_measured_on_every_held_out_sum_with_answers_of_every_kind() -> None:
    split = split_sums(0)
    asked = held_out_answers(split)
    assert len(asked) == len(split.held_out) * sum(MEASURED)
    for place, one in enumerate(split.held_out):
        about = asked[place * sum(MEASURED) : (place + 1) * sum(MEASURED)]
        assert [question.sum for question in about] == [one] * sum(MEASURED)
        assert [question.is_right for question in about] == [True] + [False] * (sum(MEASURED) - 1)


def test_while_it_learns_a_judge_is_looked_at_with_one_question_on_a_sum_and_all_kinds_in_turn() -> None:
    split = split_sums(0)
    looked_at = judge_lesson(split).held_out
    assert set(looked_at) <= set(held_out_answers(split))
    assert len({question.prompt.partition("=")[0] for question in looked_at}) == len(looked_at)
    right = [question.answer.endswith(":Y") for question in looked_at]
    assert right == [place % sum(MEASURED) == 0 for place in range(len(looked_at))]


def test_held_out_questions_for_the_judge_never_change() -> None:
    assert [one.prompt for one in held_out_answers(split_sums(0))[:8]] == [
        "9+59=68?",
        "9+59=78?",
        "9+59=58?",
        "9+59=65?",
        "9+59=86?",
        "9+59=67?",
        "9+59=699?",
        "9+59=968?",
    ]


@pytest.mark.parametrize(
    ("written", "accuracy", "false_yes"),
    [
        pytest.param(["55:Y", "55:N", "55:N"], 1.0, 0.0, id="all right"),
        pytest.param(["55:N", "55:N", "55:N"], 2 / 3, 0.0, id="a right answer called wrong"),
        pytest.param(["55:Y", "55:Y", "55:N"], 2 / 3, 0.5, id="a wrong answer called right"),
        pytest.param(["54:Y", "45:N", "6:N"], 1.0, 0.0, id="the verdict counts, whatever sum it wrote"),
        pytest.param(["55:", "", "55Y"], 0.0, 0.0, id="what cannot be read is no verdict"),
    ],
)
def test_marks_are_given_for_verdicts(written: list[str], accuracy: float, false_yes: float) -> None:
    asked = [AnsweredSum(Sum(47, 8), response) for response in ("55", "45", "=")]
    marks = score_verdicts(asked, written)
    assert (marks.accuracy, marks.false_yes) == (pytest.approx(accuracy), pytest.approx(false_yes))


def test_a_policy_of_the_example_writes_no_longer_responses_than_the_judge_knows() -> None:
    assert load_spec(SPEC).rollout.max_new_tokens == RESPONSE_TOKENS


def test_the_policys_alphabet_is_the_datas_and_the_judges_has_four_characters_more() -> None:
    assert JUDGE_CHARACTERS == sums.SUMS_CHARACTERS + "?:YN"
