"""Parsers turn an answer into a number within their bounds; an answer without a verdict is unreadable, never 0."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plug_in_package import Install, installer

from gcore.config.reward import OWN_PARSERS, VerdictSpec
from gcore.errors import SpecError
from gcore.reward.judges import parsers as module
from gcore.reward.judges.parsers import LONGEST_WORDS, CheckedParser, find_parser, scale_number
from gcore.reward.judges.types import JudgeError, Unreadable


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch, "gcore.verdicts")


def read(answer: str, **told: Any) -> float:
    spec = VerdictSpec.model_validate(told)
    return find_parser(spec.parser)(answer, spec)


@pytest.mark.parametrize(
    ("answer", "told", "value"),
    [
        pytest.param("0.75", {}, 0.75, id="alone"),
        pytest.param("First 0.2, then 0.9.", {}, 0.9, id="the last"),
        pytest.param("Score: **7**", {"most": 10}, 7.0, id="between marks"),
        pytest.param("-1", {"least": -1}, -1.0, id="below 0"),
        pytest.param("\u22121", {"least": -1}, -1.0, id="typographic minus"),
        pytest.param("1,000 points", {"most": 1000}, 1000.0, id="thousands"),
        pytest.param("8/10", {"most": 10}, 8.0, id="of ten"),
        pytest.param("I say **8** / 10.", {"most": 10}, 8.0, id="of ten, with marks"),
        pytest.param(
            "8.5 out of 10, for " + "it is good " * 100, {"most": 10}, 8.5, id="out of ten, with words behind"
        ),
        pytest.param("8/10, no, 9", {"most": 10}, 9.0, id="changed its mind"),
        pytest.param("8", {"least": 0, "most": 10, "scale": True}, 0.8, id="scaled"),
        pytest.param("1", {"least": 1, "most": 5, "scale": True}, 0.0, id="scaled, least"),
        pytest.param("0.1 verdict: 0.3 verdict: 0.4", {"after": "verdict:"}, 0.4, id="behind the last marker"),
        pytest.param("Y", {"parser": "words", "words": {"Y": 1, "N": 0}}, 1.0, id="word"),
        pytest.param("46:Y", {"parser": "words", "words": {"Y": 1, "N": 0}}, 1.0, id="word behind a colon"),
        pytest.param("Yes? No. N", {"parser": "words", "words": {"Y": 1, "N": 0}}, 0.0, id="the last word"),
        pytest.param(
            "correct, or incorrect", {"parser": "words", "words": {"correct": 1, "incorrect": 0}}, 0.0, id="whole"
        ),
        pytest.param("not good", {"parser": "words", "words": {"good": 1, "not good": 0.2}}, 0.2, id="the longer"),
        pytest.param("[[A>>B]]", {"parser": "words", "words": {"A>B": 0.7, "A>>B": 1, "B": 0}}, 1.0, id="marks"),
        pytest.param("我认为不是", {"parser": "words", "words": {"是": 1, "不是": 0}}, 0.0, id="without spaces"),
        pytest.param("good (A)", {"parser": "words", "words": {"good (A)": 1, "A": 0}}, 1.0, id="ends later"),
        pytest.param('{"score": 0.5}', {"parser": "json"}, 0.5, id="json"),
        pytest.param('{"score": 0.1} {"score": 1}', {"parser": "json"}, 1.0, id="the last object"),
        pytest.param(
            '```json\n{"score": 1, "why": {"score": 0}}\n``` {', {"parser": "json"}, 1.0, id="an object in it"
        ),
        pytest.param('{"a" {"mark": 3}', {"parser": "json", "field": "mark", "most": 5}, 3.0, id="behind a broken one"),
        pytest.param('{"v": "Y"}', {"parser": "json", "field": "v", "words": {"Y": 1, "N": 0}}, 1.0, id="word in json"),
    ],
)
def test_a_verdict_is_read(answer: str, told: dict[str, Any], value: float) -> None:
    assert read(answer, **told) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "told", "why"),
    [
        pytest.param("", {}, "no number", id="nothing"),
        pytest.param("good", {}, "no number", id="no number"),
        pytest.param("2", {}, "2 is not between 0 and 1", id="too large"),
        pytest.param("-0.1", {}, "-0.1 is not between 0 and 1", id="too small"),
        pytest.param("4/5", {"most": 10}, "out of 5, but verdict.most is 10", id="of another scale"),
        pytest.param("1e999", {}, "inf is not", id="endless"),
        pytest.param("0.5", {"after": "Verdict:"}, "does not contain 'Verdict:'", id="no marker"),
        pytest.param("0.5 Verdict:", {"after": "Verdict:"}, "no number", id="nothing behind the marker"),
        pytest.param(
            "Verdict: 0.5. Verdict: ?", {"after": "Verdict:"}, "no number", id="nothing behind the last marker"
        ),
        pytest.param("yes", {"parser": "words", "words": {"Yes": 1, "No": 0}}, "none of Yes, No", id="small letters"),
        pytest.param("incorrect", {"parser": "words", "words": {"correct": 1}}, "none of correct", id="part of a word"),
        pytest.param("0.5", {"parser": "json"}, "no JSON object", id="no object"),
        pytest.param('[{"score"]', {"parser": "json"}, "no JSON object", id="broken"),
        pytest.param('{"mark": 1}', {"parser": "json"}, "no field 'score'", id="no field"),
        pytest.param('{"score": true}', {"parser": "json"}, "'score' is true, not a number", id="a truth"),
        pytest.param('{"score": "good"}', {"parser": "json", "words": {"Y": 1}}, "nor one of Y", id="another word"),
        pytest.param('{"score": NaN}', {"parser": "json"}, "nan is not between 0 and 1", id="nan"),
        pytest.param('{"score": 1e999}', {"parser": "json"}, "inf is not", id="endless in json"),
        pytest.param('{"score": 1' + "0" * 400 + "}", {"parser": "json"}, "inf is not", id="too many digits"),
        pytest.param('{"a":' * 20_000, {"parser": "json"}, "no JSON object", id="nested without end"),
    ],
)
def test_an_answer_without_a_verdict_is_unreadable_and_says_why(answer: str, told: dict[str, Any], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read(answer, **told)


def test_gcores_own_are_found_under_the_names_of_the_spec() -> None:
    for name in OWN_PARSERS:
        assert isinstance(find_parser(name), CheckedParser)
    assert EntryPoint("json", "gcore.reward.judges.parsers:json_field", "gcore.verdicts").load() is module.json_field


def test_a_name_nobody_has_is_refused_with_the_nearest_and_its_key() -> None:
    with pytest.raises(
        SpecError, match=r"judges\.1\.verdict\.parser: no verdict parser is called 'numbr', did you mean 'number'"
    ):
        find_parser("numbr", "judges.1.verdict.parser")


def test_a_parser_of_another_package_is_found_and_held_to_the_bounds(install: Install) -> None:
    install(
        "pack_stars",
        "stars = pack_stars:stars",
        "from gcore.reward.judges.types import Unreadable\n"
        "def stars(answer, spec):\n"
        "    if '*' not in answer:\n        raise Unreadable('it has no stars')\n"
        "    return answer.count('*') * spec.options.get('each', 1)\n",
    )
    spec = VerdictSpec(parser="stars", most=5, scale=True, options={"each": 1})
    parser = find_parser("stars")
    assert parser("****", spec) == pytest.approx(0.8)
    for answer, why in (("good", "no stars"), ("******", "6 is not between 0 and 5")):
        with pytest.raises(Unreadable, match=why):
            parser(answer, spec)


def gives(result: Any) -> CheckedParser:
    return CheckedParser("mine", lambda answer, spec: result)


@pytest.mark.parametrize("bad", ["x", None, [1], object()], ids=["text", "none", "list", "object"])
def test_non_number_is_the_parsers_fault(bad: Any) -> None:
    with pytest.raises(JudgeError, match="verdict parser 'mine' returned"):
        gives(bad)("", VerdictSpec())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 10**400], ids=["nan", "inf", "-inf", "too large"])
def test_non_finite_verdict_is_unreadable(bad: Any) -> None:
    with pytest.raises(Unreadable):
        gives(bad)("", VerdictSpec())


@pytest.mark.parametrize("error", [ValueError("odd\nlines"), SystemExit(3), RecursionError()], ids=repr)
def test_parser_exception_is_reported_with_its_traceback(error: BaseException) -> None:
    def broken(answer: str, spec: VerdictSpec) -> float:
        raise error

    with pytest.raises(JudgeError, match=f"verdict parser 'mine' raised {type(error).__name__}") as caught:
        CheckedParser("mine", broken)("", VerdictSpec())
    assert "in broken" in caught.value.trace
    assert "\n" not in str(caught.value)


@given(st.text(max_size=200), st.sampled_from(OWN_PARSERS), st.booleans())
def test_parsed_verdict_is_within_its_bounds_or_unreadable(text: str, parser: str, scale: bool) -> None:
    words = {} if parser == "number" else {"a": 0.0, "ab": 5.0, "{": 2.0}
    spec = VerdictSpec(parser=parser, words=words, most=5, scale=scale)
    with suppress(Unreadable):
        assert 0.0 <= find_parser(parser)(text, spec) <= (1.0 if scale else 5.0)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_scaled_numbers_go_from_0_to_1_in_their_order(least: float, width: float, share: float) -> None:
    spec = VerdictSpec(least=least, most=least + width + 1, scale=True)
    assert scale_number(spec.least, spec) == 0.0
    assert scale_number(spec.most, spec) == 1.0
    assert 0.0 <= scale_number(spec.least + share * (spec.most - spec.least), spec) <= 1.0


def test_words_are_looked_for_at_the_end_of_a_long_answer_only() -> None:
    spec: dict[str, Any] = {"parser": "words", "words": {"Y": 1, "correct": 0}}
    assert read("Y" + " " * (LONGEST_WORDS - 1), **spec) == 1.0
    for gone in ("Y" + " " * LONGEST_WORDS, "Y" * (1 << 20), "in" + "correct" + " " * (LONGEST_WORDS - 7)):
        with pytest.raises(Unreadable, match="contains none of"):
            read(gone, **spec)


@given(st.lists(st.sampled_from(["Y", "N", "YN", " ", ":", "46", "x", "."]), max_size=12))
def test_a_word_at_the_very_end_is_the_verdict(pieces: list[str]) -> None:
    answer = "".join(pieces)
    assert read(f"{answer} Y", parser="words", words={"Y": 1, "N": 0}) == 1.0
