"""Rewards are found by name, and third-party ones are contained."""

from __future__ import annotations

import gc
import json
import math
import sys
import warnings
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
from plug_in_package import Install, installer

from gcore.config.reward import RewardSpec
from gcore.errors import SpecError
from gcore.reward.__main__ import answer_line
from gcore.reward.api import CheckedReward, RewardError, RewardResult, batch_reward, find_reward, with_all_arguments
from gcore.reward.pool import parse_answer

SPEC = RewardSpec()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with rewards on the path, as an installer would."""
    return installer(tmp_path, monkeypatch, "gcore.rewards")


@pytest.mark.parametrize("name", ["numeric", "exact"])
def test_gcores_own_rewards_are_found(name: str) -> None:
    assert find_reward(name)("46", {"answer": "46"}, SPEC).value == 1.0


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(SpecError, match=r"reward\.name: no reward is called 'numerc', did you mean 'numeric'\?.*exact"):
        find_reward("numerc")


def test_a_name_that_is_far_off_is_answered_with_all() -> None:
    with pytest.raises(
        SpecError,
        match=r"no reward is called 'zzz'\. Known: (agent, )?code, environment, exact, length, math, numeric, regex",
    ) as caught:
        find_reward("zzz")
    assert caught.value.exit_code == 2


def test_a_reward_of_another_package_is_found(install: Install) -> None:
    install(
        "pack_letters",
        "letters = pack_letters:score",
        "from gcore.reward.api import RewardResult\n"
        "def score(response, fields, spec):\n    return RewardResult(len(response), (('letters', len(response)),))\n",
    )
    assert find_reward("letters")("abcd", {}, SPEC) == RewardResult(4.0, (("letters", 4.0),))


@pytest.mark.parametrize(
    ("package", "target", "code", "message"),
    [
        pytest.param("pack_a", "pack_a:score", "1/0", "ZeroDivisionError: division by zero", id="raises at import"),
        pytest.param("pack_b", "pack_b:score", "x = (", "SyntaxError", id="is no Python"),
        pytest.param("pack_c", "pack_c:other", "", "has no attribute 'other'", id="lacks the function"),
        pytest.param("pack_d", "nowhere_at_all:score", "", "No module named 'nowhere_at_all'", id="lacks the module"),
        pytest.param("pack_e", "pack_e:score", "score = 3", "is an int, which is not callable", id="is no function"),
        pytest.param(
            "pack_f", "pack_f:score", "raise RuntimeError('one\\ntwo')", r"RuntimeError: one\)", id="two lines"
        ),
        pytest.param("pack_g", "pack_g:score", "raise ValueError", r"\(ValueError\)", id="no words"),
        pytest.param("pack_h", "pack_h:score", "import sys; sys.exit('bye')", "SystemExit: bye", id="leaves Python"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_told_in_one_sentence(
    install: Install, package: str, target: str, code: str, message: str
) -> None:
    install(package, f"broken = {target}", code)
    with pytest.raises(SpecError, match=message) as caught:
        find_reward("broken")
    assert "\n" not in str(caught.value)
    assert "'broken'" in str(caught.value)


def test_two_packages_with_one_name_are_told_apart(install: Install) -> None:
    install("pack_one", "mine = pack_one:score", "score = print")
    install("pack_two", "mine = pack_two:score", "score = print")
    with pytest.raises(SpecError, match="provided more than once, by pack_one:score and pack_two:score"):
        find_reward("mine")


def gives(result: Any) -> CheckedReward:
    return CheckedReward("mine", lambda response, fields, spec: result)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, -1e300, 10**400, "x", None, [1]], ids=repr)
def test_a_reward_that_is_no_finite_number_is_an_error(bad: Any) -> None:
    with pytest.raises(RewardError, match="reward 'mine' returned"):
        gives(RewardResult(bad))("", {}, SPEC)
    with pytest.raises(RewardError, match="as form"):
        gives(RewardResult(1.0, (("form", bad),)))("", {}, SPEC)


class _Odd:
    """Possible parts of a result: a tensor of several numbers is invalid, for example."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _parts() -> Iterator[tuple[str, float]]:
    yield "form", 1.0
    raise KeyError("more")


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(RewardResult(_Odd()), id="value"),  # type: ignore[arg-type]
        pytest.param(RewardResult(1.0, ((_Odd(), 1.0),)), id="name"),  # type: ignore[arg-type]
        pytest.param(RewardResult(1.0, _parts()), id="parts"),  # type: ignore[arg-type]
    ],
)
def test_a_result_that_raises_when_it_is_looked_at_is_an_error(result: RewardResult) -> None:
    with pytest.raises(RewardError, match="reward 'mine' raised"):
        gives(result)("", {}, SPEC)


