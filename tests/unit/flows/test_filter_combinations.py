"""Invalid combinations of estimators, losses and corrections; all others are valid."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError
from gcore.flows.filters import untrainable_reason
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan


def spec(
    *,
    flow: str = "own",
    samples: int = 2,
    groups: int = 32,
    correction: str = "none",
    top_p: float = 1.0,
    staleness: int = 0,
    **train: Any,
) -> JobSpec:
    return parse_spec(
        {
            "name": "job",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"name": flow, "steps": 3, "samples_per_prompt": samples, "groups_per_step": groups},
            "rollout": {"max_new_tokens": 8, "correction": correction, "top_p": top_p, "staleness": staleness},
            "train": train,
        }
    )


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_of_one_is_refused_for_estimators_that_compare_a_group(advantage: str) -> None:
    with pytest.raises(SpecError, match=rf"'{advantage}' compares the samples of a group; use at least 2"):
        spec(samples=1, advantage=advantage)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "remax", "gae"])
def test_a_group_of_one_will_do_for_estimators_that_look_ahead(advantage: str) -> None:
    assert not spec(samples=1, advantage=advantage).train.compares_group


def test_a_group_of_one_will_do_where_nothing_is_compared() -> None:
    assert not spec(samples=1, loss="sft").train.compares_group


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "mis", "decoupled"])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_every_estimator_goes_with_every_loss_and_every_correction(loss: str, correction: str) -> None:
    aggregation = "seq-mean-token-mean" if loss == "gspo" else "token-mean"
    for advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gae"):
        spec(loss=loss, correction=correction, advantage=advantage, aggregation=aggregation)


def test_every_kl_goes_with_every_place() -> None:
    for where, kind in product(("loss", "reward"), ("k1", "k2", "k3", "k3+")):
        assert spec(kl_coef=0.1, kl_in=where, kl_estimator=kind).train.kl_kind == kind


def test_the_kl_is_k1_in_the_reward_and_k3_in_the_loss_where_nothing_is_said() -> None:
    inside, beside = spec(kl_coef=0.1, kl_in="reward").train, spec(kl_coef=0.1).train
    assert (inside.kl_kind, inside.rewards_kl) == ("k1", True)
    assert (beside.kl_kind, beside.rewards_kl) == ("k3", False)
    assert not spec(kl_in="reward").train.rewards_kl


REFUSED = {
    "dual clip": ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip needs loss: ppo, not cispo"),
    "dual clip below": ({"dual_clip": 1.1}, r"dual_clip \(1.1\) must be above 1 \+ clip_high"),
    "gspo": ({"loss": "gspo", "aggregation": "token-mean"}, "set aggregation: seq-mean-token-mean, not token-mean"),
    "horizon": ({"horizon": 9}, "horizon needs aggregation: seq-mean-token-sum-norm"),
    "gamma": ({"gamma": 0.9}, "'grpo' has no returns to discount"),
    "band": ({"correction_band": [2.0, 0.5]}, "is empty; the first number must be below the second"),
    "sft and a critic": ({"loss": "sft", "advantage": "gae"}, "no rewards from which a critic could learn"),
    "sft and kl": ({"loss": "sft", "kl_coef": 0.1, "kl_in": "reward"}, "sft has no rewards, .*; set kl_in: loss"),
    "sft corrected": ({"loss": "sft", "correction": "tis"}, "trains on no samples"),
    "tis of nothing": (
        {"old_logprobs": "engine", "correction": "tis"},
        "they are the same; set old_logprobs: recompute",
    ),
    "mis too late": ({"old_logprobs": "current", "correction": "mis"}, "must be known before an update"),
    "decoupled": (
        {"old_logprobs": "current", "correction": "decoupled"},
        "clips around the policy at the start of the step",
    ),
    "remax without": ({"flow": "grpo", "advantage": "remax"}, "flow 'grpo' does not provide; set flow.name: remax"),
    "answers": ({"flow": "sft", "loss": "ppo"}, "answers that no engine sampled, so train.loss must be sft, not ppo"),
    "answers, one each": ({"flow": "sft", "loss": "ppo", "samples": 1}, "so train.loss must be sft, not ppo"),
    "streamed twice": ({"stream": True, "epochs": 2}, "one update per step, .* set epochs: 1, not 2"),
    "streamed in updates": ({"stream": True, "mini_batches": 2}, "set mini_batches: 1, not 2"),
    "streamed and whitened": (
        {"stream": True, "advantage": "reinforce_pp"},
        "uses one group alone .*; advantage 'reinforce_pp' uses the whole step",
    ),
    "streamed with a critic": ({"stream": True, "advantage": "gae"}, "advantage 'gae' uses the whole step"),
    "streamed answers": ({"flow": "sft", "loss": "sft", "stream": True}, "overlaps training with generation"),
    "streamed and stale": (
        {"stream": True, "staleness": 1, "old_logprobs": "engine"},
        "with rollout.staleness 1 the engines already generate during training",
    ),
    "streamed whole": (
        {"stream": True, "stream_min": 64, "groups": 16},
        "has 16 groups .* no part of a step could start early",
    ),
    "a part of nothing": ({"stream_min": 3}, "stream_min needs stream: true"),
    "truncated": ({"top_p": 0.9}, r"rollout sets top_p: 0\.9, "),
    "truncated and corrected": ({"top_p": 0.9, "correction": "tis"}, "rollout.correction does not help"),
    "truncated and uncorrected": ({"top_p": 0.9, "correction": "tis", "old_logprobs": "engine"}, "they are the same"),
}


@pytest.mark.parametrize(("settings", "sentence"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        spec(**settings)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "remax"])
@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "mis", "decoupled"])
def test_steps_come_in_parts_with_every_estimator_that_looks_at_one_group_and_every_correction(
    advantage: str, correction: str
) -> None:
    """Samples that a correction drops are counted part by part, like all others."""
    assert spec(advantage=advantage, correction=correction, stream=True).train.part_of(32) == 4


def test_a_part_is_an_eighth_of_a_step_if_nothing_is_said() -> None:
    train = spec(stream=True).train
    assert [train.part_of(groups) for groups in (1, 8, 9, 64)] == [1, 1, 2, 8]
    assert spec(stream=True, stream_min=5).train.part_of(64) == 5
    assert spec().train.part_of(64) is None


@pytest.mark.parametrize(
    ("section", "key", "given", "sentence"),
    [
        (
            "train",
            "advantage",
            "gpro",
            r"train\.advantage: it should be 'grpo', .* \(got 'gpro'\), did you mean 'grpo'\?",
        ),
        ("train", "advantage", "reinforce++", r"did you mean 'reinforce_pp'\?"),
        (
            "train",
            "loss",
            "gpso",
            r"train\.loss: .* or 'weighted_matching'; your own .* \(got 'gpso'\), did you mean 'gspo'\?",
        ),
        ("train", "aggregation", "token_mean", r"did you mean 'token-mean'\?"),
        ("train", "kl_estimator", "k4", r"did you mean 'k[123]'\?"),
        ("train", "zero_stage", 7, r"train\.zero_stage: it should be 1, 2 or 3 \(got 7\)\."),
        ("rollout", "correction", "ice-pop", r"did you mean 'icepop'\?"),
        ("rollout", "correction", "zzz", r"it should be 'none', 'tis', 'icepop', 'mis' or 'decoupled' \(got 'zzz'\)\."),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_one(section: str, key: str, given: Any, sentence: str) -> None:
    tree: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 8},
        "train": {},
    }
    tree[section] = tree[section] | {key: given}
    with pytest.raises(SpecError, match=sentence):
        parse_spec(tree)


def group(*rewards: float, baseline: float | None = None) -> Group:
    span = VersionSpan(Version(0, 0), 0, 1)
    return Group(
        PromptRef(0, 0, 0),
        (1,),
        tuple(Sample((5,), (-0.1,), "x", "stop", (span,), reward=reward) for reward in rewards),
        baseline=baseline,
    )


def test_a_flows_group_of_one_fails_its_prompt_where_a_group_is_compared() -> None:
    assert "at least 2 are needed" in (untrainable_reason(group(1.0), spec().train) or "")
    assert untrainable_reason(group(1.0), spec(advantage="reinforce_pp").train) is None
    assert untrainable_reason(group(1.0), spec(loss="sft").train) is None
    assert untrainable_reason(group(1.0, 0.0), spec().train) is None
    assert "without samples" in (untrainable_reason(group(), spec(loss="sft").train) or "")


def test_a_response_with_media_tokens_of_its_own_fails_its_prompt() -> None:
    span = VersionSpan(Version(0, 0), 0, 4)
    sample = Sample((5, 6, 7, 8), (-0.1,) * 4, "x", "stop", (span,), observed=((1, 2), (3, 4)))
    assert sample.own_token_ids == (5, 7)
    made = replace(group(1.0, 0.0), samples=(sample, sample))
    for token, refused in {5: True, 6: False, 7: True, 8: False}.items():
        why = untrainable_reason(made, spec().train, frozenset({token}))
        assert (why is not None and f"has token {token}, which stands for media" in why) is refused


def test_a_flows_group_without_a_baseline_fails_its_prompt_where_one_is_needed() -> None:
    assert "without a baseline" in (untrainable_reason(group(1.0), spec(advantage="remax").train) or "")
    assert untrainable_reason(group(1.0, baseline=0.0), spec(advantage="remax").train) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_a_flows_numbers_that_no_rank_takes_fail_the_prompt(value: float) -> None:
    assert "reward of" in (untrainable_reason(group(1.0, value), spec().train) or "")
    assert "baseline of" in (untrainable_reason(group(1.0, 0.0, baseline=value), spec().train) or "")


@pytest.mark.parametrize("lacking", [{"token_ids": (), "logprobs": ()}, {"logprobs": ()}, {"spans": ()}], ids=str)
def test_a_flows_response_that_lacks_what_a_token_needs_fails_its_prompt(lacking: dict[str, Any]) -> None:
    whole = group(1.0, 0.0)
    torn = replace(whole, samples=(whole.samples[0], replace(whole.samples[1], **lacking)))
    assert "the flow returned a response (sample 1) of" in (untrainable_reason(torn, spec().train) or "")
