"""`train.critic` is set exactly where the advantage is gae; contradictions are one error sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gcore.config import JobSpec, new_spec, parse_spec
from gcore.config.train import CriticSpec
from gcore.errors import SpecError


def make(train: dict[str, Any], *, samples: int = 1, base: Path | None = None) -> JobSpec:
    tree = {
        "name": "a",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 4, "samples_per_prompt": samples},
        "rollout": {"max_new_tokens": 4},
        "train": train,
    }
    return parse_spec(tree) if base is None else new_spec(tree, base=base)


def test_gae_without_a_word_about_the_critic_takes_its_defaults() -> None:
    spec = make({"advantage": "gae"})
    assert spec.train.critic == CriticSpec()
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_other_estimators_have_no_critic() -> None:
    assert make({}, samples=2).train.critic is None


def test_one_sample_a_prompt_is_enough_for_gae() -> None:
    assert not make({"advantage": "gae"}).train.compares_group


@pytest.mark.parametrize(
    ("train", "says"),
    [
        pytest.param({"critic": {}}, "critic needs advantage: gae", id="a critic for grpo"),
        pytest.param({"gae_lambda": 0.9}, "gae_lambda needs advantage: gae", id="a lambda for grpo"),
        pytest.param({"gamma": 0.9}, "gamma needs advantage reinforce_pp, remax or gae", id="a discount for grpo"),
        pytest.param({"advantage": "gae", "gae_lambda": 1.5}, "train.gae_lambda", id="a lambda above 1"),
        pytest.param({"advantage": "gae", "critic": {"clip": 0}}, "train.critic.clip", id="no room for values"),
        pytest.param(
            {"advantage": "gae", "critic": {"warmup_steps": 4}}, "leaves none of flow.steps", id="only warm-up"
        ),
        pytest.param({"advantage": "gae", "critic": {"path": "hf://a/b"}}, "must be a folder", id="a hub's critic"),
        pytest.param(
            {"advantage": "gae", "critic": {"learnin_rate": 1}},
            "did you mean 'train.critic.learning_rate'",
            id="a misspelt key",
        ),
    ],
)
def test_contradictions_are_refused_in_a_sentence(train: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(train, samples=2)
    assert says in str(caught.value)


def test_the_critics_folder_is_relative_to_the_specs(tmp_path: Path) -> None:
    critic = make({"advantage": "gae", "critic": {"path": "judge"}}, base=tmp_path).train.critic
    assert critic is not None
    assert critic.path == str(tmp_path / "judge")
