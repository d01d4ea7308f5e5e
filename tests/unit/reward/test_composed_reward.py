"""Several rewards composed into one, and their section of a spec."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plug_in_package import Install, installer
from pydantic import ValidationError

from gcore.config import parse_spec
from gcore.config.reward import RewardPart, RewardSpec
from gcore.errors import SpecError
from gcore.plugins import PluginFault
from gcore.reward.api import (
    CheckedReward,
    OpenReward,
    Response,
    RewardError,
    RewardResult,
    compose_group,
    standardise,
)
from gcore.reward.pool import DirectScorer
from gcore.reward.scorer import Scorer, reward_functions
from gcore.types import Prompt, PromptRef

ANSWER = {"prompt": "", "answer": "46", "other": "x"}
Parts = list[dict[str, Any]]
PARTS: Parts = [
    {"name": "numeric", "weight": 2.0},
    {"name": "regex", "label": "form", "options": {"pattern": r"The answer is \d+\."}, "weight": 0.5},
]


def reward(parts: Parts, compose: str = "sum") -> Callable[[str], RewardResult]:
    opened = OpenReward.of(RewardSpec.model_validate({"parts": parts, "compose": compose}))
    return lambda response: opened(response, ANSWER)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Rewards of other packages."""
    return installer(tmp_path, monkeypatch, "gcore.rewards")


@pytest.mark.parametrize(
    ("compose", "response", "value"),
    [
        ("sum", "The answer is 46.", 2.5),
        ("sum", "46", 2.0),
        ("sum", "The answer is 47.", 0.5),
        ("sum", "", 0.0),
        ("min", "The answer is 46.", 0.5),
        ("min", "46", 0.0),
    ],
)
def test_parts_come_to(compose: str, response: str, value: float) -> None:
    assert reward(PARTS, compose)(response).value == value


@pytest.mark.parametrize(("response", "value"), [("The answer is 46.", 3.0), ("46", 0.0), ("The answer is 47.", 0.0)])
def test_a_gate_decides_whether_the_others_count(response: str, value: float) -> None:
    gate = [PARTS[1] | {"weight": 1.0}, {"name": "numeric", "weight": 3.0}]
    assert reward(gate, "gate")(response).value == value


def test_every_part_is_kept_under_its_label_with_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reward(PARTS)("The answer is 47.")
    assert found.parts == (("numeric", 0.0), ("form", 1.0), ("numeric.correct", 0.0))


def test_parts_behind_a_closed_gate_are_kept_too() -> None:
    gate = [PARTS[1] | {"weight": 1.0}, {"name": "numeric"}]
    assert reward(gate, "gate")("46").parts == (("form", 0.0), ("numeric", 1.0), ("numeric.correct", 1.0))


def test_a_part_may_look_at_another_answer() -> None:
    exact = [{"name": "exact", "answer": "other"}, {"name": "exact", "label": "main"}]
    assert reward(exact)("x").parts[:2] == (("exact", 1.0), ("main", 0.0))


numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_a_sum_is_that_of_weight_times_value_and_a_min_its_smallest(pairs: list[tuple[float, float]]) -> None:
    parts = tuple(RewardPart(name="n", label=f"part{n}", weight=weight) for n, (weight, _) in enumerate(pairs))
    rewards = [
        CheckedReward("n", lambda response, fields, spec, value=value: RewardResult(value)) for _, value in pairs
    ]  # type: ignore[misc]

    def come_to(compose: str) -> float:
        of_gate = (RewardPart(name="n", label="gate"), *parts[1:])
        spec = RewardSpec.model_validate({"parts": of_gate if compose == "gate" else parts, "compose": compose})
        return OpenReward(spec, tuple((spec.of_part(p), r) for p, r in zip(spec.parts, rewards, strict=True)))(
            "", {}
        ).value

    weighted = [weight * value for weight, value in pairs]
    assert come_to("sum") == math.fsum(weighted)
    assert come_to("min") == min(weighted)
    assert come_to("gate") == (math.fsum(weighted[1:]) if pairs[0][1] > 0 else 0.0)


