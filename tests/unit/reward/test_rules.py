"""Rule-based rewards: the accepted answers.

Rewards for the form of a response, and for mathematics.
"""

from __future__ import annotations

import functools
import sys
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import RewardSpec
from gcore.reward.api import CheckedReward, Response, RewardError
from gcore.reward.rules import exact, last_number, length, numeric, regex
from gcore.reward.rules import math as mathematics

SPEC = RewardSpec()


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        pytest.param("46", "46", 1, id="the number alone"),
        pytest.param(" 46\n", 46, 1, id="an integer, and space around"),
        pytest.param("12+34=46", "46", 1, id="at the end of a sum"),
        pytest.param("The answer is 46.", "46", 1, id="at the end of a sentence"),
        pytest.param("**46**", "46", 1, id="marked"),
        pytest.param("$46", 46, 1, id="an amount"),
        pytest.param("46.0", 46, 1, id="with a fraction of zero"),
        pytest.param("+46", 46, 1, id="with a plus"),
        pytest.param("046", 46, 1, id="with a leading zero"),
        pytest.param("4.6e1", 46, 1, id="with an exponent"),
        pytest.param("1,234,567.5", "1234567.5", 1, id="English thousands"),
        pytest.param("1234567", "1,234,567", 1, id="thousands in the answer"),
        pytest.param(".5", 0.5, 1, id="without a leading zero"),
        pytest.param("0.1", 0.1, 1, id="a decimal that is no binary number"),
        pytest.param("-3", "-3", 1, id="negative"),
        pytest.param("\u22123", -3, 1, id="the typographic minus sign"),
        pytest.param("x=-3", -3, 1, id="negative after an equals sign"),
        pytest.param("(-3)", -3, 1, id="negative in brackets"),
        pytest.param("7-3", 3, 1, id="a difference ends with what is taken away"),
        pytest.param("7-3", -3, 0, id="its minus is no sign"),
        pytest.param("(7)-3", 3, 1, id="nor behind a bracket"),
        pytest.param("46 or 47", 46, 0, id="the last number counts"),
        pytest.param("47, no: 46", 46, 1, id="only the last number counts"),
        pytest.param("46.01", 46, 0, id="close is not equal"),
        pytest.param("146", 46, 0, id="its end is another number"),
        pytest.param("forty-six", 46, 0, id="words"),
        pytest.param("", 46, 0, id="nothing"),
        pytest.param("4 6", 46, 0, id="broken up"),
        pytest.param("1,2,3", 3, 1, id="a list is no thousand"),
        pytest.param("12,345,67", 67, 1, id="thousands that do not come out even"),
        pytest.param("\u0664\u0666", 46, 0, id="digits of other scripts"),
        pytest.param("1e9999999999", 9999999999, 1, id="an exponent beyond measure is not one"),
    ],
)
def test_numeric_compares_the_last_number(response: str, answer: Any, value: float) -> None:
    result = numeric(response, {"answer": answer}, SPEC)
    assert result.value == value
    assert result.parts == (("correct", value),)


MARKED = RewardSpec(options={"after": "####"})


