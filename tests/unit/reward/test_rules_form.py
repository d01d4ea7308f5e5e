"""Rewards for the form of a response, and for mathematics."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gcore.config.reward import RewardSpec
from gcore.reward.api import Response, RewardError
from gcore.reward.rules import length, regex
from gcore.reward.rules import math as mathematics


def options(name: str, **given: Any) -> RewardSpec:
    return RewardSpec(name=name, options=given)


@pytest.mark.parametrize(
    ("response", "given", "value"),
    [
        pytest.param("<think>a\nb</think> 4", {"pattern": r"<think>.*</think>\s*\d+"}, 1.0, id="whole, over lines"),
        pytest.param("  4 \n", {"pattern": r"\d"}, 1.0, id="white space around"),
        pytest.param("4 apples", {"pattern": r"\d"}, 0.0, id="more than the pattern"),
        pytest.param("4 apples", {"pattern": r"\d", "where": "start"}, 1.0, id="at the start"),
        pytest.param("about 4 apples", {"pattern": r"\d", "where": "start"}, 0.0, id="not at the start"),
        pytest.param("about 4 apples", {"pattern": r"\d", "where": "anywhere"}, 1.0, id="anywhere"),
        pytest.param("YES", {"pattern": "yes", "ignore_case": True}, 1.0, id="case"),
        pytest.param("a b a", {"pattern": "a", "where": "anywhere", "count": 2}, 1.0, id="so many"),
        pytest.param("a b a", {"pattern": "a", "where": "anywhere", "count": 1}, 0.0, id="too many"),
        pytest.param("", {"pattern": "a*"}, 1.0, id="nothing"),
    ],
)
def test_a_response_follows_a_pattern(response: str, given: dict[str, Any], value: float) -> None:
    assert regex(response, {}, options("regex", **given)).value == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "reward.options.pattern is missing"),
        ({"pattern": 3}, "reward.options.pattern is 3, no pattern"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a", "where": "somewhere"}, "reward.options.where is 'somewhere'"),
        ({"pattern": "a", "count": 2}, "counts matches anywhere"),
        ({"pattern": "a", "where": "anywhere", "count": -1}, "reward.options.count is -1"),
        ({"pattern": "a", "ignore_case": 1}, "reward.options.ignore_case is 1"),
        ({"patern": "a"}, "has no option 'patern'"),
    ],
)
def test_a_wrong_option_of_regex_is_an_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said.replace("(", r"\(")):
        regex("a", {}, options("regex", **given))


@pytest.mark.parametrize(
    ("tokens", "given", "value"),
    [
        (10, {"limit": 10}, 1.0),
        (11, {"limit": 10}, 0.0),
        (12, {"limit": 10, "slope": 0.25}, 0.5),
        (50, {"limit": 10, "slope": 0.25}, 0.0),
        (10, {"target": 10}, 1.0),
        (5, {"target": 10}, 0.5),
        (15, {"target": 10}, 0.5),
        (11, {"target": 10, "slope": 0.25}, 0.75),
        (99, {"target": 10}, 0.0),
        (99, {"limit": 3, "unit": "characters"}, 1.0),
    ],
)
def test_a_response_has_a_length(tokens: int, given: dict[str, Any], value: float) -> None:
    result = length(Response("abc", tokens), {}, options("length", **given))
    assert result.value == pytest.approx(value)
    assert result.parts == (("length", 3.0 if given.get("unit") else float(tokens)),)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of"),
        ({"limit": 1, "target": 1}, "give one of"),
        ({"limit": 0}, "reward.options.limit is 0"),
        ({"limit": 1.5}, "reward.options.limit is 1.5"),
        ({"target": 3, "slope": -1}, "reward.options.slope is -1"),
        ({"limit": 3, "unit": "words"}, "reward.options.unit is 'words'"),
        ({"limit": 3, "sloppe": 1}, "has no option 'sloppe'"),
    ],
)
def test_a_wrong_option_of_length_is_an_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        length(Response("abc", 3), {}, options("length", **given))


def test_a_length_in_tokens_needs_somebody_who_counted_them() -> None:
    with pytest.raises(RewardError, match="how many tokens the response has is not known"):
        length("abc", {}, options("length", limit=3))


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        pytest.param("1/2", r"So it is \boxed{0.5}.", 1.0, id="a fraction and a decimal"),
        pytest.param(r"\frac{3}{4}", "0.75", 1.0, id="LaTeX and plain"),
        pytest.param("x+1", "$1+x$", 1.0, id="symbols in another order"),
        pytest.param(r"\sqrt{8}", r"$2\sqrt{2}$", 1.0, id="roots"),
        pytest.param(r"\{1,2\}", r"the set $\{2,1\}$", 1.0, id="sets"),
        pytest.param("(1,2)", r"\boxed{(1, 2)}", 1.0, id="a pair"),
        pytest.param("1000", "1,000", 1.0, id="thousands"),
        pytest.param(72, "The answer is 72.", 1.0, id="a number in the data"),
        pytest.param("12", "The answer is 13", 0.0, id="another number"),
        pytest.param("x+1", r"\boxed{1+x}", 1.0, id="an expression in a box"),
        pytest.param("x+1", "1+x", 0.0, id="a plain expression is not read, as the guide says"),
        pytest.param("5", r"first \boxed{5}, no: \boxed{6}", 0.0, id="the last box counts"),
        pytest.param("5", "I do not know", 0.0, id="no answer"),
        pytest.param("5", r"\boxed{\frac{", 0.0, id="cut off"),
        pytest.param("5", "", 0.0, id="nothing"),
    ],
)
def test_mathematics_is_compared_by_what_it_means(answer: str | int, response: str, value: float) -> None:
    assert mathematics(response, {"answer": answer}, options("math")).value == value


def test_digits_say_how_exactly_numbers_are_compared() -> None:
    fields = {"answer": "3.14159"}
    assert mathematics("3.14161", fields, options("math", digits=3)).value == 1.0
    assert mathematics("3.14161", fields, options("math")).value == 0.0


def test_mathematics_that_never_ends_is_given_up_and_a_part_says_so() -> None:
    result = mathematics(r"\boxed{9^{9^{9^{9}}}}", {"answer": "9^9"}, options("math"))
    assert result.value == 0.0
    assert dict(result.parts)["gave_up"] == 1.0


def test_an_expected_answer_that_is_no_mathematics_is_an_error() -> None:
    with pytest.raises(RewardError, match="cannot be read as mathematics"):
        mathematics("5", {"answer": ""}, options("math"))
    with pytest.raises(RewardError, match="no answer in field 'answer'"):
        mathematics("5", {}, options("math"))


def test_without_its_library_mathematics_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as Python remembers what cannot be imported
    with pytest.raises(RewardError, match=r"needs the package math-verify.*pip install 'gcore\[math\]'"):
        mathematics.start(options("math"))
