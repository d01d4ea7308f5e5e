"""The spec of a policy that generates pictures: defaults of its flows, and settings that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gcore.config import parse_spec
from gcore.config.load import apply_flow_settings
from gcore.config.spec import JobSpec, uses_blobs, uses_pictures
from gcore.errors import SpecError

FLOWS = ("flow_grpo", "dance_grpo", "mix_grpo", "ddpo", "diffusion_nft", "weighted_sft")


def tree(flow: str = "flow_grpo", **sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "pictures",
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "flow": {"name": flow, "steps": 2},
        "reward": {"name": "/rules.py:right"},
    }
    for section, values in sections.items():
        found[section] = {**found.get(section, {}), **values} if isinstance(values, dict) else values
    return found


def spec(flow: str = "flow_grpo", **sections: Any) -> JobSpec:
    return parse_spec(apply_flow_settings(tree(flow, **sections)))


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_alone_selects_engine_sampler_loss_and_advantages(flow: str) -> None:
    found = spec(flow)
    assert found.rollout.engine == "diffusers"
    assert found.rollout.diffusion is not None
    assert found.train.diffusion is not None
    assert found.rollout.max_new_tokens == found.rollout.diffusion.steps == 10
    assert uses_blobs(found)
    assert not uses_pictures(found)
    again = parse_spec(found.model_dump(mode="json"))
    assert again == found, "a stored spec says the same"


@pytest.mark.parametrize("wrong", [5, "x", [], [1], True])
def test_a_section_that_is_none_is_refused_once(wrong: Any) -> None:
    with pytest.raises(SpecError) as refused:
        spec(rollout={"diffusion": wrong})
    assert "rollout.diffusion" in str(refused.value)
    assert "max_new_tokens" not in str(refused.value)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "x"])
def test_steps_that_are_none_are_refused_without_a_word_about_tokens(steps: Any) -> None:
    with pytest.raises(SpecError, match=r"rollout\.diffusion\.steps") as refused:
        spec(rollout={"diffusion": {"steps": steps}})
    assert "max_new_tokens" not in str(refused.value)


def test_the_flows_have_the_settings_of_their_sources() -> None:
    def of(flow: str) -> tuple[Any, ...]:
        found = spec(flow)
        rollout, train = found.rollout.diffusion, found.train.diffusion
        assert rollout is not None
        assert train is not None
        advantages = (train.adv_std, train.adv_ddof, train.adv_eps, train.adv_clip)
        return rollout.sampler, rollout.noise_level, found.train.loss, found.train.clip_low, advantages

    assert of("flow_grpo") == ("sde", 0.7, "ppo", 1e-4, ("batch", 0, 1e-4, 5.0))
    assert of("dance_grpo") == ("dance", 0.3, "ppo", 1e-4, ("group", 1, 1e-8, 5.0))
    assert of("mix_grpo") == ("sde", 0.7, "ppo", 1e-4, ("group", 1, 1e-8, 5.0))
    assert of("ddpo")[:3] == ("sde", 1.0, "ppo")
    assert of("diffusion_nft")[:3] == ("ode", 0.7, "nft")
    assert of("weighted_sft")[:3] == ("ode", 0.7, "weighted_matching")
    dance, mix = spec("dance_grpo").rollout.diffusion, spec("mix_grpo").rollout.diffusion
    assert dance is not None
    assert mix is not None
    assert mix.window is not None
    assert (dance.same_noise, dance.trained_share) == (True, 0.6)
    assert (mix.window.size, mix.window.strategy, mix.window.stay) == (4, "progressive", 25)


REFUSED = [
    ({"rollout": {"engine": "torch"}}, "diffusion needs engine: diffusers or sglang-diffusion, not torch"),
    ({"rollout": {"max_new_tokens": 4}}, "max_new_tokens is for texts"),
    (
        {"rollout": {"engine": "sglang-diffusion", "diffusion": {"sampler": "dance"}}},
        "sglang-diffusion does not support rollout.diffusion.sampler: dance",
    ),
    (
        {"rollout": {"engine": "sglang-diffusion", "diffusion": {"same_noise": True}}},
        "sglang-diffusion does not support rollout.diffusion.same_noise",
    ),
    (
        {"rollout": {"engine": "sglang-diffusion"}, "train": {"diffusion": {"ema_decay": 0.9}}},
        "sglang-diffusion does not support train.diffusion.ema_decay",
    ),
    ({"rollout": {"stop": ["."]}}, "rollout.stop is for texts"),
    ({"rollout": {"temperature": 0.5}}, "rollout.temperature is for texts"),
    ({"rollout": {"truncated": "mask"}}, "rollout.truncated is for texts"),
    ({"rollout": {"overlong_tokens": 2}}, "rollout.overlong_tokens is for texts"),
    ({"rollout": {"deterministic": True}}, "deterministic needs engine: torch, not diffusers"),
    ({"environment": {"name": "tools"}}, "does not support environment"),
    ({"agent": {"name": "a"}}, "does not support agent"),
    ({"model": {"path": "m", "chat": True}}, "does not support model.chat"),
    ({"data": {"path": "d", "images": "images"}}, "editing of pictures"),
    ({"train": {"loss": "gspo", "aggregation": "seq-mean-token-mean"}}, "'gspo' trains texts"),
    ({"train": {"loss": "sft"}}, "'sft' trains texts"),
    ({"train": {"advantage": "rloo"}}, "'rloo' is for texts"),
    ({"train": {"advantage": "gae"}}, "does not support train.critic"),
    ({"train": {"lora": {}}}, "does not support train.lora"),
    ({"train": {"freeze": ["vision"]}}, "does not support train.freeze"),
    ({"train": {"sequence_parallel": 2}}, "does not support train.sequence_parallel"),
    ({"train": {"entropy_coef": 0.1}}, "does not support train.entropy_coef"),
    ({"train": {"kl_coef": 0.1, "kl_in": "reward"}}, "does not support train.kl_in: reward"),
    ({"train": {"clip_low": 0.2, "clip_high": 0.2}}, "never clip"),
    ({"train": {"dtype": "bf16", "backend": "fsdp2"}}, "rounds noise levels to bfloat16"),
    ({"train": {"loss": "nft"}}, "train.loss: nft needs only finished pictures"),
    ({"train": {"loss": "grpo_guard", "old_logprobs": "engine"}}, "grpo_guard compares the means of steps"),
    ({"train": {"stream": True}}, "adv_std: batch uses the rewards of the whole step"),
    ({"rollout": {"diffusion": {"sampler": "ode"}}}, "ode has no log-probabilities"),
    ({"rollout": {"diffusion": {"steps": 4, "window": {"size": 5}}}}, "is not within 4 steps"),
    ({"rollout": {"diffusion": {"window": {"size": 0}}}}, "window.size"),
    ({"rollout": {"diffusion": {"sampler": "cps", "noise_level": 1.5}}}, "cps replaces at most all of the noise"),
    ({"rollout": {"diffusion": {"steps": 0}}}, "diffusion.steps"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_settings_of_texts_are_refused_in_a_sentence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        spec(**copy.deepcopy(changed))


NFT = [
    ({"train": {"zero_stage": 3}}, "whole second network"),
    (
        {"train": {"stream": True, "diffusion": {"adv_std": "group"}}},
        "train.stream is not supported with train.loss: nft",
    ),
    ({"train": {"diffusion": {"adv_clip": None}}}, "adv_clip"),
    ({"rollout": {"diffusion": {"sampler": "sde"}}}, "set rollout.diffusion.sampler: ode"),
    ({"rollout": {"diffusion": {"guidance": 3.0}}}, "without guidance"),
    ({"rollout": {"diffusion": {"same_noise": True}}}, "same_noise"),
    ({"rollout": {"correction": "tis"}}, "correction needs log-probabilities"),
    ({"rollout": {"staleness": 1, "correction": "none"}, "train": {"old_logprobs": "engine"}}, "staleness: 0"),
]


@pytest.mark.parametrize(("changed", "message"), NFT, ids=[message for _, message in NFT])
def test_a_loss_of_the_forward_process_refuses_settings_of_log_probabilities(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        spec("diffusion_nft", **copy.deepcopy(changed))


def test_losses_of_pictures_are_refused_for_texts() -> None:
    text = tree("grpo", rollout={"max_new_tokens": 4}, reward={"name": "numeric"})
    for changed, message in (
        ({"loss": "nft"}, "trains models that generate pictures"),
        ({"diffusion": {}}, "is for models that generate pictures"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_spec({**text, "train": changed})


def test_the_share_that_the_served_network_keeps_grows_after_its_step() -> None:
    training = spec(
        "diffusion_nft", train={"diffusion": {"average": {"rise": 0.1, "most": 0.3, "after": 2}}}
    ).train.diffusion
    assert training is not None
    assert [training.kept_share(step) for step in range(7)] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3, 0.3])
