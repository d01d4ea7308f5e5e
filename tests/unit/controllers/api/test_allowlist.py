"""The names that a spec may use on a cluster: plug-ins, code, secrets; checked before any is loaded. `test_allowlist_paths.py` covers paths."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.api.submission.allowlist import EVERYTHING, Allowlist
from gcore.config import NodeConfig, parse_spec
from gcore.config.node import AllowSection
from gcore.errors import SpecError

BASE: dict[str, Any] = {
    "name": "job",
    "model": {"path": "/models/m"},
    "data": {"path": "/data/d.jsonl"},
    "flow": {"steps": 1},
    "rollout": {"max_new_tokens": 8},
}
TEACHER = {"name": "t", "external": {"url": "https://x/v1", "model": "m"}, "template": "{{ response }}"}


def spec(**sections: Any) -> Any:
    tree = dict(BASE)
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_spec(tree)


def teacher(**external: Any) -> Any:
    return spec(judges=[{**TEACHER, "external": {**TEACHER["external"], **external}}], reward={"judge": "t"})  # type: ignore[dict-item]


NODE = NodeConfig(node="n", home="/home-of-node", run_root="/runs", etcd={"endpoints": ["a:1"]}, slots=["cpu:0"])  # type: ignore[arg-type]


def allowed(*, strangers: bool = True, **section: Any) -> Allowlist:
    section = {"roots": ["/models", "/data"], **section}
    return Allowlist(AllowSection(**section), NODE if strangers else None)


def test_where_nothing_is_said_every_plug_in_that_is_installed_may_be_named() -> None:
    EVERYTHING.check(spec())
    allowed().check(spec())


@pytest.mark.parametrize(
    ("section", "sections", "where", "name"),
    [
        ({"flows": ["ppo"]}, {}, "flow.name", "grpo"),
        ({"filters": []}, {"flow": {"filters": [{"name": "signal"}]}}, "flow.filters.0", "signal"),
        ({"rewards": ["exact"]}, {"reward": {"name": "numeric"}}, "reward of source", "numeric"),
        (
            {"rewards": ["exact"]},
            {"reward": {"parts": [{"name": "exact"}, {"name": "length"}]}},
            "reward of source",
            "length",
        ),
        ({"verdicts": ["json"]}, {"judges": [TEACHER], "reward": {"judge": "t"}}, "judges.0.verdict.parser", "number"),
        (
            {"rewards": []},
            {"judges": [{**TEACHER, "on_error": {"fallback": "exact"}}], "reward": {"judge": "t"}},
            "reward of source",
            "exact",
        ),
        ({"curricula": []}, {"data": {"curriculum": "easy_first"}}, "data.curriculum", "easy_first"),
        ({"policies": ["static"]}, {"placement": {"policy": "dynamic"}}, "placement.policy", "dynamic"),
        (
            {"tools": []},
            {"environment": {"name": "tools", "tools": {"names": ["calculator"]}}},
            "environment.tools.names",
            "calculator",
        ),
        (
            {"environments": []},
            {"environment": {"name": "tools", "tools": {"names": ["calculator"]}}},
            "environment.name",
            "tools",
        ),
        ({"trackers": []}, {"tracking": [{"name": "wandb"}]}, "tracking.0", "wandb"),
    ],
)
def test_a_plug_in_that_is_not_on_the_list_is_refused_by_name(
    section: dict[str, Any], sections: dict[str, Any], where: str, name: str
) -> None:
    with pytest.raises(SpecError) as caught:
        allowed(**section).check(spec(**sections))
    assert where in str(caught.value)
    assert f"{name!r} is not allowed on this cluster" in str(caught.value)
    kind = next(iter(section))
    allowed(**{kind: [*section[kind], name]}).check(spec(**sections))


def test_a_flow_that_is_not_allowed_is_refused_before_its_code_is_loaded() -> None:
    with pytest.raises(SpecError, match="'foreign' is not allowed"):
        allowed(flows=["grpo"]).check_flow({"flow": {"name": "foreign"}})
    for odd in ({}, {"flow": 1}, {"flow": {"name": 1}}, {"flow": []}):
        allowed(flows=["grpo"]).check_flow(odd)


def test_built_in_algorithms_need_no_allowlist() -> None:
    allowed(advantages=[], losses=[]).check(spec())


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"trust_remote_code": True}}, "remote_code"),
        ({"rollout": {"engine": "sglang", "engine_args": ["--x"]}}, "engine_args"),
    ],
)
def test_specs_that_bring_code_are_for_the_owner_unless_allowed(sections: dict[str, Any], key: str) -> None:
    brings = spec(**sections)
    EVERYTHING.check(brings)
    allowed(**{key: True}).check(brings)
    with pytest.raises(SpecError, match="this cluster does not"):
        allowed().check(brings)
    with pytest.raises(SpecError, match="this cluster does not"):
        allowed(strangers=False, **{key: False}).check(brings)


def test_secrets_are_named_from_a_list_or_by_the_owner_alone() -> None:
    EVERYTHING.check(teacher(key_env="JUDGE_KEY"))
    with pytest.raises(SpecError, match="may not use the secret 'file:/etc/x'"):
        EVERYTHING.check(teacher(key="file:/etc/x"))  # a variable is the owner's own; a file may be anybody's
    known = allowed(secrets=["env:JUDGE_*", "file:/etc/gcore/secrets/*"])
    known.check(teacher(key_env="JUDGE_KEY"))
    known.check(teacher(key="env:JUDGE_KEY"))
    known.check(teacher(key="file:/etc/gcore/secrets/judge"))
    for reference in (
        "env:AWS_SECRET_ACCESS_KEY",
        "file:/etc/gcore/secrets/../../shadow",
        "file:/etc/gcore/secrets/a/b",
        "file:/etc/gcore/secrets/..",
        "file:/etc/shadow",
    ):
        with pytest.raises(SpecError, match="may not use the secret"):
            known.check(teacher(key=reference))
    with pytest.raises(SpecError, match="may not use the secret"):
        allowed().check(teacher(key_env="JUDGE_KEY"))


@pytest.mark.parametrize("external", [{"key": "sk-123"}, {"key": "env:A", "key_env": "A"}, {"key": "file:relative"}])
def test_a_key_itself_is_no_reference_and_is_not_repeated(external: dict[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        teacher(**external)
    assert "sk-123" not in str(caught.value)


def test_a_stored_spec_says_nothing_of_what_it_does_not_use_and_is_read_as_it_was() -> None:
    for one in (teacher(key="file:/k"), teacher(key_env="K"), teacher()):
        stored = one.model_dump(mode="json")
        assert ("key" in stored["judges"][0]["external"]) == (one.judges[0].external.key is not None)
        assert parse_spec(stored) == one


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(SpecError, match="no user name and no password") as caught:
        teacher(url="https://me:secret@x/v1")
    assert "secret" not in str(caught.value).replace("secrets", "")
