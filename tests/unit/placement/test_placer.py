"""The first placement with movable slots: its constraints, and pins by users."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapped_jobs import spec
from told_nodes import QWEN
from told_nodes import node as told

from gcore.config import parse_spec
from gcore.errors import SpecError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import Pin
from placement.assign import assign_split, split_of
from placement.initial import make_initial_plan
from placement.mapping.search import describe_workload
from placement.placer import (
    apply_pin,
    fill_plan,
    find_bounds,
    first_split,
    mend_plan,
    place_split,
)
from placement.policies.base import Decision, PolicyStart, Situation, SwitchCosts, find_policy
from placement.request import PlacementRequest
from placement.slots import NodeSlots, Snapshot, Split, SplitBounds, feasible

JOB = PlacementRequest(judges={"j": None}, moves=True, most_ranks=32)


def cluster(*sizes: int) -> Snapshot:
    return Snapshot(tuple(NodeSlots(f"n{i}", tuple(f"cpu:{s}" for s in range(size))) for i, size in enumerate(sizes)))


def test_a_job_begins_with_what_its_spec_says_or_with_all_slots_in_turn() -> None:
    said = replace(JOB, train=1, reward=2)
    limits = find_bounds(cluster(4, 4), said)
    assert first_split(limits, said) == Split("coexisting", 5, 2, 1)
    found = first_split(find_bounds(cluster(4, 4), JOB), JOB)
    assert found is not None
    assert found.mode == "colocated"


def test_a_world_that_leaves_a_rank_without_a_sample_is_no_choice() -> None:
    assert max(find_bounds(cluster(8), replace(JOB, most_ranks=3)).train_sizes) == 3
    assert find_bounds(cluster(8), replace(JOB, ranks=2)).train_sizes == (2,)
    many = find_bounds(cluster(*[8] * 16), replace(JOB, most_ranks=10**6), now=7).train_sizes
    assert {1, 2, 3, 4, 6, 7, 8, 128} <= set(many)
    assert len(many) < 20


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_new_world_is_placed_as_near_as_can_be_to_the_split_there_was(before: list[int], after: list[int]) -> None:
    plan = place_split(cluster(*before), JOB, world="w", generation=1)
    assert plan is not None
    again = place_split(cluster(*after), JOB, world="x", generation=2, current=plan)
    assert again is not None
    split = split_of(again)
    assert split in set(feasible(find_bounds(cluster(*after), JOB)))
    if before == after:
        assert split == split_of(plan)


def test_a_split_that_is_wanted_is_placed_if_it_fits() -> None:
    wanted = Split("coexisting", 2, 1, 1)
    plan = place_split(cluster(4), JOB, world="w", generation=1, wanted=wanted)
    assert plan is not None
    assert split_of(plan) == wanted
    small = place_split(cluster(3), JOB, world="w", generation=1, wanted=wanted)
    assert small is not None
    assert split_of(small) != wanted


def test_pin_yields_when_the_job_could_not_run() -> None:
    plan = place_split(cluster(2), JOB, world="w", generation=1, pin=Pin(train=5))
    assert plan is not None
    assert len(plan.ranks) <= 2


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        pytest.param(Pin(rollout=3), JOB, id="one pool"),
        pytest.param(Pin(reward=3, train=2), JOB, id="two pools"),
        pytest.param(Pin(rollout=3, reward=3, train=2), JOB, id="all pools"),
        pytest.param(Pin(reward=3, train=2), replace(JOB, train=4, reward=1), id="other than the spec says"),
    ],
)
def test_a_plan_has_what_a_person_fixed_at_the_beginning_and_in_a_new_world(pin: Pin, said: PlacementRequest) -> None:
    first = first_split(find_bounds(cluster(4, 4), said, pin), said, pin)
    assert first is not None
    assert pin.off(first) == 0
    before = place_split(cluster(4, 4), JOB, world="w", generation=1, wanted=Split("coexisting", 2, 2, 4))
    after = place_split(cluster(4, 4), said, world="x", generation=2, current=before, pin=pin)
    assert after is not None
    assert pin.off(split_of(after)) == 0


def test_unsatisfiable_pin_is_approximated() -> None:
    pin = Pin(rollout=3, reward=3, train=2)
    before = place_split(cluster(4, 4), JOB, world="w", generation=1, pin=pin)
    after = place_split(cluster(4, 3), JOB, world="x", generation=2, current=before, pin=pin)
    assert after is not None
    assert pin.off(split_of(after)) == 1


def test_a_pool_whose_engines_are_all_away_gets_one() -> None:
    whole = cluster(2, 3)
    plan = place_split(whole, JOB, world="w", generation=1, wanted=Split("coexisting", 3, 1, 1))
    assert plan is not None
    assert mend_plan(plan, whole, JOB) is None
    (judge,) = [place for place in plan.engines if place.judge and not place.asleep]
    assert {rank.node for rank in plan.ranks} == {node.node for node in whole.nodes} - {judge.node}
    found = mend_plan(plan, Snapshot(tuple(node for node in whole.nodes if node.node != judge.node)), JOB)
    assert found is not None
    assert found.ranks == plan.ranks
    assert any(place.judge and not place.asleep and place.node != judge.node for place in found.engines)


def test_a_slot_that_comes_is_rollouts_and_its_judges_sleep() -> None:
    plan = place_split(cluster(4), JOB, world="w", generation=1, wanted=Split("coexisting", 2, 1, 1))
    assert plan is not None
    more = fill_plan(plan, cluster(4, 1), PlacementRequest(moves=True))
    assert more is not None
    (fresh,) = [place for place in more.engines if place.node == "n1"]
    assert not fresh.asleep
    assert fill_plan(more, cluster(4, 1), PlacementRequest(moves=True)) is None


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_policy_obeys_what_is_fixed(rollout: int, reward: int) -> None:
    limits = find_bounds(cluster(4, 4), JOB, Pin(reward=reward))
    wish = Decision(Split("coexisting", rollout, 8 - rollout - 1, 1), "why", 3.0, 4.0, 0.5, 9.0)
    found = apply_pin(wish, limits, Pin(reward=reward))
    assert found is not None
    assert found.split.reward == reward
    if found.split != wish.split:
        assert (found.expected_s, found.before_s, found.cost_s, found.gain_s) == (None, None, 0.0, 0.0), "another's"
    assert apply_pin(wish, limits, Pin()) == wish


def test_pools_apart_stay_apart_where_only_the_train_world_is_fixed() -> None:
    limits = SplitBounds(8, 1, 1, (1, 2, 4, 8), judged=False, colocated=True)
    found = apply_pin(Decision(Split("coexisting", 7, 0, 1), "why"), limits, Pin(train=4))
    assert found is not None
    assert found.split == Split("coexisting", 4, 0, 4)


def test_unsatisfiable_pin_gives_no_decision() -> None:
    limits = find_bounds(cluster(4), JOB, Pin(rollout=4))
    assert apply_pin(Decision(Split("coexisting", 1, 2, 1), "why"), limits, Pin(rollout=4)) is None


@given(st.integers(1, 12), st.integers(0, 6), st.integers(1, 4), st.integers(1, 4))
def test_on_other_slots_pools_keep_their_shares(rollout: int, reward: int, train: int, times: int) -> None:
    """A job that comes back on more slots does not give all of the new ones to rollout."""
    before, job = Split("coexisting", rollout, reward, train), replace(JOB, judges={"j": None} if reward else {})
    first = assign_split(before, None, cluster(rollout + reward + train), job.judges, world="w", generation=1)
    assert first is not None
    there = cluster(*[rollout + reward + train] * times)
    found = place_split(there, job, world="x", generation=2, current=first)
    assert found is not None
    assert split_of(found).reward == reward * times
    assert split_of(found).rollout + split_of(found).train == (rollout + train) * times


@pytest.mark.parametrize("name", ["static", "colocated", "hill_climb", "threshold", "dynamic"])
def test_gcores_own_policies_are_found_by_name_and_keep_within_bounds(name: str) -> None:
    limits = find_bounds(cluster(4), JOB)
    first = first_split(limits, JOB)
    assert first is not None
    policy = find_policy(name)(PolicyStart(first, 8, 8))
    decision = policy.plan(Situation(limits, first, (), SwitchCosts(1.0, 2.0), None))
    assert decision.split in set(feasible(limits))


def test_a_policy_that_nobody_provides_is_named_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"no placement policy is called 'dynamics', did you mean 'dynamic'\?"):
        find_policy("dynamics")


def test_initial_plan_is_known_before_the_start_or_refused() -> None:
    tree = {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 4},
        "placement": {"policy": "dynamic", "train": 2},
    }
    assert split_of(make_initial_plan(cluster(4), parse_spec(tree), None).plan) == Split("coexisting", 2, 0, 2)
    assert len(make_initial_plan(cluster(2, 2), parse_spec({**tree, "placement": {}}), None).plan.ranks) == 2
    with pytest.raises(SpecError, match="do not fit on 2 slots"):
        make_initial_plan(cluster(2), parse_spec(tree), None)


def test_a_world_keeps_its_size_whatever_memory_it_is_estimated_to_take() -> None:
    """It was there, so it fits; a person may have written its size."""
    nodes = Snapshot((told("n0", *[30.0] * 8, host=2000.0),))
    work = describe_workload(
        spec(placement={"policy": "dynamic"}), ModelConfigs(policy=QWEN | {"num_hidden_layers": 100})
    )
    job = PlacementRequest(moves=True, most_ranks=32, work=work)
    assert 1 not in find_bounds(nodes, job).train_sizes
    before = place_split(nodes, replace(job, work=""), world="w", generation=1, wanted=Split("coexisting", 7, 0, 1))
    assert before is not None
    after = place_split(nodes, job, world="x", generation=2, current=before)
    assert after is not None
    assert split_of(after) == split_of(before)


def test_a_pool_that_is_mended_keeps_no_slot_free_for_ranks_that_are_away() -> None:
    """They have their slots where they are."""
    three = cluster(2, 2, 2)
    first = assign_split(Split("coexisting", 4, 1, 1), None, three, ("j",), world="w", generation=1)
    assert first is not None
    (rank,) = first.ranks
    judged = {place.node for place in first.engines if place.judge and not place.asleep}
    here = Snapshot(tuple(node for node in three.nodes if node.node not in {rank.node, *judged}))
    found = mend_plan(first, here, JOB)
    assert found is not None
    assert found.ranks == first.ranks
    left = {(node.node, slot) for node in here.nodes for slot in node.slots}
    awake = {(place.node, place.slot) for place in found.engines if not place.asleep} & left
    assert awake == left
