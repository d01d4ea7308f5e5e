"""The messages of `gcore plan` about the placements that it found, and the suggested lines of a spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mapped_jobs import JUDGE, SEVEN, SMALL, machines, spec, work

from controllers.cli.commands.plan import _nothing_fits
from controllers.cli.view.plan import (
    LARGER,
    PlanReport,
    YamlSection,
    _begins,
    _counted,
    advice,
    cache_hints,
    lines_to_delete,
    paste_section,
    placement_section,
)
from placement.mapping.memory import MemoryExcess, format_gib
from placement.mapping.search import LayoutSearchResult, RejectedLayouts, search_layouts
from placement.mapping.workload import JobShapes, MeanLengths


def test_a_policy_that_moves_slots_keeps_its_name_and_begins_with_the_sizes() -> None:
    said = {"placement": {"policy": "dynamic"}}
    fits = search_layouts(work(SEVEN, SMALL, train={"zero_stage": 3}, **said), machines()).fits
    apart = next(fit for fit in fits if fit.way.split.mode == "coexisting" and fit.way.starts)
    job = spec(judges=[JUDGE], reward={"judge": "right"}, **said)
    section = placement_section(job, apart)
    split = apart.way.split
    assert section["placement"] == {"policy": "dynamic", "train": split.train, "reward": split.reward}
    together = next(fit for fit in fits if fit.way.split.mode == "colocated" and fit.way.starts)
    assert placement_section(job, together)["placement"].keys() == {"policy", "memory"}
    assert "train" not in placement_section(job, together)


def test_memory_policy_is_suggested_only_for_shared_slots() -> None:
    fits = search_layouts(work(SEVEN, train={"zero_stage": 3}), machines()).fits
    for mode, memory in (("colocated", {"kept", "in_turns"}), ("coexisting", {None})):
        found = {
            placement_section(spec(), fit)["placement"].get("memory") for fit in fits if fit.way.split.mode == mode
        }
        assert found == memory


def test_an_engine_with_less_cache_than_it_wants_is_told_how_much_it_has() -> None:
    said: dict[str, Any] = {
        "train": {"zero_stage": 3},
        "rollout": {"engine": "torch", "max_new_tokens": 8000, "batch_slots": 256},
    }
    fits = search_layouts(work(SEVEN, **said), machines(memory_gib=60)).fits
    bound = next(fit for fit in fits if fit.room.bound and fit.way.starts)
    assert placement_section(spec(**said), bound)["rollout"] == {"cache_tokens": dict(bound.room.cells)["rollout"]}
    free = next(fit for fit in search_layouts(work(SMALL), machines()).fits if not fit.room.bound)
    assert "rollout" not in placement_section(spec(), free)


def planned_of(found: LayoutSearchResult, **said: Any) -> PlanReport:
    workload, nodes = work(SEVEN, **said), machines()
    shapes = JobShapes(SEVEN, None, {})
    return PlanReport(spec(**said), nodes, shapes, MeanLengths(1.0, 1.0), workload, found)


def test_a_policy_that_moves_slots_is_not_said_to_begin_with_a_world_that_it_does_not_know() -> None:
    said: dict[str, Any] = {"placement": {"policy": "dynamic"}, "train": {"zero_stage": 3}}
    found = search_layouts(work(SEVEN, **said), machines())
    planned, fixed = planned_of(found, **said), planned_of(found, train={"zero_stage": 3})
    together = [fit.way for fit in found.fits if fit.way.split.mode == "colocated" and fit.way.starts]
    assert {way.ranks for way in together if planned.begins(way)} == {planned.cluster.slots}
    assert all(fixed.begins(way) for way in together)
    few = replace(found, fits=tuple(fit for fit in found.fits if fit.way.ranks < planned.cluster.slots))
    first = planned_of(few, **said).first
    assert first is not None
    assert first.way.split.mode == "coexisting"
    fewest = min(way.ranks for way in together)
    assert fewest < planned.cluster.slots
    said = {"placement": {"policy": "dynamic"}, "train": {"zero_stage": 3, "ranks": fewest}}
    assert {way.ranks for way in together if planned_of(found, **said).begins(way)} == {fewest}


def test_where_nothing_can_be_begun_with_a_sentence_says_so_whatever_is_nearest_to_it() -> None:
    found = search_layouts(work(SEVEN, train={"zero_stage": 3}), machines())
    over = tuple(fit for fit in found.fits if not fit.way.starts)[:1]
    few = RejectedLayouts(over[0].way, MemoryExcess(("rollout",), 1, 8.0, 1.0, engines=True), 1)
    for misfits in ((), (few,)):
        said = _nothing_fits(planned_of(replace(found, fits=over, misfits=misfits)), Path("c.yaml"))
        assert "no initial placement of job 'j' fits" in str(said)
        assert ("The closest is" in str(said)) == bool(misfits)
    assert "no placement of job 'j' fits" in str(_nothing_fits(planned_of(replace(found, fits=())), Path("c.yaml")))


def test_plan_compares_the_current_spec_with_the_suggestion() -> None:
    base: dict[str, Any] = {"train": {"zero_stage": 3}}
    found = search_layouts(work(SEVEN, **base), machines())
    named = planned_of(found, placement={"policy": "static", "train": 6}, **base)
    assert named.stands is not None
    assert (named.stands.way.split.mode, named.stands.way.ranks) == ("coexisting", 6)
    first = named.first
    assert first is not None
    assert first != named.stands
    told = _begins(named, first)
    assert f"With the current spec, the job starts with {named.stands.way}; the predicted step time is " in told
    assert f"To start with {first.way} (predicted step time " in told
    split = first.way.split
    if split.mode == "coexisting":
        same = planned_of(found, placement={"policy": "static", "train": split.train}, **base)
        assert same.stands == first
        assert _begins(same, first).startswith(f"With the current spec, the job starts with {first.way}; ")
    nowhere = replace(found, fits=tuple(fit for fit in found.fits if fit.way.ranks != 6))
    assert "The placement of the current spec does not fit" in _begins(
        planned_of(nowhere, placement={"policy": "static", "train": 6}, **base), first
    )
    shared = planned_of(found, **(base | {"train": {"zero_stage": 3, "ranks": 4}}))
    assert shared.stands is not None
    assert (shared.stands.way.split.mode, shared.stands.way.ranks, shared.stands.way.asleep) == ("colocated", 4, True)


def test_where_the_spec_names_no_number_of_ranks_it_is_said_where_the_number_comes_from() -> None:
    from_nodes = (
        "1 rank, memory kept (one train rank per node, because train.ranks is not set); the predicted step time is "
    )
    found = search_layouts(work(SMALL), machines(memory_gib=2000.0))
    shared = planned_of(found, placement={"memory": "kept"})
    assert shared.first is not None
    assert from_nodes in _begins(shared, shared.first)
    named = planned_of(found, placement={"memory": "kept"}, train={"ranks": 4})
    assert "train.ranks" not in _begins(named, shared.first)
    assert "train.ranks" not in _begins(planned_of(found, placement={"policy": "dynamic"}), shared.first)


def test_plan_lists_the_lines_to_delete_from_the_spec() -> None:
    together: YamlSection = {"placement": {"policy": "dynamic", "memory": "kept"}}
    said = spec(placement={"policy": "dynamic", "train": 2, "reward": 1}, judges=[JUDGE], reward={"judge": "right"})
    assert lines_to_delete(said, together) == (
        "delete placement.train and placement.reward of the spec, which contradict this placement",
    )
    apart: YamlSection = {"placement": {"policy": "static", "train": 2, "reward": 1}}
    assert lines_to_delete(said, apart) == ()
    ranks = spec(placement={"policy": "colocated", "memory": "kept"}, train={"ranks": 3})
    assert lines_to_delete(ranks, apart) == (
        "delete placement.memory and train.ranks of the spec, which contradict this placement",
    )


def test_of_every_judge_with_less_cache_than_it_wants_a_line_says_what_to_write() -> None:
    fit = next(iter(search_layouts(work(SEVEN, SMALL, train={"zero_stage": 3}), machines()).fits))
    cells = (("rollout", 100), ("judge right", 2048))
    bound = replace(fit, room=replace(fit.room, cells=cells, bound=("rollout", "judge right")))
    assert cache_hints(bound) == (
        "judge right: memory suffices for 2,048 tokens of KV cache; set its serving.cache_tokens, because its default may use more",
    )
    assert cache_hints(replace(fit, room=replace(fit.room, bound=()))) == ()


def advised(memory_gib: float, **said: Any) -> str:
    """What is said first of a job that does not fit on one such device."""
    workload, nodes = work(SEVEN, **said), machines(1, 1, memory_gib=memory_gib)
    return advice(workload, nodes, next(iter(search_layouts(workload, nodes).misfits), None))


def test_where_nothing_fits_the_largest_part_of_the_nearest_way_is_named_with_its_field() -> None:
    long: dict[str, Any] = {"train": {"activation_checkpointing": False, "micro_batch_tokens": 1 << 18}}
    told = advised(200, **long)
    assert told.startswith("The largest part is activations of policy training for a micro-batch of ")
    assert "set train.activation_checkpointing: true, and lower train.micro_batch_tokens (now 262,144; " in told
    assert "weights, gradients and optimizer of policy training on 1 rank, " in advised(60)
    assert "train.zero_stage: 3, more ranks" in advised(60)
    assert advice(work(SEVEN), machines(), None) == LARGER


def test_a_share_that_sglang_takes_is_named_with_the_argument_that_sets_it() -> None:
    workload, nodes = work(SEVEN, rollout={"engine": "sglang"}), machines()
    way = next(iter(search_layouts(workload, nodes).misfits)).way
    small = MemoryExcess(
        ("rollout with one longest request",), 1, 1.0, 1.0, engines=True, where="the engine's 0.5 of 80 GiB"
    )
    assert "raise it with rollout.engine_args: [--mem-fraction-static, SHARE]" in advice(
        workload, nodes, RejectedLayouts(way, small, 1)
    )
    large = MemoryExcess(("rollout",), 1, 80.0, 1.0, engines=True)
    assert "the memory that the engine reserves for rollout, 39.8 GiB: lower it with rollout.engine_args" in advice(
        workload, nodes, RejectedLayouts(way, large, 1)
    )


def test_placements_that_fit_and_cannot_be_started_are_counted_as_such() -> None:
    found = search_layouts(work(SEVEN, train={"zero_stage": 3}), machines())
    wide = tuple(fit for fit in found.fits if not fit.way.starts)
    assert "the job can start with none of those that fit" in _counted(planned_of(replace(found, fits=wide)))
    assert "none of those that fit" not in _counted(planned_of(found))


def test_memory_is_told_in_digits() -> None:
    assert [format_gib(size * (1 << 30)) for size in (1220.4, 99.96, 11, 0.4)] == [
        "1,220 GiB",
        "100 GiB",
        "11 GiB",
        "0.4 GiB",
    ]


WIDE: dict[str, Any] = {"rollout": {"engine": "sglang", "max_new_tokens": 1024}, "train": {"zero_stage": 3}}
SERVED = JUDGE | {"serving": {"engine": "sglang"}}


def test_only_sglang_can_be_started_over_several_slots() -> None:
    mixed = WIDE | {"judges": [JUDGE], "reward": {"judge": "right"}}
    for said, rollout, reward in (({}, {1}, {1}), (WIDE, {1, 2, 4}, {1}), (mixed, {1, 2, 4}, {1})):
        judge = SMALL if "judges" in said else None
        starting = [fit.way for fit in search_layouts(work(SEVEN, judge, **said), machines()).fits if fit.way.starts]
        assert {way.rollout_size for way in starting} == rollout
        assert {way.reward_size for way in starting} == reward


def test_engines_over_several_slots_are_written_once() -> None:
    said = WIDE | {"judges": [SERVED], "reward": {"judge": "right"}}
    fits = search_layouts(work(SEVEN, SMALL, **said), machines()).fits
    wide = next(f for f in fits if (f.way.rollout_size, f.way.reward_size, f.way.split.mode) == (2, 2, "coexisting"))
    section = placement_section(spec(**said), wide)
    assert section["rollout"]["slots_per_engine"] == 2
    assert section["judges"] == {"right": {"slots_per_engine": 2}}
    by_hand, besides = paste_section(section)
    assert "judges" not in by_hand
    assert besides == ("set serving.slots_per_engine: 2 of judge right",)
    judge = SERVED | {"serving": SERVED["serving"] | section["judges"]["right"]}
    pasted = {"placement": section["placement"], "rollout": WIDE["rollout"] | section["rollout"], "judges": [judge]}
    written = spec(**(said | pasted))
    assert (written.placement.train, written.placement.reward) == (wide.way.split.train, wide.way.split.reward)
    assert placement_section(written, wide).keys() <= {"placement", "rollout"}, (
        "what it says already is not written again"
    )


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_current_placement_uses_the_specs_engine_size(policy: str) -> None:
    for size in (1, 2):
        said = WIDE | {"placement": {"policy": policy} | ({"train": 4} if policy == "static" else {})}
        said["rollout"] = said["rollout"] | {"slots_per_engine": size}
        planned = planned_of(search_layouts(work(SEVEN, **said), machines()), **said)
        assert planned.stands is not None
        assert planned.stands.way.rollout_size == size
