"""A flow's settings are defaults below the user's spec, and errors about them name the flow."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plug_in_package import Install, installer

from gcore.config import load_spec, new_spec, parse_spec
from gcore.config.load import _under, apply_flow_settings, flow_settings
from gcore.errors import SpecError
from gcore.flows import flow

MINIMAL: dict[str, Any] = {
    "name": "job",
    "model": {"path": "model"},
    "data": {"path": "data.jsonl"},
    "flow": {"steps": 3, "name": "mine"},
    "rollout": {"max_new_tokens": 8},
}
CODE = """
from gcore.flows import flow

@flow(train={"advantage": "rloo", "learning_rate": 0.5}, flow={"samples_per_prompt": 3}, checkpoint={"every": 7})
async def mine(peer):
    pass

@flow(train={"advantage": "none_such"})
async def wrong(peer):
    pass

@flow(train={"clip_hi": 0.3})
async def misspelt(peer):
    pass

@flow(train={"dual_clip": 3.0})
async def contradicts(peer):
    pass

@flow(flow={"filters": [{"name": "signal"}]}, reward={"options": {"a": 1}})
async def whole_values(peer):
    pass

async def plain(peer):
    pass
"""
NAMES = ("mine", "wrong", "misspelt", "contradicts", "whole_values", "plain")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install: Install = installer(tmp_path / "packages", monkeypatch, "gcore.flows")
    install("flow_pack", "\n".join(f"{name} = flow_pack:{name}" for name in NAMES), CODE)


def spec_of(**sections: Any) -> dict[str, Any]:
    tree = copy.deepcopy(MINIMAL)
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def test_the_name_of_a_flow_alone_brings_its_settings() -> None:
    spec = new_spec(spec_of())
    assert (spec.train.advantage, spec.train.learning_rate) == ("rloo", 0.5)
    assert (spec.flow.samples_per_prompt, spec.flow.steps, spec.checkpoint.every) == (3, 3, 7)


def test_user_settings_override_the_flows_key_by_key() -> None:
    spec = new_spec(spec_of(train={"advantage": "grpo"}, flow={"samples_per_prompt": 2}))
    assert (spec.train.advantage, spec.train.learning_rate) == ("grpo", 0.5)
    assert spec.flow.samples_per_prompt == 2


def test_a_flow_without_settings_leaves_the_defaults() -> None:
    tree = spec_of(flow={"name": "plain"})
    assert apply_flow_settings(tree) is tree
    assert new_spec(tree) == parse_spec(tree)


def test_lists_and_options_are_one_value_each() -> None:
    own = spec_of(flow={"name": "whole_values", "filters": [{"name": "reward_band"}]}, reward={"options": {"b": 2}})
    spec = new_spec(own)
    assert [one.name for one in spec.flow.filters] == ["reward_band"]
    assert spec.reward.options == {"b": 2}
    assert new_spec(spec_of(flow={"name": "whole_values"})).reward.options == {"a": 1}


def test_a_stored_spec_is_whole_so_that_no_flow_changes_it() -> None:
    stored = new_spec(spec_of(train={"learning_rate": 0.1})).model_dump(mode="json")
    assert new_spec(stored) == parse_spec(stored)
    assert apply_flow_settings(stored) == stored


def test_no_flow_is_looked_up_for_a_stored_spec() -> None:
    tree = spec_of(flow={"name": "gone_meanwhile"})
    assert parse_spec(tree).flow.name == "gone_meanwhile"
    with pytest.raises(SpecError, match=r"flow\.name: no flow is called 'gone_meanwhile'"):
        new_spec(tree)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("wrong", r"train\.advantage: .*\(with the settings of flow 'wrong'\)", id="no such value"),
        pytest.param(
            "misspelt", r"unknown key 'train\.clip_hi'.*\(with the settings of flow 'misspelt'\)", id="no such key"
        ),
    ],
)
def test_invalid_flow_settings_are_reported_with_the_flows_name(name: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        new_spec(spec_of(flow={"name": name}))


def test_a_contradiction_with_what_the_user_wrote_names_the_flow() -> None:
    with pytest.raises(SpecError, match=r"dual_clip needs loss.*\(with the settings of flow 'contradicts'\)"):
        new_spec(spec_of(flow={"name": "contradicts"}, train={"loss": "gspo"}))


def test_the_users_own_mistakes_are_not_blamed_on_the_flow() -> None:
    with pytest.raises(SpecError) as caught:
        new_spec(spec_of(flow={"name": "wrong"}, train={"clip_lo": 1}))
    said = str(caught.value)
    assert "unknown key 'train.clip_lo', did you mean 'train.clip_low'?" in said
    assert re.search(r"train\.advantage: .*got 'none_such'[^;]*\(with the settings of flow 'wrong'\)", said)
    assert said.count("with the settings of flow") == 1  # so the user's own are not the flow's


def test_overrides_of_the_command_line_count_as_the_users(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    assert load_spec(file, ["train.advantage=dr_grpo"]).train.advantage == "dr_grpo"
    assert load_spec(file, ["flow.name=plain"]).train.advantage == "grpo"


@pytest.mark.parametrize("bad", [None, 3, [], "grpo", {"name": 3}, {"name": None}], ids=repr)
def test_a_flow_section_that_is_none_is_left_to_validation(bad: Any) -> None:
    tree = {**spec_of(), "flow": bad}
    assert apply_flow_settings(tree) is tree
    with pytest.raises(SpecError):
        new_spec(tree)


@pytest.mark.parametrize("section", ["name", "data", "model", "no_such_section"])
def test_a_flow_cannot_set_what_a_job_is_about(section: str) -> None:
    with pytest.raises(ValueError, match=section):
        flow(**{section: {}})
    with pytest.raises(ValueError, match="flow"):
        flow(flow={"name": "other"})


def test_settings_are_a_copy() -> None:
    given_settings = {"advantage": "rloo"}
    marked = flow(train=given_settings)(lambda peer: None)
    given_settings["advantage"] = "grpo"
    assert flow_settings(marked) == {"train": {"advantage": "rloo"}}


@given(
    own=st.dictionaries(st.sampled_from(["advantage", "learning_rate", "clip_low"]), st.just("own")),
    theirs=st.dictionaries(st.sampled_from(["advantage", "learning_rate", "clip_low"]), st.just("theirs")),
)
def test_merging_takes_the_users_value_wherever_there_is_one(own: dict[str, str], theirs: dict[str, str]) -> None:
    from gcore.config.spec import JobSpec

    merged = _under({"train": own}, {"train": theirs}, JobSpec)["train"]
    assert merged == {**theirs, **own}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(
            {"trian": {}}, "cannot set 'trian': a spec has no such section, did you mean 'train'?", id="misspelt"
        ),
        pytest.param({"zzz": {}}, "cannot set 'zzz': a spec has no such section", id="nothing like it"),
        pytest.param({"seed": {}}, "cannot set 'seed': it belongs to the job", id="a job's own"),
        pytest.param({"flow": {"name": "x"}}, "cannot set 'flow.name': it belongs to the job", id="another flow"),
    ],
)
def test_a_section_that_no_flow_may_set_is_refused_where_it_is_written(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said) + "$"):
        flow(**settings)
