"""The section placement for dynamic placement: each invalid value is refused with one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from gcore.config import parse_spec
from gcore.errors import SpecError

JUDGE = {
    "name": "tutor",
    "model": {"path": "m"},
    "template": "{{ prompt }}{{ response }}",
    "max_new_tokens": 8,
    "verdict": {"parser": "number"},
}


def spec(placement: dict[str, Any], *, judged: bool = False, **more: Any) -> Any:
    tree: dict[str, Any] = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
        "placement": placement,
    }
    if judged:
        tree |= {"judges": [JUDGE], "reward": {"judge": "tutor"}}
    return parse_spec(tree | more)


@pytest.mark.parametrize(
    ("placement", "judged", "more", "said"),
    [
        pytest.param(
            {"policy": "static", "train": 1, "dry_run": True},
            False,
            {},
            "dry_run needs a policy that moves slots",
            id="dry static",
        ),
        pytest.param({"dry_run": True}, False, {}, "policy: colocated moves none", id="dry colocated"),
        pytest.param(
            {"policy": "static", "train": 1, "lend": True},
            False,
            {},
            "lend needs a policy that moves slots",
            id="static lends",
        ),
        pytest.param({"policy": "dynamic", "lend": True}, False, {}, "serves no judge", id="lends without judges"),
        pytest.param({"policy": "dynamic", "reward": 1}, True, {}, "set both or neither", id="reward alone"),
        pytest.param(
            {"policy": "dynamic", "train": 1}, True, {}, "without placement.reward; set both", id="judges get nothing"
        ),
        pytest.param(
            {"policy": "dynamic", "train": 1, "reward": 1}, False, {}, "serves no judge", id="reward for nobody"
        ),
        pytest.param({"policy": "colocated", "train": 1}, False, {}, "all pools share all slots", id="colocated sizes"),
        pytest.param(
            {"policy": "dynamic", "train": 2},
            False,
            {"train": {"ranks": 3}},
            "differs from placement.train",
            id="two sizes",
        ),
        pytest.param({"policy": "no such/thing"}, False, {}, "placement.policy", id="no name"),
    ],
)
def test_invalid_placements_are_refused(
    placement: dict[str, Any], judged: bool, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec(placement, judged=judged, **more)
    assert said in str(caught.value)


def test_a_judge_that_wants_so_many_engines_has_them_of_no_policy() -> None:
    judges = [{**JUDGE, "serving": {"replicas": 2}}]
    with pytest.raises(SpecError, match="decides the number of engines"):
        spec({"policy": "dynamic"}, judged=True, judges=judges)


def test_slots_are_lent_where_the_spec_says_so() -> None:
    assert spec({"policy": "dynamic"}, judged=True).placement.lends
    assert spec({"policy": "dynamic", "lend": True}, judged=True).placement.lends
    assert not spec({"policy": "dynamic", "lend": False}, judged=True).placement.lends
    assert not spec({"policy": "hill_climb"}, judged=True).placement.lends
    assert spec({"policy": "hill_climb", "lend": True}, judged=True).placement.lends
    assert not spec({}).placement.is_live


def test_a_policy_that_begins_with_a_split_says_it_whole() -> None:
    placed = spec({"policy": "dynamic", "train": 1, "reward": 2, "dry_run": True}, judged=True).placement
    assert (placed.train, placed.reward, placed.dry_run) == (1, 2, True)
