"""Mathematical answers: a corpus of pairs with human verdicts, and limits of the work.

A pair has a note where readers might disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore.config.reward import RewardSpec
from gcore.reward.api import RewardError
from gcore.reward.mathematics.grading import equal, final_answers
from gcore.reward.mathematics.notation import normalize
from gcore.reward.mathematics.values import UnreadableAnswer, read
from gcore.reward.rules import math as reward

CORPUS = Path(__file__).parents[2] / "data" / "reward" / "mathematics.jsonl"
PAIRS = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
KINDS = sorted({pair["kind"] for pair in PAIRS})


def value_of(response: str, answer: Any, **options: Any) -> float:
    return reward(response, {"answer": answer}, RewardSpec(name="math", options=options)).value


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_are_those_of_a_reader(kind: str) -> None:
    pairs = [pair for pair in PAIRS if pair["kind"] == kind]
    wrong = [pair for pair in pairs if value_of(pair["response"], pair["expected"]) != float(pair["equal"])]
    assert not wrong


def test_the_corpus_has_as_many_unequal_pairs_as_equal_ones() -> None:
    assert len(PAIRS) >= 400
    assert 0.4 < sum(pair["equal"] for pair in PAIRS) / len(PAIRS) < 0.6


def test_every_expected_answer_equals_itself() -> None:
    golds = sorted({pair["expected"] for pair in PAIRS if pair["kind"] != "response"})
    assert [gold for gold in golds if value_of(rf"\boxed{{{gold}}}", gold) != 1.0] == []


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.large)])
def test_equality_has_no_direction_for_numbers_and_expressions(every: int) -> None:
    kinds = ("small", "large", "fraction", "root", "expression", "complex", "interval", "matrix")
    pairs = [pair for kind in kinds for pair in [pair for pair in PAIRS if pair["kind"] == kind][::every]]
    turned = [pair for pair in pairs if value_of(rf"\boxed{{{pair['expected']}}}", pair["response"]) != pair["equal"]]
    assert not turned


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"First \boxed{3}. So \boxed{5}.", "5"),
        ("\\boxed{3}\n\\boxed{5}", "5"),
        (r"\boxed{32348}", r"\$32,348"),
        (r"\boxed{0.00001}", 0.00001),
        (r"\boxed{10^{16}}", 1e16),
        (r"\boxed{2}", ["1", 2]),
    ],
)
def test_right_answers_that_were_worth_nothing(response: str, answer: Any) -> None:
    assert value_of(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}"),
        (r"\boxed{-2.2817181}", 0.00001),
        (r"\boxed{3} and \boxed{5}", "3,5"),
        (r"\boxed{3}", ["1", 2]),
    ],
)
def test_wrong_answers_that_were_worth_one(response: str, answer: Any) -> None:
    assert value_of(response, answer) == 0.0


@pytest.mark.parametrize("answer", [{"ground_truth": "2"}, True, [], [["2"]], ["2", None]], ids=repr)
def test_an_expected_answer_of_another_type_is_an_error(answer: Any) -> None:
    for call in (lambda fields, spec: reward("2", fields, spec), reward.check):
        with pytest.raises(RewardError, match=r"cannot compare|empty list"):
            call({"answer": answer}, RewardSpec(name="math"))


def test_an_object_as_expected_answer_names_the_field_within_it() -> None:
    fields = {"reward_model": {"style": "rule", "ground_truth": "2"}}
    with pytest.raises(RewardError, match=r"holds an object.*reward\.answer: reward_model\.ground_truth"):
        reward.check(fields, RewardSpec(name="math", answer="reward_model"))
    spec = RewardSpec(name="math", answer="reward_model.ground_truth")
    assert reward(r"\boxed{2}", fields, spec).value == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "(((9!)!)!)!",
        r"\prod_{k=1}^{10^{12}} k",
        pytest.param(r"\sum_{k=1}^{10^9}\frac{1}{k^2}", marks=pytest.mark.large),
    ],
)
def test_an_answer_that_uses_up_its_processor_time_is_worth_nothing_and_a_part_says_so(answer: str) -> None:
    result = reward(rf"\boxed{{{answer}}}", {"answer": "9^9"}, RewardSpec(name="math"))
    assert (result.value, dict(result.parts)["gave_up"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "$",
        "{",
        "}",
        "\\",
        "\\frac{",
        "(" * 100,
        pytest.param("(" * 500, marks=pytest.mark.large),
        "{" * 2000 + "}" * 2000,
        "=",
        "<",
        ",",
        "“",
        "$$",
        "\\begin{pmatrix}",
    ],
)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        equal(read(text), read("1"))
    except UnreadableAnswer:
        return


@pytest.mark.parametrize(
    ("response", "answers"),
    [
        (r"\boxed{3} \boxed{\frac{", ()),
        (r"\boxed{\boxed{5}}", (r"\boxed{5}",)),
        ("no numbers here, and far too many words to be an answer by itself, as everybody would agree", ()),
    ],
)
def test_the_last_box_is_the_answer(response: str, answers: tuple[str, ...]) -> None:
    assert final_answers(response) == answers


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        ("１２３４", "1234"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("1\u2009234", "1234"),
        ("0.(3)", r"\frac{3}{9}"),
        (r"2.\overline{6}", r"\frac{24}{9}"),
        ("√2", r"\sqrt{2}"),
        ("x²", "x^{2}"),
        ("½", r"\frac{1}{2}"),
        ("1.5e-9", r"1.5\times 10^{-9}"),
        (r"\left(1,\ 2\right)", "(1, 2 )"),
    ],
)
def test_notations_of_one_text_are_one(text: str, normal: str) -> None:
    assert normalize(text).replace("  ", " ") == normal
