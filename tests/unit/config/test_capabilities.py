"""Settings that an engine or a train backend cannot do are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from gcore.config import parse_spec
from gcore.config.capabilities import BACKENDS, ENGINES, PICTURE_ENGINES, table
from gcore.config.reward import JudgeServing
from gcore.config.rollout import RolloutSpec
from gcore.config.train import TrainSpec
from gcore.errors import SpecError

BASIC: dict[str, Any] = {"name": "job", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}


def test_each_engine_and_backend_of_the_spec_is_described() -> None:
    assert set(get_args(RolloutSpec.model_fields["engine"].annotation)) == ENGINES.keys()
    assert set(get_args(JudgeServing.model_fields["engine"].annotation)) == ENGINES.keys() - set(PICTURE_ENGINES)
    assert set(get_args(TrainSpec.model_fields["backend"].annotation)) == BACKENDS.keys()
    for known in (ENGINES, BACKENDS):
        assert all(len(row) == 1 + len(known) and all(row) for row in table(known))


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        (
            "rollout",
            {"engine": "torch", "engine_args": ["-x"]},
            "engine_args needs engine: sglang, vllm or sglang-diffusion, not torch",
        ),
        (
            "rollout",
            {"engine": "torch", "slots_per_engine": 2},
            "slots_per_engine needs engine: sglang or vllm, not torch",
        ),
        ("rollout", {"engine": "sglang", "deterministic": True}, "deterministic needs engine: torch, not sglang"),
        ("rollout", {"engine": "hf", "deterministic": True}, "deterministic needs engine: torch, not hf"),
        (
            "judges",
            {
                "name": "j",
                "kind": "classifier",
                "template": "{{ response }}",
                "model": {"path": "m"},
                "serving": {"engine": "hf"},
            },
            "kind: classifier needs serving.engine: torch or sglang, not hf",
        ),
        (
            "rollout",
            {"engine": "sglang"},
            "train.lora.publish: adapter needs rollout.engine: torch, vllm or hf, not sglang",
        ),
        (
            "data",
            {"images": "images"},
            "data.images needs rollout.engine: torch, sglang or hf, not vllm",
        ),
        ("train", {"offload_state": True}, "offload_state needs backend: fsdp2, not deepspeed"),
    ],
)
def test_a_setting_beyond_a_capability_names_what_has_it(section: str, fields: dict[str, Any], said: str) -> None:
    tree = BASIC | {"rollout": {"max_new_tokens": 4}}
    if "images" in said:
        tree |= {"rollout": {"engine": "vllm", "max_new_tokens": 4}}
    if "lora" in said:
        tree |= {"train": {"lora": {"publish": "adapter"}}}
    with pytest.raises(SpecError, match=said):
        parse_spec(tree | {section: [fields] if section == "judges" else tree.get(section, {}) | fields})


@pytest.mark.parametrize(
    ("known", "name", "capability", "section", "fields"),
    [
        pytest.param(ENGINES, "torch", "partial", "rollout", {"told_every": 64}, id="partial"),
        pytest.param(ENGINES, "torch", "sleeps_on", "placement", {"memory": "in_turns"}, id="sleep"),
        pytest.param(BACKENDS, "deepspeed", "rest", "placement", {"memory": "in_turns"}, id="rest"),
        pytest.param(BACKENDS, "deepspeed", "checkpointing", "train", {"activation_checkpointing": True}, id="again"),
        pytest.param(BACKENDS, "deepspeed", "replicas", "train", {"copies_gb": 1}, id="replicas"),
    ],
)
def test_a_capability_that_is_no_longer_declared_is_refused(
    known: Any, name: str, capability: str, section: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = BASIC | {"rollout": {"max_new_tokens": 4}}
    tree |= {section: tree.get(section, {}) | fields}
    parse_spec(tree)
    monkeypatch.setitem(known, name, replace(known[name], **{capability: False}))
    with pytest.raises(SpecError, match=rf"{next(iter(fields))}.* needs .*, not {name}"):
        parse_spec(tree)


def judged(**changes: Any) -> dict[str, Any]:
    judge = {"name": "tutor", "adapter": "grades", "template": "{{ response }}"}
    tree = {
        "name": "t",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 1},
        "rollout": {"max_new_tokens": 4},
    }
    tree |= {"judges": [judge], "reward": {"judge": "tutor"}, "train": {"lora": {"publish": "adapter"}}}
    return tree | changes


def test_an_adapter_may_judge_beside_a_policy_of_adapters() -> None:
    assert parse_spec(judged()).judge_adapters == {"tutor": "grades"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"train": {}}, "train.lora with publish: adapter", id="whole-policy"),
        pytest.param({"train": {"lora": {"publish": "adapter", "targets": ["lm_head"]}}}, "output layer", id="output"),
        pytest.param({"train": {"lora": {}}}, "train.lora with publish: adapter", id="merged"),
        pytest.param(
            {"rollout": {"engine": "vllm", "max_new_tokens": 4}}, "needs rollout.engine: torch, not vllm", id="vllm"
        ),
    ],
)
def test_an_adapter_that_cannot_judge_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(judged(**changes))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"freeze": ["vision"], "lora": {"rank": 4}}, "freeze excludes parts from training, and lora"),
        ({"freeze": ["vision", "vision"]}, "freeze names 'vision' twice"),
        ({"freeze": ["tower"]}, "'vision' or 'projector'"),
    ],
)
def test_frozen_parts_that_contradict_are_refused(train: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(BASIC | {"rollout": {"max_new_tokens": 4}, "train": train})
