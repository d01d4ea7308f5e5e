"""The rules: what counts as the right answer."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import RewardSpec
from gcore.reward.api import RewardError
from gcore.reward.rules import exact, last_number, numeric

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
        (numeric, {"after": ""}, "no marker"),
        (numeric, {"after": 4}, "no marker"),
        (numeric, {"tolerance": -1}, "not negative"),
        (numeric, {"tolerance": "much"}, "not negative"),
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
    ["forty-six", "", "4 6", "46 apples", True, [46], {"a": 1}, float("inf"), "nan", "Infinity"],
    ids=repr,
)
def test_an_expected_answer_that_is_no_number_is_an_error(answer: Any) -> None:
    with pytest.raises(RewardError, match="is no number"):
        numeric("46", {"answer": answer}, SPEC)


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
        pytest.param("", "", 1, id="the empty answer"),
    ],
)
def test_exact_compares_character_by_character(response: str, answer: Any, value: float) -> None:
    assert exact(response, {"answer": answer}, SPEC).value == value