@pytest.mark.parametrize(
    ("response", "answer", "value", "marked"),
    [
        pytest.param("6 * 7 = 42\n#### 42", "42", 1, 1, id="as the data write it"),
        pytest.param("#### $1,234.50.", 1234.5, 1, 1, id="an amount"),
        pytest.param("####-3", -3, 1, 1, id="negative, without a space"),
        pytest.param("#### 42\nThat is 6 times 7.", 42, 1, 1, id="more text behind it"),
        pytest.param("#### 41\nNo:\n#### 42", 42, 1, 1, id="the last marker counts"),
        pytest.param("#### 42\n####", 42, 0, 1, id="nothing behind the last marker"),
        pytest.param("The answer is 42.", 42, 0, 0, id="the right number without the marker"),
        pytest.param("#### 41", 42, 0, 1, id="another number"),
        pytest.param("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1, 1, id="an expected answer with its solution"),
        pytest.param("#### 1000", "#### 1,000", 1, 1, id="thousands in the expected answer"),
    ],
)
def test_numeric_takes_the_number_behind_a_marker(response: str, answer: Any, value: float, marked: float) -> None:
    result = numeric(response, {"answer": answer}, MARKED)
    assert result.value == value
    assert result.parts == (("correct", value), ("marked", marked))


@given(st.text(alphabet="#12 -,.x\n", max_size=60), st.text(alphabet="#", min_size=1, max_size=4))
def test_every_response_has_a_reward_behind_any_marker(response: str, marker: str) -> None:
    spec = RewardSpec(options={"after": marker})
    assert numeric(response, {"answer": 1}, spec).value in (0.0, 1.0)


@pytest.mark.parametrize(("response", "value"), [("3.14", 1), ("3.1516", 1), ("3.2", 0), ("1e999", 0), ("pi", 0)])
def test_numeric_forgives_what_the_tolerance_allows(response: str, value: float) -> None:
    spec = RewardSpec(options={"tolerance": 0.0101})
    assert numeric(response, {"answer": "3.1415"}, spec).value == value


@pytest.mark.parametrize(
    ("reward", "options", "said"),
    [
        (numeric, {"aftr": "####"}, "no option 'aftr'.*after, tolerance"),
        (numeric, {"after": ""}, "not a marker"),
        (numeric, {"after": 4}, "not a marker"),
        (numeric, {"tolerance": -1}, "at least 0"),
        (numeric, {"tolerance": "much"}, "at least 0"),
        (exact, {"after": "####"}, "no option 'after'"),
    ],
)
def test_an_option_that_a_rule_does_not_know_is_an_error(reward: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        reward("46", {"answer": 46}, RewardSpec(options=options))


@given(
    st.integers(-(10**30), 10**30),
    st.text(alphabet="abc =.,:\n(", max_size=9),
    st.text(alphabet="ab .!)\n", max_size=5),
)
def test_an_integer_is_found_in_any_text(number: int, before: str, after: str) -> None:
    text = f"{before} {number}{after}"
    assert last_number(text) == Decimal(number)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9))
def test_a_decimal_is_found_however_it_is_grouped(number: Decimal) -> None:
    assert last_number(f"= {number}") == number
    assert last_number(f"= {number:,}") == number


@given(st.text(max_size=60))
def test_every_response_has_a_reward(response: str) -> None:
    assert numeric(response, {"answer": "1"}, SPEC).value in (0.0, 1.0)
    assert exact(response, {"answer": "1"}, SPEC).value in (0.0, 1.0)


@pytest.mark.parametrize(
    "response",
    ["1,234" * 100_000, "1" + ",234" * 100_000 + "5", "9" * 500_000, "-" * 500_000 + "1", "1e" * 200_000 + "1"],
    ids=["thousands", "thousands that do not come out even", "digits", "signs", "exponents"],
)
def test_a_response_that_runs_on_is_scored_all_the_same(response: str) -> None:
    assert numeric(response, {"answer": 7}, SPEC).value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        pytest.param("1" + "0" * 500 + "46", id="digits"),
        pytest.param("5." + "0" * 500 + "46", id="a fraction"),
        pytest.param("1" + ",000" * 150 + ",046", id="thousands"),
    ],
)
def test_the_end_of_a_number_that_runs_on_is_not_taken_for_a_number(response: str) -> None:
    assert numeric(response, {"answer": "46"}, SPEC).value == 0.0
    assert numeric(f"{response} or 46", {"answer": "46"}, SPEC).value == 1.0
    assert numeric(",".join(map(str, range(1000))) + ",4,46", {"answer": "46"}, SPEC).value == 1.0
    marked = RewardSpec(options={"after": "####"})
    assert numeric("####46." + "0" * 500 + "1", {"answer": "46"}, marked).value == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "forty-six",
        "",
        "4 6",
        "46 apples",
        True,
        [],
        [[46]],
        [46, "forty-six"],
        {"a": 1},
        float("inf"),
        "nan",
        "Infinity",
    ],
    ids=repr,
)
def test_an_expected_answer_that_is_no_number_is_an_error(answer: Any) -> None:
    with pytest.raises(RewardError, match=r"is not a number|cannot compare|empty list"):
        numeric("46", {"answer": answer}, SPEC)
    with pytest.raises(RewardError, match=r"is not a number|cannot compare|empty list"):
        CheckedReward("numeric", numeric).check({"answer": answer}, SPEC)


