"""The slots of a job's pools: judges beside the policy, or each pool on slots of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config import JobSpec, parse_spec
from gcore.errors import SpecError
from gcore.ledger.records.job import Plan
from placement.assign import assign_split
from placement.placer import fill_plan, first_plan, move_judges, slot_bounds
from placement.request import PlacementRequest, count_lacking_slots
from placement.slots import NodeSlots, ReplicaSizes, Snapshot, Split

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
    wanted = PlacementRequest.by(
        spec(judges=[judge("a"), judge("b", 1)], reward={"parts": [{"judge": "a"}, {"judge": "b"}]})
    )
    plan = first_plan(there(1, 1), wanted, world="w", generation=1)
    assert of_judge(plan, "") == of_judge(plan, "a") == [("n0", "cpu:0"), ("n1", "cpu:0")]
    assert of_judge(plan, "b") == [("n1", "cpu:0")], "the second judge begins on another slot than the first"
    assert len(plan.ranks) == 2


def test_an_external_judge_needs_no_slot() -> None:
    external = {"name": "far", "external": {"url": "http://h/v1", "model": "m"}, "template": "{{ response }}"}
    wanted = PlacementRequest.by(spec(judges=[external], reward={"judge": "far"}))
    assert wanted == PlacementRequest()


def test_with_static_each_pool_has_slots_of_its_own() -> None:
    job = spec(judges=[judge("a")], reward={"judge": "a"}, placement={"policy": "static", "train": 1, "reward": 2})
    plan = first_plan(there(2, 2), PlacementRequest.by(job), world="w", generation=1)
    assert [(rank.node, rank.slot) for rank in plan.ranks] == [("n0", "cpu:0")]
    assert of_judge(plan, "a") == [("n1", "cpu:0"), ("n0", "cpu:1")]
    assert of_judge(plan, "") == [("n1", "cpu:1")]
    assert plan.rollout_nodes == {"n1"}
    with pytest.raises(SpecError, match=r"1 train rank, 2 slots for judges and 1 rollout engine.*3 slots") as lacking:
        first_plan(there(2, 1), PlacementRequest.by(job), world="w", generation=1)
    assert str(lacking.value.fix).startswith("Lower placement.train or placement.reward, or start")
    with pytest.raises(SpecError, match=r"2 train ranks and 1 rollout engine.*1 slot\. Lower placement\.train, or"):
        first_plan(there(1), PlacementRequest(2, train=2), world="w", generation=1)


def test_too_few_slots_are_blamed_on_the_field_that_requests_them() -> None:
    for train, field in (({"ranks": 3}, "ranks"), ({"sequence_parallel": 4}, "sequence_parallel")):
        wanted = PlacementRequest.by(spec(train=train))
        with pytest.raises(
            SpecError, match=rf"train\.{field}: . train ranks do not fit.*Lower train\.{field}, or start"
        ):
            first_plan(there(1, 1), wanted, world="w", generation=1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"placement": {"policy": "static"}}, "needs train"),
        ({"placement": {"train": 1}}, "or set policy: static"),
        ({"placement": {"policy": "static", "train": 2}, "train": {"ranks": 1}}, "differs from placement.train"),
        ({"placement": {"policy": "static", "train": 1, "reward": 1}}, "the cluster serves no judge"),
        (
            {"placement": {"policy": "static", "train": 1}, "judges": [judge("a")], "reward": {"judge": "a"}},
            "gives judges no slots",
        ),
        (
            {"placement": {"policy": "static", "train": 3}, "train": {"sequence_parallel": 2}},
            r"placement\.train \(3\) must be a multiple .* set it to 2 or 4",
        ),
        ({"train": {"sequence_parallel": 2, "ranks": 3}}, r"ranks \(3\) must be a multiple .* set ranks: 2 or 4"),
        ({"train": {"sequence_parallel": 2, "ranks": 1}}, r"set ranks: 2\. "),
        (
            {"train": {"sequence_parallel": 3, "micro_batch_tokens": 100}},
            r"micro_batch_tokens \(100\) must be a multiple .* set micro_batch_tokens: 99 or 102",
        ),
        ({"train": {"sequence_parallel": 2, "packing": "bucketed"}}, "packing: bucketed makes none"),
        (
            {
                "placement": {"policy": "static", "train": 1, "reward": 1},
                "judges": [judge("a", 2)],
                "reward": {"judge": "a"},
            },
            "needs 2 engines",
        ),
    ],
    ids=[
        "no-train",
        "train-of-colocated",
        "ranks-differ",
        "slots-for-nobody",
        "no-slots",
        "half-a-group",
        "half-a-group-of-ranks",
        "less-than-a-group",
        "uneven-rows",
        "no-rows",
        "too-many-engines",
    ],
)
def test_pools_that_do_not_fit_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        spec(**more)


GROUPS = PlacementRequest(sizes=ReplicaSizes(train=2))


def ranks_of(plan: Plan) -> list[str]:
    return [f"{rank.node}/{rank.slot}" for rank in plan.ranks]


@pytest.mark.parametrize(
    ("slots", "ranks", "expected"),
    [
        pytest.param((4, 4), None, ["n0/cpu:0", "n0/cpu:1"], id="one rank a node, in whole groups"),
        pytest.param((4,), None, ["n0/cpu:0", "n0/cpu:1"], id="at least one group"),
        pytest.param((2, 2), 4, ["n0/cpu:0", "n0/cpu:1", "n1/cpu:0", "n1/cpu:1"], id="a group is on one node"),
        pytest.param((1, 3), 4, ["n1/cpu:0", "n1/cpu:1", "n0/cpu:0", "n1/cpu:2"], id="only the last group is not"),
        pytest.param((1, 1, 1), None, ["n0/cpu:0", "n1/cpu:0"], id="on nodes of one slot each"),
    ],
)
def test_sequence_groups_are_whole_and_on_one_node_if_any_has_room(
    slots: tuple[int, ...], ranks: int | None, expected: list[str]
) -> None:
    wanted = replace(GROUPS, ranks=ranks)
    assert ranks_of(first_plan(there(*slots), wanted, world="w", generation=1)) == expected


@pytest.mark.parametrize("mode", ["colocated", "coexisting"])
def test_worlds_grow_and_shrink_by_whole_sequence_groups(mode: str) -> None:
    wanted = replace(GROUPS, moves=True, most_ranks=8)
    assert slot_bounds(there(5), wanted).train_sizes == (2, 4)
    plan, nodes = None, there(4, 4)
    for number, train in enumerate((4, 2, 4, 6)):
        split = Split("colocated", 8, 0, train) if mode == "colocated" else Split("coexisting", 8 - train, 0, train)
        before, plan = plan, assign_split(split, plan, nodes, (), world=f"w{number}", generation=1, sizes=GROUPS.sizes)
        assert plan is not None
        slots = ranks_of(plan)
        groups = {frozenset(slots[first : first + 2]) for first in range(0, train, 2)}
        assert all(len({slot.partition("/")[0] for slot in group}) == 1 for group in groups)
        if before is not None:
            kept = ranks_of(before)
            old = {frozenset(kept[first : first + 2]) for first in range(0, len(kept), 2)}
            assert groups <= old or old <= groups, "groups stay whole"


def test_a_group_that_no_node_has_room_for_is_placed_over_several() -> None:
    plan = assign_split(
        Split("coexisting", 1, 0, 2), None, there(1, 1, 1), (), world="w", generation=1, sizes=GROUPS.sizes
    )
    assert plan is not None
    assert len(ranks_of(plan)) == 2


SLOTS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


@given(SLOTS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_no_slot_of_static_pools_serves_two_of_them(slots: list[int], train: int, reward: int, judges: int) -> None:
    names = {f"j{i}": None for i in range(judges if reward else 0)}
    wanted, snapshot = PlacementRequest(train, names, train, reward), there(*slots)
    if count_lacking_slots(snapshot, wanted):
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
    assert fill_plan(plan, snapshot, wanted) is None


@given(SLOTS, SLOTS, st.integers(1, 4))
def test_nodes_that_come_are_rollouts_and_judges_never_have_more_engines_than_they_want(
    before: list[int], more: list[int], replicas: int
) -> None:
    wanted = PlacementRequest(judges={"all": None, "some": replicas})
    plan = first_plan(there(*before), wanted, world="w", generation=1)
    after = there(*before, *more)
    new = fill_plan(plan, after, wanted)
    assert new is not None
    assert len(of_judge(new, "all")) == len(of_judge(new, "")) == after.slots
    assert len(of_judge(new, "some")) == min(replicas, after.slots)
    assert len({(p.node, p.slot, p.judge) for p in new.engines}) == len(new.engines)
    assert fill_plan(new, after, wanted) is None


def but(snapshot: Snapshot, *names: str) -> Snapshot:
    return Snapshot(tuple(node for node in snapshot.nodes if node.node not in names))


STATIC = PlacementRequest.by(
    spec(judges=[judge("a")], reward={"judge": "a"}, placement={"policy": "static", "train": 1, "reward": 1})
)


def test_a_judge_whose_node_stays_away_gets_a_slot_of_rollouts_which_keeps_one() -> None:
    nodes = there(1, 1, 1, 1)
    plan = first_plan(nodes, STATIC, world="w", generation=1)
    assert of_judge(plan, "a") == [("n1", "cpu:0")]
    assert move_judges(plan, nodes, STATIC) is None
    new = move_judges(plan, but(nodes, "n1"), STATIC)
    assert new is not None
    assert of_judge(new, "a") == [("n3", "cpu:0")]
    assert of_judge(new, "") == [("n2", "cpu:0")]
    assert (new.ranks, new.world, new.generation) == (plan.ranks, "w", 2)
    assert "a moved, because n1 stays absent" in new.reason
    back = fill_plan(new, nodes, STATIC)
    assert back is not None
    assert of_judge(back, "") == [("n2", "cpu:0"), ("n1", "cpu:0")], "the node that comes back rolls out"
    assert move_judges(plan, but(nodes, "n1", "n2"), STATIC) is None, "rollout has one slot left and keeps it"


def test_a_judge_that_has_engines_elsewhere_takes_no_slot_from_rollout() -> None:
    job = spec(judges=[judge("a")], reward={"judge": "a"}, placement={"policy": "static", "train": 1, "reward": 2})
    nodes, wanted = there(1, 1, 1, 1, 1), PlacementRequest.by(job)
    assert move_judges(first_plan(nodes, wanted, world="w", generation=1), but(nodes, "n1"), wanted) is None


def test_colocated_judges_with_a_number_of_engines_get_those_back() -> None:
    job = spec(judges=[judge("a"), judge("b", 1)], reward={"parts": [{"judge": "a"}, {"judge": "b"}]})
    nodes, wanted = there(1, 1, 1), PlacementRequest.by(job)
    plan = first_plan(nodes, wanted, world="w", generation=1)
    ((lost, _),) = of_judge(plan, "b")
    new = move_judges(plan, but(nodes, lost), wanted)
    assert new is not None
    assert len(of_judge(new, "b")) == 1
    assert lost not in {node for node, _ in of_judge(new, "b")}
    assert of_judge(new, "a") == of_judge(plan, "a"), "one that has an engine on every slot keeps its place there"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.sets(st.integers(0, 4)), st.data())
def test_possible_judges_get_engines_and_no_engine_moves_twice(
    slots: list[int], away: set[int], data: st.DataObject
) -> None:
    judges = {name: data.draw(st.none() | st.integers(1, 3)) for name in "ab"}
    reward = data.draw(st.none() | st.integers(1, 2))
    train = None if reward is None else 1
    nodes, wanted = there(*slots), PlacementRequest(train, judges, train, reward or 0)
    if count_lacking_slots(nodes, wanted):
        return
    plan = first_plan(nodes, wanted, world="w", generation=1)
    left = but(nodes, *(f"n{number}" for number in away))
    new = move_judges(plan, left, wanted) or plan
    here = {(node.node, slot) for node in left.nodes for slot in node.slots}
    places = [(place.node, place.slot, place.judge) for place in new.engines]
    assert len(places) == len(set(places))
    assert (new.ranks, new.world) == (plan.ranks, plan.world)
    rollout = {place for place in of_judge(plan, "") if place in here}
    judging = {place for name in "ab" for place in of_judge(plan, name) if place in here}
    for name, replicas in judges.items():
        has = len(here.intersection(of_judge(new, name)))
        if reward is None:
            assert has == min(len(here), replicas or len(here))
        else:
            assert has or not (judging or len(rollout) > 1)
    assert not rollout or here.intersection(of_judge(new, ""))
    assert move_judges(new, left, wanted) is None
