"""A judge's prompt: templates are checked before the first response, and a response cannot inject template code."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import LONGEST_TEMPLATE, JudgeSpec
from gcore.errors import SpecError
from gcore.reward.api import Response
from gcore.reward.judges.template import LONGEST_TEXT, MOST_TURNS, MOST_WORK, Question
from gcore.reward.judges.types import JudgeError
from gcore.types import Prompt, PromptRef

PROMPT = Prompt(PromptRef(0, 0, 0), "12+7=", (1,), {"answer": 19, "items": ["a", {"ü": None}], "question": "12 and 7?"})


def spec(template: str | None, mode: str = "pointwise", **more: Any) -> JudgeSpec:
    told = {"name": "tutor", "external": {"url": "http://here", "model": "m"}, "mode": mode, "template": template}
    return JudgeSpec.model_validate(told | more)


def rendered(template: str, response: str = "19") -> str:
    return Question.compile(spec(template), "judges.0").about(PROMPT, response).text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        pytest.param("{{ prompt }}{{ response }}?", "12+7=19?", id="prompt and response"),
        pytest.param("{{ response }} {{ fields.answer }} {{ fields['question'] }}", "19 19 12 and 7?", id="fields"),
        pytest.param("{{ response }} {{ fields.items }}", '19 ["a", {"ü": null}]', id="what is no text is JSON"),
        pytest.param("{% for i in fields['items'] %}{{ loop.index }}{% endfor %}{{ response }}", "1219", id="loop"),
        pytest.param(
            "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %} {{ response }}",
            "012 19",
            id="loop that is left",
        ),
        pytest.param("{{ response|upper|replace('1', 'one ') }}", "one 9", id="filters"),
        pytest.param("{{ [prompt, response]|join(' ') ~ (1 + 1) }}", "12+7= 192", id="joined"),
        pytest.param("{{ fields.hint|default('none') }} {{ response }}", "none 19", id="default"),
        pytest.param("{{ 'hint' if fields.hint is defined else '-' }}{{ response }}", "-19", id="is defined"),
        pytest.param("{% set r = response.strip() %}{{ r }}", "19", id="set"),
        pytest.param("{{ fields|tojson(2)|length }} {{ response }}", "100 19", id="tojson"),
        pytest.param(
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{{ response }}",
            "319",
            id="namespace",
        ),
        pytest.param(
            "{% for a, b in {'x': [1, 2], 'y': (3,)}.items() %}{{ a }}{{ b|length }}{% endfor %} {{ response }}",
            "x2y1 19",
            id="several names in a loop",
        ),
        pytest.param(
            "{% set ns = namespace(a=[]) %}{% for i in range(999) %}{% set ns.a = ns.a + [i] %}{% endfor %}"
            "{{ ns.a|length }} {{ (1, 2) in [(1, 2)] }} {{ dict(a=1) }} {{ 'ab'|list|reverse|join }} {{ response }}",
            '999 true {"a": 1} ba 19',
            id="lists",
        ),
        pytest.param("{{ 7 * 3 ** 2 }} {{ (2 / 3)|round(2) }} {{ response }}", "63 0.67 19", id="arithmetic"),
        pytest.param(
            "{% if response %}\n  {{ response }}\n{% endif %}\n", "  19\n", id="lines of blocks are not shown"
        ),
    ],
)
def test_a_template_shows(template: str, text: str) -> None:
    assert rendered(template) == text


def test_a_pairwise_template_is_shown_both_responses_in_their_order() -> None:
    question = Question.compile(spec("{{ prompt }} A: {{ first }} B: {{ second }}", "pairwise"), "judges.0")
    assert question.between(PROMPT, "19", "20").text == "12+7= A: 19 B: 20"
    assert question.between(PROMPT, "20", "19").text == "12+7= A: 20 B: 19"


def test_response_text_is_never_a_template() -> None:
    assert rendered("{{ response }}", "{{ 7 * 7 }}{% raise %}") == "{{ 7 * 7 }}{% raise %}"


def test_a_response_that_knows_its_length_is_shown_as_its_text() -> None:
    question = Question.compile(spec("{{ response }}"), "judges.0")
    assert question.about(PROMPT, Response("19", 3)).text == "19"


@pytest.mark.parametrize(
    ("template", "mode", "message"),
    [
        pytest.param(
            "{{ respnse }}",
            "pointwise",
            "line 1 .* uses the unknown name 'respnse'.*did you mean 'response'",
            id="misspelt",
        ),
        pytest.param(
            "{{ response }}\n\n{{ answer }}",
            "pointwise",
            "line 3 of the template uses the unknown name 'answer'",
            id="line",
        ),
        pytest.param("{{ first }} {{ response }}", "pointwise", "unknown name 'first'", id="a pair's name, pointwise"),
        pytest.param(
            "{{ response }}",
            "pairwise",
            "unknown name 'response'.*Known names: prompt, first, second, fields",
            id="pair",
        ),
        pytest.param("{{ now() }}{{ response }}", "pointwise", "unknown name 'now'", id="clock"),
        pytest.param("{{ lipsum() }}{{ response }}", "pointwise", "unknown name 'lipsum'", id="random words"),
        pytest.param("{{ prompt }}", "pointwise", "does not show 'response'", id="without the response"),
        pytest.param("{{ first }}", "pairwise", "does not show 'second'", id="without the second"),
        pytest.param(
            "{% if response %}right{% endif %}", "pointwise", "does not show 'response'", id="only asked about"
        ),
        pytest.param("{{ 1 if response else 2 }}", "pointwise", "does not show 'response'", id="only a condition"),
        pytest.param("{% set response = 1 %}{{ response }}", "pointwise", "does not show 'response'", id="covered up"),
        pytest.param("{{ response }}\n{% for %}", "pointwise", r"not valid \(line 2: ", id="syntax"),
        pytest.param("{{ response }}{% if prompt %}", "pointwise", r"not valid \(line 1: ", id="no end"),
        pytest.param("{{ response|centre }}", "pointwise", "No filter named 'centre'", id="unknown filter"),
        pytest.param("{{ response|random }}", "pointwise", "No filter named 'random'", id="chance"),
        pytest.param("\n{% macro f() %}{% endmacro %}{{ response }}", "pointwise", "line 2: .* a macro", id="macro"),
        pytest.param("{% include 'x' %}{{ response }}", "pointwise", "cannot contain include", id="include"),
        pytest.param("{% set x %}a{% endset %}{{ response }}", "pointwise", "a set block", id="set block"),
        pytest.param(
            "{% for x in fields recursive %}{% endfor %}{{ response }}", "pointwise", "a recursive loop", id="recursive"
        ),
        pytest.param("{{ response.__class__ }}", "pointwise", "'__class__' is not allowed", id="class"),
        pytest.param("{{ " + "(" * 3000 + "response" + ")" * 3000 + " }}", "pointwise", "nested", id="nested"),
        pytest.param(
            "{% for x in [1] %}" * 21 + "{{ response }}" + "{% endfor %}" * 21,
            "pointwise",
            "too many statically nested blocks",
            id="loops within each other",
        ),
        pytest.param(
            "{% if 1 %}" * 101 + "{{ response }}" + "{% endif %}" * 101,
            "pointwise",
            "too many levels of indentation",
            id="conditions within each other",
        ),
        pytest.param("{{ " + "9" * 5000 + " }}{{ response }}", "pointwise", "5000 digits", id="number"),
        pytest.param("{% break %}{{ response }}", "pointwise", "'break' outside loop", id="break"),
        pytest.param("{{ dict(a=1, a=2) }}{{ response }}", "pointwise", "keyword argument repeated: a", id="twice"),
    ],
)
def test_a_bad_template_is_refused_before_there_is_a_response(template: str, mode: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        Question.compile(spec(template, mode), "judges.3")
    assert caught.value.where == "judges.3.template"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            "{{ fields.solution }}", "no field 'solution'; the fields are 'answer', 'items', 'question'", id="field"
        ),
        pytest.param("{{ fields['solution'] }}", "no field 'solution'", id="field, in brackets"),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", "range of more than", id="endless loop"),
        pytest.param(
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            f"more than {MOST_TURNS} iterations",
            id="loops in a loop",
        ),
        pytest.param("{{ response['__class__'] }}", "'__class__' of 'str' object is unsafe", id="class"),
        pytest.param("{{ namespace(_x=1) }}", "unsafe name '_x'", id="namespace"),
        pytest.param("{{ fields.update({'answer': 20}) }}", "unsafe", id="change of the entry"),
        pytest.param(
            "{% for i in range(9999) %}{{ response * 999 }}{% endfor %}", f"than {LONGEST_TEXT}", id="too long"
        ),
        pytest.param("{{ 'x' * 10**9 }}", f"more than {LONGEST_TEXT} characters", id="too long at once"),
        pytest.param("{{ [1] * 10**9 }}", f"a list of more than {MOST_TURNS} items", id="too long a list"),
        pytest.param("{% set x = response %}" + "{% set x = x ~ x %}" * 40 + "{{ x }}", "characters", id="doubled"),
        pytest.param("{% set x = response %}" + "{% set x = x + x %}" * 40 + "{{ x }}", "characters", id="added"),
        pytest.param("{% set x = [1] %}" + "{% set x = x + x %}" * 40 + "{{ x }}", "a list of", id="list, added"),
        pytest.param("{% set x = [1] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}", "a list of", id="list in a list"),
        pytest.param("{% set x = (1,) %}" + "{% set x = (x, x) %}" * 64 + "{{ {x: 1} }}", "a list of", id="hashed"),
        pytest.param("{% set x = {} %}" + "{% set x = {1: x, 2: x} %}" * 64, "a list of", id="dict in a dict"),
        pytest.param("{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 64, "a list of", id="dict, called"),
        pytest.param("{% set x = {} %}" + "{% set x = {1: x.items(), 2: x.items()} %}" * 64, "a list of", id="views"),
        pytest.param("{% set x = 1 %}" + "{% set x = [x, x]|list %}" * 64, "a list of", id="list, filtered"),
        pytest.param(
            "{% set x = namespace(a=[1]) %}{% set y = namespace(a=[1]) %}{% for i in range(64) %}"
            "{% set x.a = [x.a, x.a] %}{% set y.a = [y.a, y.a] %}{% endfor %}{{ x.a == y.a }}",
            "a list of",
            id="compared",
        ),
        pytest.param("{{ (['x' * 999999] * 9999)|map('upper')|list|length }}", "characters", id="long text, often"),
        pytest.param("{{ ('x' * 999999)|list|length }}", "a list of", id="letters as a list"),
        pytest.param("{{ ['x' * 99999]|map('list')|list|length }}", "a list of", id="letters as lists"),
        pytest.param(
            "{% set x = 'a ' * 499999 %}{% for i in range(9999) %}{% set y = x|wordcount %}{% endfor %}",
            f"process more than {MOST_WORK} characters",
            id="a costly filter, often",
        ),
        pytest.param(
            "{% set x = 'a ' * 499999 %}{% for i in range(9999) %}{% set y = x.split() %}{% endfor %}",
            f"process more than {MOST_WORK} characters",
            id="a costly method, often",
        ),
        pytest.param(
            "{% set x = ['a ' * 499999] %}{% for i in range(9999) %}{% set y = x|map('title')|join %}{% endfor %}",
            f"process more than {MOST_WORK} characters",
            id="a costly filter within another, often",
        ),
        pytest.param("{% set x = response %}" + "{% set x = x|replace('1', x) %}" * 40, "characters", id="replaced"),
        pytest.param("{% set x = [response * 999] * 9999 %}{{ x|join }}", "characters", id="list put together"),
        pytest.param("{{ response.rjust(10**9) }}", "'rjust' of 'str' object is unsafe", id="padded"),
        pytest.param("{{ '{:999999999d}'.format(1) }}", "'format' of 'str' object is unsafe", id="format"),
        pytest.param("{{ '%999999999d' % 1 }}", "formats with %", id="%"),
        pytest.param("{{ (5).to_bytes(10**9) }}", "'to_bytes' of 'int' object is unsafe", id="bytes"),
        pytest.param("{{ 9**9**9**9 }}", "an integer of more than", id="power"),
        pytest.param("{{ 1.5|round(10**9) }}", "rounds to", id="rounded"),
        pytest.param("{{ fields|tojson(10**9) }}", "indents by", id="indented"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="division"),
        pytest.param("{{ prompt + 1 }}", "TypeError", id="text and number"),
        pytest.param("{{ raise_exception('no picture') }}", r"\(no picture\)", id="of its own"),
        pytest.param("{{ self }}", "TypeError", id="no plain value"),
    ],
)
def test_a_template_that_does_not_take_an_entry_says_why_and_stays_within_its_bounds(
    template: str, message: str
) -> None:
    with pytest.raises(JudgeError, match=message) as caught:
        rendered("{{ response }}" + template)
    assert "judge 'tutor'" in str(caught.value)


def test_a_template_of_a_file_is_read_from_there(tmp_path: Path) -> None:
    file = tmp_path / "judge.jinja"
    file.write_text("{{ prompt }}{{ response }} ü", encoding="utf-8")
    named = spec(None, template_file=str(file))
    assert Question.compile(named, "judges.0").about(PROMPT, "19").text == "12+7=19 ü"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "No such file", id="not there"),
        pytest.param(b"\xff", "not UTF-8", id="no text"),
        pytest.param(b"x" * (LONGEST_TEMPLATE + 1), "more than 20000 characters", id="too long"),
        pytest.param(
            b"{{ response }}\n{{ oops }}", "line 2 of the template uses the unknown name 'oops'", id="unknown name"
        ),
    ],
)
def test_a_bad_template_of_a_file_is_told_with_the_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "judge.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        Question.compile(spec(None, template_file=str(file)), "judges.0")
    assert str(file) in str(caught.value)


@given(st.text(alphabet="{}%|~+*().'[]_ 019abrespon", max_size=40))
def test_template_is_refused_or_fails_with_an_error_or_gives_text(written: str) -> None:
    with suppress(SpecError, JudgeError):
        question = Question.compile(spec("{{ response }}" + written), "judges.0")
        assert len(question.about(PROMPT, "19").text) <= LONGEST_TEXT