@pytest.mark.parametrize("reward", [numeric, exact])
def test_each_of_several_accepted_answers_is_right(reward: Any) -> None:
    fields = {"answer": ["45", 46]}
    assert [reward(response, fields, SPEC).value for response in ("45", "46", "47")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("reward", [numeric, exact])
def test_an_object_as_expected_answer_is_refused_with_the_field_to_name(reward: Any) -> None:
    fields = {"reward_model": {"style": "rule", "ground_truth": "46"}}
    spec = RewardSpec(answer="reward_model")
    for call in (CheckedReward("rule", reward).check, functools.partial(reward, "46")):
        with pytest.raises(RewardError, match=r"holds an object.*reward\.answer: reward_model\.ground_truth"):
            call(fields, spec)
    assert reward("46", fields, RewardSpec(answer="reward_model.ground_truth")).value == 1.0


def test_a_field_whose_name_has_dots_is_that_field() -> None:
    assert exact("46", {"a.b": "46", "a": {"b": "47"}}, RewardSpec(answer="a.b")).value == 1.0


@pytest.mark.parametrize("reward", [numeric, exact])
@pytest.mark.parametrize("fields", [{}, {"answer": None}], ids=["missing", "null"])
def test_an_entry_without_an_answer_is_an_error(reward: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="no answer in field 'answer'"):
        reward("46", fields, SPEC)


def test_the_answer_stands_in_the_field_that_the_spec_names() -> None:
    spec = RewardSpec(answer="solution")
    assert numeric("46", {"answer": 1, "solution": 46}, spec).value == 1.0
    assert exact("46", {"answer": 1, "solution": 46}, spec).value == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        pytest.param(" Paris\n", "Paris", 1, id="space around the response"),
        pytest.param("Paris", " Paris ", 1, id="space around the answer"),
        pytest.param("paris", "Paris", 0, id="another case"),
        pytest.param("Paris.", "Paris", 0, id="a full stop"),
        pytest.param("46", 46, 1, id="a number as JSON writes it"),
        pytest.param("46.0", 46, 0, id="a number written otherwise"),
        pytest.param("true", True, 1, id="a truth"),
        pytest.param('["ä"]', ["ä"], 1, id="a list"),
        pytest.param("0.00001", 0.00001, 1, id="a small number without an exponent"),
        pytest.param("", "", 1, id="the empty answer"),
    ],
)
def test_exact_compares_character_by_character(response: str, answer: Any, value: float) -> None:
    assert exact(response, {"answer": answer}, SPEC).value == value


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
        ({"pattern": 3}, "reward.options.pattern is 3, which is not a pattern"),
        ({"pattern": "("}, "not a regular expression"),
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
    with pytest.raises(RewardError, match="length in tokens is not known"):
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
        pytest.param("x+1", "1+x", 1.0, id="a plain expression that is all of the response"),
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
    with pytest.raises(RewardError, match="cannot be parsed as mathematics"):
        mathematics("5", {"answer": ""}, options("math"))
    with pytest.raises(RewardError, match="no answer in field 'answer'"):
        mathematics("5", {}, options("math"))


def test_without_its_library_mathematics_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)  # as Python remembers what cannot be imported
    with pytest.raises(RewardError, match=r"needs the package math-verify.*pip install 'gcore\[math\]'"):
        mathematics.start(options("math"))
