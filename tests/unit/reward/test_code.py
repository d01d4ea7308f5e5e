"""Programs and their tests, in the forms of responses and data sets."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import RewardSpec
from gcore.reward.api import RewardError
from gcore.reward.code import ProgramChecks, code, extract_program, parse_checks


@pytest.mark.parametrize(
    ("response", "program"),
    [
        pytest.param("x = 1", "x = 1", id="no fence"),
        pytest.param("So:\n```python\nx = 1\n```\nDone.", "x = 1\n", id="fence"),
        pytest.param("```\nx = 1\n```", "x = 1\n", id="fence without a language"),
        pytest.param("```py\nx = 1\n```\nbetter:\n```python3\nx = 2\n```", "x = 2\n", id="the last one"),
        pytest.param("```Python\r\nx = 1\r\n```", "x = 1\r\n", id="other line ends"),
        pytest.param("```python\nx = 1", "```python\nx = 1", id="never closed"),
        pytest.param("```python\ns = '''```'''\n```", "s = '''```'''\n", id="a fence within a line"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_the_program_of_a_response(response: str, program: str) -> None:
    assert extract_program(response) == program


PAIRS = ProgramChecks(pairs=(("1", "2"), ("a\nb", "c")))


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        pytest.param("assert f(1)", ProgramChecks(statements=("assert f(1)",)), id="statement"),
        pytest.param(
            ["assert f(1)", "assert f(2)"], ProgramChecks(statements=("assert f(1)", "assert f(2)")), id="statements"
        ),
        pytest.param([{"input": 1, "output": "2"}, {"input": ["a", "b"], "output": "c"}], PAIRS, id="pairs"),
        pytest.param({"inputs": ["1", ["a", "b"]], "outputs": [2, "c"]}, PAIRS, id="lists"),
        pytest.param(json.dumps({"inputs": ["1", "a\nb"], "outputs": ["2", "c"]}), PAIRS, id="JSON"),
        pytest.param("[x] = f(1)", ProgramChecks(statements=("[x] = f(1)",)), id="a statement that begins like JSON"),
    ],
)
def test_the_tests_of_an_answer(answer: Any, tests: ProgramChecks) -> None:
    assert parse_checks(answer, "answer", 100) == tests


def test_only_so_many_tests_are_run() -> None:
    assert parse_checks(["a()", "b()", "c()"], "answer", 2).count == 2


@pytest.mark.parametrize(
    "answer",
    ["", "  ", [], {}, 5, True, [1], ["a", {}], {"inputs": ["1"], "outputs": []}, [{"input": "1"}], "[]"],
    ids=repr,
)
def test_an_answer_without_tests_is_an_error(answer: Any) -> None:
    with pytest.raises(RewardError, match="in field 'tests' has no tests"):
        parse_checks(answer, "tests", 100)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("71", "asserts and calls nothing"),
        ("def check(f):\n    assert f(1) == 2", "asserts and calls nothing"),
        ("assert f(1) ==", "is not valid Python"),
    ],
    ids=["an answer to a sum", "a check that nobody calls", "half a line"],
)
def test_a_test_that_tells_no_program_from_another_is_an_error(test: str, why: str) -> None:
    with pytest.raises(RewardError, match=f"in field 'tests' {why}"):
        parse_checks(["assert f(2)", test], "tests", 100)
    called = "def check(f):\n    assert f(1) == 2\ncheck(g)"
    assert parse_checks(called, "tests", 100).statements == (called,)


@given(st.text())
def test_any_response_has_a_program(response: str) -> None:
    assert isinstance(extract_program(response), str)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_answer_has_tests_or_is_an_error(answer: Any) -> None:
    with contextlib.suppress(RewardError):
        assert parse_checks(answer, "answer", 3).count in (1, 2, 3)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"options": {"timeout_s": 9.5}}, "too close to reward.timeout_s"),
        ({"options": {"timeout_s": 0}}, "reward.options.timeout_s is 0"),
        ({"options": {"memory_mb": 8}}, "reward.options.memory_mb is 8"),
        ({"options": {"value": "some"}}, "reward.options.value is 'some'"),
        ({"options": {"packages": "yes"}}, "reward.options.packages is 'yes'"),
        ({"options": {"before": "prompt"}}, "no text in field 'prompt'"),
        ({"options": {"timeout": 1}}, "has no option 'timeout'"),
    ],
)
def test_a_wrong_option_is_an_error(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        code("x", {"answer": "f()"}, RewardSpec(name="code", **reward))


def test_programs_are_not_run_beside_an_event_loop() -> None:
    raised = []

    def start() -> None:
        try:
            code.start(RewardSpec(name="code"))
        except RewardError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert raised == ["reward 'code' works only in the main thread. Use RewardPool or RewardTrial"]