def standardised(*parts: Mapping[str, float], **more: Any) -> RewardSpec:
    """A reward of parts of these labels and weights, standardised within the group."""
    given = [{"name": "n", "label": label, "weight": weight} for part in parts for label, weight in part.items()]
    return RewardSpec.model_validate({"parts": given, "compose": "standardised"} | more)


groups = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8)


@given(groups, st.sampled_from([0, 1]), st.sampled_from([1e-8, 1e-4, 0.5]), numbers, numbers)
def test_standardised_parts_are_distances_from_the_groups_mean_in_its_deviations(
    group: list[tuple[float, float]], ddof: int, eps: float, first: float, second: float
) -> None:
    spec = standardised({"a": first, "b": second}, std_ddof=ddof, std_eps=eps)
    scored = compose_group(spec, [(RewardResult(a), RewardResult(b)) for a, b in group])
    parts = np.array(group)
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = (parts - parts.mean(0)) / (parts.std(0, ddof=ddof) + eps)
    z[:, (parts == parts[0]).all(0)] = 0.0
    for one, (a, b), number in zip(scored, group, z @ [first, second], strict=True):
        assert isinstance(one, RewardResult)
        assert one.parts == (("a", a), ("b", b)), "the parts stay as they were"
        assert one.value == pytest.approx(number, rel=1e-6, abs=1e-6 * (1 + abs(first) + abs(second)))