@pytest.mark.parametrize("bad", ["x" * 10_000_000, ["x"] * 1_000_000], ids=["text", "list"])
def test_a_result_of_any_size_is_told_in_a_sentence(bad: Any) -> None:
    with pytest.raises(RewardError) as error:
        gives(RewardResult(bad))("", {}, SPEC)
    assert len(str(error.value)) < 300


def test_a_reward_that_leaves_python_has_raised() -> None:
    with pytest.raises(RewardError, match="reward 'mine' raised SystemExit: 3"):
        CheckedReward("mine", lambda response, fields, spec: sys.exit(3))("", {}, SPEC)


@pytest.mark.parametrize("what", [None, 17, "x" * 10_000_000], ids=["None", "a number", "ten megabytes"])
def test_any_reward_error_survives_serialization(what: Any) -> None:
    (told,) = parse_answer(json.loads(answer_line([RewardError(what, where=what, fix=what)])))
    assert isinstance(told, RewardError)
    assert len(str(told)) < 10_000


@pytest.mark.parametrize(("given", "value"), [(1, 1.0), (0.25, 0.25), (True, 1.0)])
def test_a_number_is_a_result(given: Any, value: float) -> None:
    assert gives(given)("", {}, SPEC) == RewardResult(value)


@pytest.mark.parametrize("kind", [numpy.float32, numpy.int64, numpy.bool_, Fraction, Decimal, numpy.array])
def test_a_number_of_another_library_is_a_result(kind: Any) -> None:
    result = gives(kind(1))("", {}, SPEC)
    assert result == RewardResult(1.0)
    assert type(result.value) is float


def test_a_number_that_no_float_can_hold_is_an_error() -> None:
    with pytest.raises(RewardError, match="as value, which is not a number"):
        gives(10**400)("", {}, SPEC)


@pytest.mark.filterwarnings("error")
def test_an_asynchronous_reward_is_reported_in_a_sentence_without_a_warning() -> None:
    async def late(response: str, fields: Any, spec: RewardSpec) -> float:
        return 1.0

    async def late_group(responses: Any) -> list[float]:
        return [1.0]

    for reward in (late, batch_reward(late_group)):
        with pytest.raises(RewardError, match="a coroutine, because it is written with `async def`"):
            CheckedReward("mine", reward)("", {}, SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of files that other tests left to the collector
        gc.collect()


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        pytest.param(lambda response: len(response), 3.0, id="the response alone"),
        pytest.param(lambda response, fields: fields["n"], 7.0, id="response and fields"),
        pytest.param(lambda response, fields, spec: 0.5, 0.5, id="all three"),
        pytest.param(lambda *args: len(args), 3.0, id="any number of them"),
    ],
)
def test_a_reward_takes_as_many_arguments_as_it_wants(reward: Any, value: float) -> None:
    assert CheckedReward("mine", with_all_arguments(reward))("abc", {"n": 7}, SPEC).value == value


@pytest.mark.parametrize("bad", ["1.0", None, (1.0, ())], ids=repr)
def test_a_result_of_another_type_is_an_error(bad: Any) -> None:
    with pytest.raises(RewardError, match="neither a number nor a RewardResult"):
        gives(bad)("", {}, SPEC)


def test_a_reward_that_raises_is_an_error_with_its_reason() -> None:
    def broken(response: str, fields: Any, spec: RewardSpec) -> RewardResult:
        return RewardResult(fields["nothing"])

    with pytest.raises(RewardError, match="reward 'mine' raised KeyError: 'nothing'"):
        CheckedReward("mine", broken)("", {}, SPEC)


def test_a_reward_error_of_the_reward_itself_goes_through_as_it_is() -> None:
    def refuses(response: str, fields: Any, spec: RewardSpec) -> RewardResult:
        raise RewardError("cannot say")

    with pytest.raises(RewardError, match=r"^cannot say$"):
        CheckedReward("mine", refuses)("", {}, SPEC)


def test_numbers_become_floats() -> None:
    result = gives(RewardResult(True, (("a", 1),)))("", {}, SPEC)
    assert (result.value, result.parts) == (1.0, (("a", 1.0),))
    assert type(result.value) is float
