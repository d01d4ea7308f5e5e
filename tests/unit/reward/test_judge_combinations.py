"""Invalid combinations of judges and other fields of a spec."""

from __future__ import annotations

from typing import Any

import pytest

from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError

PAIRWISE = {"mode": "pairwise", "template": "{{ first }} or {{ second }}?"}
DRAWN = {"path": "e", "temperature": 1.0}


def spec(judge: dict[str, Any], samples: int = 4, **more: Any) -> JobSpec:
    external = {"url": "https://api.example.com/v1", "model": "m"}
    one = {"name": "far", "template": "{{ response }}", "external": external} | judge
    tree: dict[str, Any] = {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "reward": {"judge": "far"}}
    tree |= {"flow": {"steps": 1, "samples_per_prompt": samples}, "rollout": {"max_new_tokens": 4}}
    return parse_spec(tree | {"judges": [one], "train": {"advantage": "reinforce_pp"}} | more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"samples": 1}, "flow.samples_per_prompt is 1; use at least 2"),
        ({"eval": {"path": "e"}}, "samples of eval source 'data' is 1; use at least 2, or another reward there"),
    ],
    ids=["trained", "held out"],
)
def test_a_judge_that_compares_is_not_given_groups_of_one(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec(PAIRWISE, **more)
    assert message in str(raised.value)
    assert spec(PAIRWISE | {"on_error": {"fallback": "numeric"}}, **more)  # which scores it then


def test_a_judge_that_compares_is_given_groups() -> None:
    assert spec(PAIRWISE, eval=DRAWN | {"samples": 2})


@pytest.mark.parametrize("name", ["environment", "agent"])
def test_fallback_without_its_section_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"reward '{name}' returns .* but the spec has no section {name}"):
        spec({"on_error": {"fallback": name}})


def test_unscalable_verdict_range_is_refused() -> None:
    with pytest.raises(SpecError, match="is too large to scale"):
        spec({"verdict": {"least": -1e308, "most": 1e308, "scale": True}})