def test_a_clip_score_and_a_judge_count_equally_on_any_scale() -> None:
    # advantages of each reward model, by torch.Tensor.std and 1e-8, times its weight
    clip, judge = (0.27, 0.29, 0.28, 0.32), (3.0, 9.0, 9.0, 3.0)
    spec = standardised({"clip": 1.0, "judge": 0.5})
    found = compose_group(spec, [(RewardResult(a), RewardResult(b)) for a, b in zip(clip, judge, strict=True)])
    expected = [-1.35883237, 0.43301270, -0.02989713, 0.95571681]
    assert [one.value for one in found if isinstance(one, RewardResult)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("group", [[3.0], [2.0, 2.0, 2.0], [0.1] * 3])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_values_and_a_single_response_are_0(group: list[float], eps: float) -> None:
    for ddof in (0, 1):
        assert standardise(group, ddof, eps) == [0.0] * len(group)


def test_a_response_with_an_error_has_no_part_in_the_mean_of_the_others() -> None:
    error = RewardError("it failed")
    spec = standardised({"a": 2.0})
    first, failed, last = compose_group(spec, [(RewardResult(1.0),), error, (RewardResult(3.0),)])
    assert failed is error
    assert isinstance(first, RewardResult)
    assert isinstance(last, RewardResult)
    assert (first.value, last.value) == pytest.approx((-math.sqrt(2), math.sqrt(2)))
    assert compose_group(spec, [error, error]) == [error, error]


def test_a_part_without_a_number_has_no_weight_and_no_part_in_the_mean() -> None:
    parts = [{"name": "n", "label": "a"}, {"judge": "shown", "weight": 0}]
    spec = RewardSpec.model_validate({"parts": parts, "compose": "standardised"})
    given = [(RewardResult(1.0), None), (RewardResult(3.0), RewardResult(7.0))]
    first, last = compose_group(spec, given)
    assert isinstance(first, RewardResult)
    assert isinstance(last, RewardResult)
    assert first.parts == (("a", 1.0),)
    assert last.parts == (("a", 3.0), ("shown", 7.0))
    assert (first.value, last.value) == pytest.approx((-math.sqrt(0.5), math.sqrt(0.5)))


def test_a_response_that_is_scored_alone_has_the_sum_of_its_parts() -> None:
    spec = standardised({"a": 2.0, "b": 1.0})
    scored = compose_group(
        spec, [(RewardResult(1.0), RewardResult(0.5)), (RewardResult(3.0), RewardResult(4.0))], alone=True
    )
    assert [one.value for one in scored if isinstance(one, RewardResult)] == [2.5, 10.0]


async def test_each_part_of_a_standardised_reward_is_scored_apart_and_loaded_once() -> None:
    parts = [{"name": "numeric", "weight": 2.0}, {"name": "length", "options": {"limit": 2, "slope": 1.0}}]
    told = spec(parts=parts, compose="standardised")
    assert [one.name for one in reward_functions(told, {})] == ["numeric", "length"]
    prompt = Prompt(PromptRef(0, 0, 0), "", (1,), ANSWER)
    responses = [Response("46", 2), Response("46", 4), Response("4", 2), Response("4", 2)]
    scorer = Scorer(DirectScorer(), {})
    found = await scorer.score(told, prompt, responses)
    values = [one.value for one in found if isinstance(one, RewardResult)]
    z = math.sqrt(3) / 2
    assert values == pytest.approx([2 * z + 0.5, 2 * z - 1.5, -2 * z + 0.5, -2 * z + 0.5])
    alone = await scorer.score(told, prompt, responses, alone=True)
    assert [one.value for one in alone if isinstance(one, RewardResult)] == [3.0, 2.0, 1.0, 1.0]
    whole = OpenReward.of(told)
    assert whole.is_batch
    assert whole.score_group(responses, ANSWER) == list(found)


def test_a_part_that_cannot_score_is_named_and_nothing_is_filled_in(install: Install) -> None:
    install("pack_bad", "bad = pack_bad:score", "def score(response, fields, spec):\n    raise KeyError('gone')\n")
    with pytest.raises(RewardError, match="part 'worse': reward 'bad' raised KeyError: 'gone'") as caught:
        reward([{"name": "bad", "label": "worse"}, PARTS[0]])("46")
    assert "pack_bad.py" in caught.value.trace


def test_parts_that_come_to_no_number_are_an_error(install: Install) -> None:
    code = "from gcore.reward import RewardResult\ndef score(response, fields, spec):\n    return RewardResult(3e38)\n"
    install("pack_big", "big = pack_big:score", code)
    with pytest.raises(RewardError, match=r"sum up to 6e\+38, which is not finite in float32"):
        reward([{"name": "big", "weight": 2.0}])("46")


def test_an_unknown_part_is_refused_with_its_place_and_the_nearest_name() -> None:
    with pytest.raises(
        PluginFault, match=r"reward\.parts\.1\.name: no reward is called 'regexx', did you mean 'regex'"
    ):
        reward([PARTS[0], {"name": "regexx"}])


def test_a_list_is_short_for_parts_that_are_summed_up() -> None:
    parts = [{"name": "exact"}, {"name": "/m.py:score", "weight": 0.5}]
    short = RewardSpec.model_validate(parts)
    assert short == RewardSpec.model_validate({"parts": parts})
    assert short.model_dump(exclude_unset=True) == {"parts": tuple(parts)}
    assert [part.shown_as for part in short.parts] == ["exact", "score"]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        pytest.param([], "the list of rewards is empty", id="empty"),
        pytest.param(
            [{"name": "/a.py:score"}, {"name": "/b.py:score"}], "the label 'score'", id="functions of one name"
        ),
        pytest.param([{"name": "exact"}, {"name": "/b.py:exact"}], "the label 'exact'", id="a function and a rule"),
        pytest.param([{"weight": 1.0}], "a part needs either a name or a judge", id="neither name nor file"),
    ],
)
def test_a_list_of_rewards_that_cannot_be_told_apart_is_refused(rewards: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RewardSpec.model_validate(rewards)


def spec(**reward: Any) -> Any:
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
    return parse_spec(tree | {"rollout": {"max_new_tokens": 4}, "reward": reward}).reward


@pytest.mark.parametrize(
    ("told", "said"),
    [
        pytest.param({"parts": [{"name": "exact"}] * 2}, "two parts have the label 'exact'; set labels", id="twice"),
        pytest.param({"parts": [{"name": "exact", "weight": math.inf}]}, "parts.0.weight", id="infinite weight"),
        pytest.param({"parts": [{"name": "exact", "weight": math.nan}]}, "parts.0.weight", id="NaN weight"),
        pytest.param({"parts": [{"name": "exact", "wieght": 2}]}, "did you mean 'reward.parts.0.weight'", id="key"),
        pytest.param({"parts": [{"name": "exact", "label": "a b"}]}, "parts.0.label", id="label"),
        pytest.param({"parts": [{"name": "exact"}], "name": "math"}, "not both", id="name and parts"),
        pytest.param({"parts": [{"name": "exact"}], "options": {"a": 1}}, "not both", id="options and parts"),
        pytest.param({"compose": "min"}, "compose needs parts", id="no parts"),
        pytest.param({"compose": "mean", "parts": [{"name": "exact"}]}, "compose", id="unknown compose"),
        pytest.param({"compose": "gate", "parts": [{"name": "exact"}]}, "needs a part after the gate", id="gate alone"),
        pytest.param(
            {"compose": "gate", "parts": [{"name": "exact", "weight": 2}, {"name": "numeric"}]},
            "part 'exact' is the gate, which has no weight",
            id="gate with weight",
        ),
        pytest.param({"parts": [{"name": "exact", "label": f"l{n}"} for n in range(17)]}, "at most 16", id="many"),
        pytest.param({"compose": "standardised"}, "compose needs parts", id="no parts to standardise"),
        pytest.param({"std_ddof": 0, "parts": [{"name": "exact"}]}, "need compose: standardised", id="ddof of a sum"),
        pytest.param({"std_eps": 0.1}, "need compose: standardised", id="eps of one reward"),
        pytest.param(
            {"compose": "standardised", "parts": [{"name": "exact"}], "std_ddof": 2}, "std_ddof", id="unknown ddof"
        ),
        pytest.param(
            {"compose": "standardised", "parts": [{"name": "exact"}], "timeout_value": 0},
            "timeout_value replaces a whole reward",
            id="value of a timeout",
        ),
        pytest.param({"timeout_s": 0}, "timeout_s", id="no time"),
        pytest.param({"timeout_value": math.inf}, "timeout_value", id="infinite value"),
        pytest.param({"timeout_value": 1e39}, "timeout_value", id="value that float32 has not"),
        pytest.param(
            {"parts": [{"name": "exact", "label": "a.correct"}, {"name": "numeric", "label": "a"}]},
            "'a.correct' is the name that a component of part 'a' would get",
            id="label of a part's part",
        ),
    ],
)
def test_a_spec_that_says_nonsense_of_its_reward_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**told)
    assert said in str(caught.value)


