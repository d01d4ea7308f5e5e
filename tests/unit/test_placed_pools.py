"""Which slots the pools of a job get: judges beside the policy, or each pool on slots of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError
from gcore.ledger.job import Plan
from placement.plan import Apart, JudgeWanted, NodeSlots, Snapshot, Wanted, first_plan, joined, slots_lacking

TREE: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 3},
    "rollout": {"max_new_tokens": 4},
}


def there(*slots: int) -> Snapshot:
    return Snapshot(tuple(NodeSlots(f"n{i}", tuple(f"cpu:{j}" for j in range(n))) for i, n in enumerate(slots)))


def judge(name: str, replicas: int | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"path": "p"},
        "template": "{{ prompt }}{{ response }}",
        "serving": {"replicas": replicas},
    }


def spec(**more: Any) -> JobSpec:
    return parse_spec(TREE | more)


def of_judge(plan: Plan, name: str) -> list[tuple[str, str]]:
    return [(place.node, place.slot) for place in plan.engines if place.judge == name]


def test_colocated_judges_have_an_engine_on_every_slot_or_as_many_as_is_said() -> None:
    wanted = Wanted.by(spec(judges=[judge("a"), judge("b", 1)], reward={"parts": [{"judge": "a"}, {"judge": "b"}]}))
    plan = first_plan(there(1, 1), wanted, world="w", generation=1)
    assert of_judge(plan, "") == of_judge(plan, "a") == [("n0", "cpu:0"), ("n1", "cpu:0")]
    assert of_judge(plan, "b") == [("n1", "cpu:0")], "the second judge begins on another slot than the first"
    assert len(plan.ranks) == 2


def test_an_external_judge_needs_no_slot() -> None:
    external = {"name": "far", "external": {"url": "http://h/v1", "model": "m"}, "template": "{{ response }}"}
    wanted = Wanted.by(spec(judges=[external], reward={"judge": "far"}))
    assert wanted == Wanted()


def test_with_static_each_pool_has_slots_of_its_own() -> None:
    job = spec(judges=[judge("a")], reward={"judge": "a"}, placement={"policy": "static", "train": 1, "reward": 2})
    plan = first_plan(there(2, 2), Wanted.by(job), world="w", generation=1)
    assert [(rank.node, rank.slot) for rank in plan.ranks] == [("n0", "cpu:0")]
    assert of_judge(plan, "a") == [("n1", "cpu:0"), ("n0", "cpu:1")]
    assert of_judge(plan, "") == [("n1", "cpu:1")]
    assert plan.rollout_nodes == {"n1"}
    with pytest.raises(SpecError, match=r"1 train ranks, 2 slots for judges and 1 rollout engine.*3 slots"):
        first_plan(there(2, 1), Wanted.by(job), world="w", generation=1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"placement": {"policy": "static"}}, "needs train"),
        ({"placement": {"train": 1}}, "belong to policy: static"),
        ({"placement": {"policy": "static", "train": 2}, "train": {"ranks": 1}}, "is not placement.train"),
        ({"placement": {"policy": "static", "train": 1, "reward": 1}}, "the cluster serves none"),
        (
            {"placement": {"policy": "static", "train": 1}, "judges": [judge("a")], "reward": {"judge": "a"}},
            "gives judges no slots",
        ),
        (
            {
                "placement": {"policy": "static", "train": 1, "reward": 1},
                "judges": [judge("a", 2)],
                "reward": {"judge": "a"},
            },
            "wants 2 engines",
        ),
    ],
    ids=["no-train", "train-of-colocated", "ranks-differ", "slots-for-nobody", "no-slots", "too-many-engines"],
)
def test_pools_that_do_not_fit_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        spec(**more)


SLOTS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


@given(SLOTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_no_slot_of_static_pools_serves_two_of_them(slots: list[int], train: int, reward: int, judges: int) -> None:
    names = tuple(JudgeWanted(f"j{i}") for i in range(judges if reward else 0))
    wanted, snapshot = Wanted(train, names, Apart(train, reward)), there(*slots)
    if slots_lacking(snapshot, wanted):
        with pytest.raises(SpecError):
            first_plan(snapshot, wanted, world="w", generation=1)
        return
    plan = first_plan(snapshot, wanted, world="w", generation=1)
    ranks = {(rank.node, rank.slot) for rank in plan.ranks}
    rewards = {(place.node, place.slot) for place in plan.engines if place.judge}
    rollout = {(place.node, place.slot) for place in plan.engines if not place.judge}
    assert len(ranks) == train
    assert len(rewards) == (reward if names else 0)
    assert rollout
    assert ranks.isdisjoint(rewards | rollout)
    assert rewards.isdisjoint(rollout)
    assert joined(plan, snapshot, wanted) is None


@given(SLOTS, SLOTS, st.integers(1, 4))
def test_nodes_that_come_are_rollouts_and_judges_never_have_more_engines_than_they_want(
    before: list[int], more: list[int], replicas: int
) -> None:
    wanted = Wanted(judges=(JudgeWanted("all"), JudgeWanted("some", replicas)))
    plan = first_plan(there(*before), wanted, world="w", generation=1)
    after = there(*before, *more)
    new = joined(plan, after, wanted)
    assert new is not None
    assert len(of_judge(new, "all")) == len(of_judge(new, "")) == after.slots
    assert len(of_judge(new, "some")) == min(replicas, after.slots)
    assert len({(p.node, p.slot, p.judge) for p in new.engines}) == len(new.engines)
    assert joined(new, after, wanted) is None
