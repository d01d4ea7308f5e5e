"""The first placement: every offered layout fits, the same input gives the same answer, and a refusal names the model that is too large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mapped_jobs import JUDGE, SEVEN, SEVENTY, SMALL, machines, model, spec, work

from placement.mapping.cluster import ClusterSpec, parse_cluster
from placement.mapping.memory import MemoryFit, SlotMemory, bound_by_memory, fit_memory
from placement.mapping.search import (
    FirstLayout,
    FittingLayout,
    LayoutSearchResult,
    MachineSpeed,
    RejectedLayouts,
    choose_first_layout,
    search_layouts,
)
from placement.mapping.workload import MeanLengths, PoolLayout, Workload, _sizes, _splits, all_layouts
from placement.slots import Split, SplitBounds, feasible

models = st.sampled_from([SMALL, model(2048, 36, heads=16, kv_heads=2), SEVEN, SEVENTY])
clusters = st.builds(
    machines,
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 8]),
    memory_gib=st.sampled_from([16, 24, 80, 192]),
    host_memory_gib=st.sampled_from([32, 256, 2000]),
)


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    train = {"zero_stage": draw(st.sampled_from([1, 2, 3])), "kl_coef": draw(st.sampled_from([0.0, 0.1]))}
    engine = draw(st.sampled_from(["torch", "sglang"]))
    return work(draw(models), draw(st.none() | models), train=train, rollout={"engine": engine})


def sizes(found: LayoutSearchResult) -> set[Split]:
    return {fit.way.split for fit in found.fits}


@given(jobs(), clusters)
def test_offered_layouts_fit_and_use_no_slot_twice(job: Workload, cluster: ClusterSpec) -> None:
    limit = SlotMemory.of(cluster).limit
    for fit in search_layouts(job, cluster).fits:
        split = fit.way.split
        together = [split.rollout, split.reward, split.train]
        assert (max(together) if split.mode == "colocated" else sum(together)) <= cluster.slots
        assert split.rollout >= fit.way.rollout_size > 0
        assert split.train >= 1
        assert bool(split.reward) == bool(job.judges)
        assert split.rollout % fit.way.rollout_size == 0
        assert split.reward % fit.way.reward_size == 0
        assert all(used <= limit * (1 + 1e-9) for _, used in fit.room.used)
        assert fit.times.step > 0
        assert all(rows >= 1 for _, rows in fit.room.rows)


@given(jobs(), clusters)
def test_the_same_question_has_the_same_answer(job: Workload, cluster: ClusterSpec) -> None:
    assert search_layouts(job, cluster) == search_layouts(job, cluster)


@given(jobs(), clusters)
def test_every_way_either_fits_or_is_counted_among_those_that_do_not(job: Workload, cluster: ClusterSpec) -> None:
    found = search_layouts(job, cluster)
    tried = list(all_layouts(cluster, job))
    assert len(set(tried)) == len(tried)
    assert len(found.fits) + sum(one.count for one in found.misfits) == len(tried)
    assert list(found.fits) == sorted(found.fits, key=lambda fit: (fit.times.step, fit.way))


@given(jobs(), st.sampled_from([16, 24, 40, 80]))
def test_more_memory_takes_no_way_away(job: Workload, memory: int) -> None:
    little, much = (search_layouts(job, machines(1, 4, memory_gib=size)) for size in (memory, 2 * memory))
    assert {fit.way for fit in little.fits} <= {fit.way for fit in much.fits}


@given(models, st.integers(1, 63))
def test_more_ranks_never_compute_longer_where_they_need_not_talk(shape: Any, ranks: int) -> None:
    cluster = machines(1, 64, link_gb_s=1e6)
    machine, training = MachineSpeed.of(cluster), work(shape).training
    assert machine.train_s(training, 2 * ranks) <= machine.train_s(training, ranks) * 1.001


def test_misfit_names_the_models_and_the_excess() -> None:
    found = search_layouts(work(SEVEN, train={"advantage": "gae"}), machines(1, 4, memory_gib=80))
    said = [str(one.excess) for one in found.misfits if one.way.split.mode == "colocated"]
    assert any(
        text.startswith("policy training + critic training + rollout exceed 80 GiB on 4 slots by ") for text in said
    )
    alone = [str(one.excess) for one in found.misfits if one.way.split.mode == "coexisting"]
    assert any(text.startswith("policy training + critic training exceed 80 GiB on ") for text in alone)


def test_the_sentence_names_the_amount_that_is_lacking() -> None:
    job, way = (
        work(SEVEN),
        next(one for one in all_layouts(machines(1, 2), work(SEVEN)) if one.split.mode == "colocated"),
    )
    cluster = machines(1, 2, memory_gib=80)
    excess = fit_memory(way, job, cluster, SlotMemory.of(cluster))
    assert not isinstance(excess, MemoryFit)
    enough = machines(1, 2, memory_gib=(excess.over + SlotMemory.of(cluster).limit) / 0.95 / 2**30 + 1e-6)
    assert isinstance(fit_memory(way, job, enough, SlotMemory.of(enough)), MemoryFit)


def test_a_stage_that_would_fit_is_hinted_at() -> None:
    found = search_layouts(work(SEVEN, train={"zero_stage": 1}), machines(1, 4, memory_gib=72))
    assert found.first is None
    assert any(hint.startswith("With train.zero_stage: ") and " would fit" in hint for hint in found.hints)


def test_host_memory_is_a_limit_too() -> None:
    found = search_layouts(work(SEVEN, train={"zero_stage": 3}), machines(1, 8, host_memory_gib=100))
    assert found.first is None
    assert any("of host memory" in str(one.excess) for one in found.misfits)


def test_models_that_have_the_memory_in_turns_fit_where_all_of_them_at_once_do_not() -> None:
    job, cluster = work(SEVEN, SEVEN, train={"zero_stage": 3}), machines(1, 8, memory_gib=44)
    together = [fit.way for fit in search_layouts(job, cluster).fits if fit.way.split.mode == "colocated"]
    assert together
    assert all(way.asleep for way in together)


def test_where_memory_is_the_hosts_or_phases_overlap_nobody_sleeps() -> None:
    cores = parse_cluster({"nodes": [{"accelerators": 4, "device": "cpu-core", "host_memory_gib": 64}]}, where="a test")
    assert not any(way.asleep for way in all_layouts(cores, work(SMALL)))
    ahead = work(SMALL, train={"old_logprobs": "engine"}, rollout={"staleness": 1})
    assert not any(way.asleep for way in all_layouts(machines(), ahead))


def test_engines_that_sleep_on_other_pools_slots_are_counted() -> None:
    judge, train = model(5120, 48, heads=40, kv_heads=8), {"zero_stage": 3}
    fixed, moving = (work(SEVEN, judge, train=train, placement=said) for said in ({}, {"policy": "dynamic"}))
    cluster = machines(1, 8, memory_gib=192, host_memory_gib=400)
    memory, way = SlotMemory.of(cluster), PoolLayout(Split("coexisting", 2, 2, 4), 1, 1, False)
    before, after = fit_memory(way, fixed, cluster, memory), fit_memory(way, moving, cluster, memory)
    assert isinstance(before, MemoryFit)
    assert "of host memory" in str(after), "the judge's weights wait on every slot"
    roomy = machines(1, 8, memory_gib=192, host_memory_gib=4000)
    with_sleepers = fit_memory(way, moving, roomy, memory)
    assert isinstance(with_sleepers, MemoryFit)
    assert dict(with_sleepers.cells)["judge right"] <= dict(before.cells)["judge right"]


def test_a_model_too_large_for_a_slot_is_planned_over_several_but_not_started() -> None:
    cluster, job = machines(2, 8, memory_gib=192, host_memory_gib=4000), work(SEVENTY, train={"zero_stage": 3})
    found = search_layouts(job, cluster)
    assert found.fits
    assert all(fit.way.rollout_size > 1 for fit in found.fits)
    assert found.first is None
    nearest = choose_first_layout(job, cluster, SplitBounds(16, train_sizes=tuple(range(1, 17)), judged=False))
    assert isinstance(nearest, RejectedLayouts)
    assert any("over several slots" in hint for hint in found.hints)


@pytest.mark.parametrize(("engine", "starts"), [("torch", False), ("hf", False), ("sglang", True), ("vllm", True)])
def test_a_job_starts_with_wide_engines_only_if_its_engine_can_be_wide(engine: str, starts: bool) -> None:
    job = work(SEVEN, rollout={"engine": engine})
    assert {way.starts for way in all_layouts(machines(), job) if way.rollout_size > 1} == {starts}
    judged = work(SEVEN, SMALL, judges=[JUDGE | {"serving": {"engine": engine}}])
    ways = [way for way in all_layouts(machines(), judged) if way.rollout_size == 1]
    assert {way.starts for way in ways if way.reward_size > 1} == {starts}
    assert {way.starts for way in ways if way.reward_size == 1} == {True}


def test_replicas_span_no_node_boundary_and_no_odd_share_of_heads() -> None:
    spans = {way.rollout_size for way in all_layouts(machines(2, 6), work(SEVENTY))}
    assert spans == {1, 2}, "a node of six holds no whole number of fours"
    assert {way.rollout_size for way in all_layouts(machines(2, 8), work(SEVEN))} == {1, 2, 4}, "four key heads"


EIGHT = SplitBounds(8, train_sizes=tuple(range(1, 9)))


def as_it_begins(job: Workload, fits: Sequence[FittingLayout]) -> list[FittingLayout]:
    """Of them, those in which a job can be begun as its spec stands, on GPUs."""
    asleep = job.turns[-1]
    alone = [f for f in fits if f.way.rollout_size == f.way.reward_size == 1]
    return [f for f in alone if f.way.asleep == asleep or f.way.split.mode == "coexisting"]


def test_a_job_begins_with_the_best_that_can_be_started() -> None:
    job, cluster = work(SEVEN, SMALL, train={"zero_stage": 3}), machines()
    first, found = choose_first_layout(job, cluster, EIGHT), as_it_begins(job, search_layouts(job, cluster).fits)
    assert isinstance(first, FirstLayout)
    assert first.split == next(fit for fit in found if not fit.room.bound).way.split
    assert f"nothing is measured yet: of {first.count} ways that fit it is predicted to take least, " in first.reason


def test_a_job_begins_within_the_bounds_that_it_is_given() -> None:
    job, cluster = work(SEVEN, SMALL, train={"zero_stage": 3}), machines()
    first = choose_first_layout(job, cluster, SplitBounds(8, train_sizes=(5,), colocated=False))
    assert isinstance(first, FirstLayout)
    assert (first.split.mode, first.split.train) == ("coexisting", 5)
    assert choose_first_layout(job, cluster, SplitBounds(8, train_sizes=(8,), colocated=False)) is None


@given(jobs(), clusters, st.booleans())
def test_first_layout_fits_and_is_within_its_bounds(job: Workload, cluster: ClusterSpec, timed: bool) -> None:
    bounds = SplitBounds(cluster.slots, train_sizes=tuple(range(1, cluster.slots + 1)), judged=bool(job.judges))
    first = choose_first_layout(job, cluster, bounds, "" if timed else "nobody knows how fast it is")
    fitting = as_it_begins(job, search_layouts(job, cluster).fits)
    if not isinstance(first, FirstLayout):
        # Of co-located worlds only the largest is within the bounds.
        assert not [fit for fit in fitting if fit.way.split in set(feasible(bounds))]
        return
    assert first.split in set(feasible(bounds))
    assert first.split in {fit.way.split for fit in fitting}
    assert bool(first.cut) == bool(first.fit.room.bound)
    assert (first.expected_s is None) == (not timed)


@given(jobs(), clusters, st.none() | st.integers(1, 24))
def test_memory_takes_no_split_away_that_fits_and_leaves_some(
    job: Workload, cluster: ClusterSpec, now: int | None
) -> None:
    judged = bool(job.judges)
    bounds = SplitBounds(cluster.slots, train_sizes=tuple(range(1, cluster.slots + 1)), judged=judged)
    left = bound_by_memory(bounds, job, cluster, now)
    fitting = {fit.way.split for fit in as_it_begins(job, search_layouts(job, cluster).fits)}
    before, after = set(feasible(bounds)), set(feasible(left))
    assert fitting & before <= after <= before
    assert bool(after) == bool(before)
    if now in bounds.sizes() and left is not bounds:
        assert now in left.train_sizes


def test_splits_that_exceed_memory_are_excluded_from_the_bounds() -> None:
    job, cluster = work(SEVEN, train={"zero_stage": 3}), machines(1, 8, memory_gib=40)
    bounds = SplitBounds(8, train_sizes=tuple(range(1, 9)), judged=False)
    left = bound_by_memory(bounds, job, cluster)
    assert left.train_sizes, "some fit"
    assert min(left.train_sizes) > 1, "one rank has all of the optimizer's state"
    assert bound_by_memory(bounds, job, cluster, now=1).train_sizes[0] == 1, "but a world that is there fits"
    hopeless = machines(1, 8, memory_gib=1)
    assert bound_by_memory(bounds, job, hopeless) == bounds, "where nothing fits, nothing is left out"


def test_a_judge_that_is_slow_gets_more_slots() -> None:
    def reward(shape: Any) -> int:
        fits = search_layouts(work(SMALL, shape, train={"zero_stage": 3}), machines(2)).fits
        return next(fit.way.split.reward for fit in fits if fit.way.split.mode == "coexisting" and fit.way.starts)

    assert reward(SEVEN) > reward(SMALL)


def test_with_staleness_training_and_rollout_overlap() -> None:
    strict = work(SEVEN, train={"zero_stage": 3})
    ahead = work(SEVEN, train={"zero_stage": 3, "old_logprobs": "engine"}, rollout={"staleness": 1})
    times = [
        next(fit.times for fit in search_layouts(job, machines()).fits if fit.way.split == Split("coexisting", 4, 0, 4))
        for job in (strict, ahead)
    ]
    assert times[0].step == pytest.approx(times[0].rollout + times[0].training + times[0].publishing)
    assert times[1].step == pytest.approx(max(times[1].rollout, times[1].training + times[1].publishing))


def test_a_job_that_is_shown_its_answers_waits_for_none() -> None:
    shown = work(SMALL, flow={"name": "sft"}, train={"loss": "sft", "old_logprobs": "current"})
    fits = search_layouts(shown, machines()).fits
    assert fits
    assert all(fit.times.rollout == 0 for fit in fits)


def test_lengths_are_half_of_the_longest_unless_somebody_knows_them() -> None:
    assert MeanLengths.guessed(spec(), SEVEN) == MeanLengths(256, 512)
    assert MeanLengths.guessed(spec(), SEVEN, 100, 5000) == MeanLengths(100, 1024)


def test_a_thousand_slots_are_searched_through_a_grid() -> None:
    tried = list(all_layouts(machines(128), work(SEVEN, SMALL)))
    assert len(tried) < 30_000
    assert {way.split.train for way in tried} >= {1, 2, 64, 512}


@given(
    slots=st.integers(65, 260),
    sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    trains=st.sets(st.integers(1, 260), min_size=1, max_size=4),
    colocated=st.booleans(),
)
def test_on_many_slots_some_of_the_splits_are_tried_and_all_of_these_are_found(
    slots: int, sizes: tuple[int, int], trains: set[int], colocated: bool
) -> None:
    bounds = SplitBounds(slots, *sizes, tuple(sorted(trains)), True, colocated)
    tried = set(_sizes(slots))
    wanted = [one for one in feasible(bounds) if one.mode == "colocated" or one.reward // sizes[1] in tried]
    assert list(_splits(bounds)) == wanted


def test_the_ways_of_the_largest_cluster_are_told_at_once() -> None:
    for cluster in (machines(100_000, 1), machines(97, 1024, host_memory_gib=100_000)):
        assert 1000 < len(list(all_layouts(cluster, work(SEVEN, SEVEN)))) < 20_000