def test_a_standardised_reward_needs_groups_of_two() -> None:
    reward = {"parts": PARTS, "compose": "standardised"}
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"max_new_tokens": 4}}
    tree |= {"reward": reward, "train": {"advantage": "reinforce_pp"}}
    assert parse_spec(tree | {"flow": {"steps": 1, "samples_per_prompt": 2}})
    with pytest.raises(SpecError, match=r"the reward of source 'data' has compose: standardised.*per_prompt is 1"):
        parse_spec(tree | {"flow": {"steps": 1, "samples_per_prompt": 1}})


def test_a_composed_reward_survives_the_store() -> None:
    told = spec(parts=PARTS, compose="min", timeout_s=3)
    assert RewardSpec.model_validate_json(told.model_dump_json()) == told
    assert told.shown_as == "min(numeric, form)"
    assert not {"std_ddof", "std_eps"} & told.model_dump().keys(), "older daemons do not know these keys"
    told = spec(parts=PARTS, compose="standardised", std_ddof=0, std_eps=0.1)
    assert RewardSpec.model_validate_json(told.model_dump_json()) == told
    assert told.shown_as == "standardised(numeric, form)"


@pytest.mark.parametrize(
    ("told", "fields"),
    [
        ({}, ("answer",)),
        ({"answer": "sum"}, ("sum",)),
        ({"name": "regex", "options": {"pattern": "a"}}, ()),
        ({"parts": [{"name": "length"}, {"name": "math", "answer": "x"}, {"name": "exact"}]}, ("x", "answer")),
        ({"name": "of_another_package"}, ()),
        ({"name": "of_another_package", "answer": "letter"}, ("letter",)),
    ],
)
def test_an_entry_must_have_the_fields_that_its_rewards_look_at(told: dict[str, Any], fields: tuple[str, ...]) -> None:
    assert spec(**told).answers == fields
