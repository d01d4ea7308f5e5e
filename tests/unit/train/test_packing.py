"""Micro-batches: every sample once, within the budget, little padding, equal in number and similar in cost on all ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from builders import sample_slots, seal_of_lengths
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.balance import SampleSlot, balance_samples, sample_cost, single_units
from gcore.ledger.records.chain import Seal, SealState
from gcore.train.packing import (
    CutSettings,
    MicroPlan,
    Packing,
    Unit,
    cut_evenly,
    is_masked,
    plan_step,
    sample_length,
)


def make_seal(lengths: list[tuple[int, list[int]]], ranks: int, mini_batches: int, **more: Any) -> Seal:
    """`lengths`: of the prompt and of the responses of each group."""
    prompts, responses = [prompt for prompt, _ in lengths], [found for _, found in lengths]
    return seal_of_lengths(
        responses, prompts, world_size=ranks, mini_batches=mini_batches, state=SealState.READY, **more
    )


seals = st.builds(
    make_seal,
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    masked=st.sampled_from([(), (0,), (0, 1, 2, 3, 4, 5)]),
    attention_equals_at=st.sampled_from([1, 50, 24_576]),
)
pictured = st.builds(
    make_seal,
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    masked=st.sampled_from([(), (0,)]),
    attention_equals_at=st.sampled_from([1, 24_576]),
    patches=st.lists(st.sampled_from([0, 4, 60, 500]), min_size=1, max_size=4),
)
cuttings = st.builds(CutSettings, st.integers(1, 300), st.sampled_from(["packed", "bucketed"]), st.booleans())


def cost(seal: Seal, one: MicroPlan) -> int:
    return sum(sample_cost(sample_length(seal, slot), seal.attention_equals_at) for slot in one.slots)


@given(seals, cuttings)
def test_every_sample_that_is_computed_is_in_exactly_one_micro_batch_of_one_rank_and_mini_batch(
    seal: Seal, cutting: CutSettings
) -> None:
    layout = balance_samples(seal)
    found: list[SampleSlot] = []
    for rank in range(seal.world_size):
        for number, plan in enumerate(plan_step(seal, layout, rank, cutting)):
            slots = [slot for batch in plan.micro_batches for slot in batch.slots]
            share = [slot for slot in layout.share(number, rank) if cutting.masked or not is_masked(seal, slot)]
            assert sorted(slots) == share
            found += slots
    assert sorted(found) == [slot for slot in sample_slots(seal) if cutting.masked or not is_masked(seal, slot)]


@given(seals, cuttings)
def test_all_ranks_run_equally_many_micro_batches_and_divide_by_the_same_counts(
    seal: Seal, cutting: CutSettings
) -> None:
    layout = balance_samples(seal)
    plans = [plan_step(seal, layout, rank, cutting) for rank in range(seal.world_size)]
    for of_ranks in zip(*plans, strict=True):
        assert len({(len(plan.micro_batches), plan.tokens, plan.sequences) for plan in of_ranks}) == 1
    kept = [
        seal.groups[slot.group].response_tokens[slot.sample] for slot in sample_slots(seal) if not is_masked(seal, slot)
    ]
    assert sum(plan.tokens for plan in plans[0]) == sum(kept), "masked tokens count in no denominator"
    assert sum(plan.sequences for plan in plans[0]) == sum(tokens > 0 for tokens in kept)


@given(seals, cuttings)
def test_there_are_no_more_micro_batches_than_the_fullest_rank_needs(seal: Seal, cutting: CutSettings) -> None:
    layout = balance_samples(seal)
    for number in range(layout.mini_batches):
        plans = [plan_step(seal, layout, rank, cutting)[number] for rank in range(seal.world_size)]
        count = len(plans[0].micro_batches)
        # With one fewer, some rank could not keep to the budget: it fills them greedily, which needs the fewest.
        needed = []
        for plan in plans:
            slots = [slot for batch in plan.micro_batches for slot in batch.slots]
            needed.append(len(cut_evenly(seal, single_units(slots), cutting, 1)))
        assert count == max(needed, default=0)


@given(seals, cuttings)
def test_a_micro_batch_stays_within_the_budget_unless_it_is_one_long_sample(seal: Seal, cutting: CutSettings) -> None:
    for rank in range(seal.world_size):
        for plan in plan_step(seal, balance_samples(seal), rank, cutting):
            for batch in plan.micro_batches:
                assert len(batch.slots) == 1 or batch.tokens <= cutting.budget
            lengths = [sample_length(seal, slot) for batch in plan.micro_batches for slot in batch.slots]
            assert lengths == sorted(lengths, reverse=True), "longest first: it shows at once whether memory suffices"


@given(seals, cuttings)
def test_less_than_one_token_in_twenty_is_padding(seal: Seal, cutting: CutSettings) -> None:
    for rank in range(seal.world_size):
        for plan in plan_step(seal, balance_samples(seal), rank, cutting):
            for batch in plan.micro_batches:
                real = sum(sample_length(seal, slot) for slot in batch.slots)
                assert 25 * (batch.tokens - real) <= batch.tokens
                assert len(batch.rectangles) <= 1 or cutting.packing == "packed"


@given(seals, cuttings)
def test_every_row_of_a_rectangle_holds_its_sample(seal: Seal, cutting: CutSettings) -> None:
    for plan in plan_step(seal, balance_samples(seal), 0, cutting):
        for batch in plan.micro_batches:
            rows = [one.length for one in batch.rectangles for _ in range(one.rows)]
            assert len(rows) == len(batch.slots)
            assert all(sample_length(seal, slot) <= row for slot, row in zip(batch.slots, rows, strict=True))


@given(seals, cuttings, st.integers(0, 5))
def test_more_micro_batches_than_needed_make_the_costliest_cheaper(seal: Seal, cutting: CutSettings, more: int) -> None:
    slots = sample_slots(seal)
    fewest = cut_evenly(seal, single_units(slots), cutting, 1)
    cut = cut_evenly(seal, single_units(slots), cutting, len(fewest) + more)
    assert len(cut) <= len(fewest) + more
    assert max(cost(seal, one) for one in cut) <= max(cost(seal, one) for one in fewest)
    total, largest = sum(cost(seal, one) for one in cut), max(cost(seal, MicroPlan((slot,))) for slot in slots)
    if cutting.packing == "packed" and cutting.budget == 300 and sum(one.tokens for one in fewest) <= 300:
        # Nothing but cost decides: each is as cheap as the mean, give or take a sample and the search's grain.
        assert max(cost(seal, one) for one in cut) <= (total / (len(fewest) + more) + largest) * 1.07


@pytest.mark.parametrize(
    ("packing", "budget", "sizes"),
    [
        pytest.param("bucketed", 1000, [2, 3], id="rows: like lengths together"),
        pytest.param("bucketed", 10, [1, 1, 2, 1], id="rows: one of ten, two of four"),
        pytest.param("bucketed", 1, [1, 1, 1, 1, 1], id="rows: each alone"),
        pytest.param("packed", 1000, [5], id="end to end: all at once"),
        pytest.param("packed", 20, [2, 3], id="end to end: two of ten, three of four"),
        pytest.param("packed", 1, [1, 1, 1, 1, 1], id="end to end: each alone"),
    ],
)
def test_the_budget_counts_padding(packing: Packing, budget: int, sizes: list[int]) -> None:
    seal = make_seal([(2, [8, 2, 8, 2, 2])], 1, 1)
    batches = cut_evenly(seal, single_units(sample_slots(seal)), CutSettings(budget, packing), 1)
    assert [len(batch.slots) for batch in batches] == sizes


def test_a_long_tail_is_packed_into_few_rectangles() -> None:
    lengths = [round(8 * 1.02**n) for n in range(256)]
    seal = make_seal([(5, lengths)], 1, 1)
    (plan,) = plan_step(seal, balance_samples(seal), 0, CutSettings(8192, "packed"))
    rectangles = sum(len(batch.rectangles) for batch in plan.micro_batches)
    computed, real = sum(batch.tokens for batch in plan.micro_batches), sum(5 + n for n in lengths)
    assert (computed - real) / computed < 0.05
    assert rectangles < 100, "each costs a call of attention a layer"


def test_ranks_cut_alike_by_cost_though_their_lengths_differ() -> None:
    # One rank has the long sample, the other the short ones: as many micro-batches, and no long wait in any.
    seal = make_seal([(10, [990, *[90] * 20])], 2, 1, attention_equals_at=500)
    layout = balance_samples(seal)
    plans = [plan_step(seal, layout, rank, CutSettings(1000, "packed"))[0] for rank in range(2)]
    assert len(plans[0].micro_batches) == len(plans[1].micro_batches) == 2
    short = [cost(seal, one) for one in plans[1].micro_batches]
    assert max(short) <= 1.2 * min(short)


def test_single_samples_are_cut_as_before_there_were_units() -> None:
    draw, found = random.Random(7), hashlib.sha256()
    for _ in range(300):
        groups = draw.randint(1, 8)
        prompts = [draw.randint(1, 40) for _ in range(groups)]
        responses = [[draw.randint(0, 60) for _ in range(draw.randint(1, 6))] for _ in range(groups)]
        seal = seal_of_lengths(
            responses,
            prompts,
            world_size=draw.randint(1, 5),
            mini_batches=draw.randint(1, 4),
            state=SealState.READY,
            masked=draw.choice([(), (0,), (0, 1, 2, 3, 4, 5)]),
            attention_equals_at=draw.choice([1, 50, 24576]),
        )
        cutting = CutSettings(draw.randint(1, 300), draw.choice(["packed", "bucketed"]), draw.random() < 0.5)
        layout = balance_samples(seal)
        for rank in range(seal.world_size):
            for plan in plan_step(seal, layout, rank, cutting):
                cut = [
                    (
                        [(slot.group, slot.sample) for slot in batch.slots],
                        [(one.rows, one.length) for one in batch.rectangles],
                    )
                    for batch in plan.micro_batches
                ]
                found.update(repr((cut, plan.tokens, plan.sequences)).encode())
    assert found.hexdigest() == "bb2ba68d0da1986ad02ac456f1f8cdd618ef65f44032575c8dc5e939548e13d6"


def units_of(slots: Iterable[SampleSlot]) -> list[Unit]:
    """A pair, one alone, three, and so on: of what is there, in its order."""
    left, units = list(slots), []
    while left:
        size = (2, 1, 3)[len(units) % 3]
        units.append(tuple(left[:size]))
        left = left[size:]
    return units


@given(seals, cuttings)
def test_a_unit_is_never_split(seal: Seal, cutting: CutSettings) -> None:
    layout = balance_samples(seal)
    plans = [plan_step(seal, layout, rank, cutting, units_of) for rank in range(seal.world_size)]
    assert len({tuple(len(plan.micro_batches) for plan in of_rank) for of_rank in plans}) == 1
    for rank, of_rank in enumerate(plans):
        for number, plan in enumerate(of_rank):
            share = [slot for slot in layout.share(number, rank) if cutting.masked or not is_masked(seal, slot)]
            placed = {slot: k for k, batch in enumerate(plan.micro_batches) for slot in batch.slots}
            assert sorted(placed) == share
            assert sum(len(batch.slots) for batch in plan.micro_batches) == len(share)
            units = units_of(share)
            assert all(len({placed[slot] for slot in unit}) == 1 for unit in units)
            for k, batch in enumerate(plan.micro_batches):
                alone = len({number for number, unit in enumerate(units) if placed[unit[0]] == k}) <= 1
                assert alone or batch.tokens <= cutting.budget
                assert len(batch.rectangles) <= 1 or cutting.packing == "packed"
                rows = [one.length for one in batch.rectangles for _ in range(one.rows)]
                assert all(sample_length(seal, slot) <= row for slot, row in zip(batch.slots, rows, strict=True))


@given(seals, cuttings, st.integers(0, 3))
def test_more_micro_batches_of_units_make_the_costliest_cheaper(seal: Seal, cutting: CutSettings, more: int) -> None:
    units = units_of(sample_slots(seal))
    fewest = cut_evenly(seal, units, cutting, 1)
    cut = cut_evenly(seal, units, cutting, len(fewest) + more)
    assert len(cut) <= len(fewest) + more
    assert sorted(slot for one in cut for slot in one.slots) == sample_slots(seal)
    assert max(cost(seal, one) for one in cut) <= max(cost(seal, one) for one in fewest)


@given(pictured, cuttings, st.integers(1, 1200))
def test_a_micro_batch_has_at_most_so_many_patches_unless_it_is_one_sample(
    seal: Seal, cutting: CutSettings, patches: int
) -> None:
    layout, limited = balance_samples(seal), replace(cutting, patches=patches)
    plans = [plan_step(seal, layout, rank, limited) for rank in range(seal.world_size)]
    found = [slot for plan in plans for one in plan for batch in one.micro_batches for slot in batch.slots]
    assert sorted(found) == [slot for slot in sample_slots(seal) if cutting.masked or not is_masked(seal, slot)]
    for of_ranks in zip(*plans, strict=True):
        assert len({len(plan.micro_batches) for plan in of_ranks}) == 1
        for plan in of_ranks:
            for batch in plan.micro_batches:
                groups = {slot.group for slot in batch.slots}
                total = sum(seal.groups[group].patches for group in groups)
                assert total <= patches or len(groups) == 1
                assert len(batch.slots) == 1 or batch.tokens <= cutting.budget


def test_packed_samples_of_one_group_share_micro_batches_so_that_its_pictures_are_encoded_once() -> None:
    seal = make_seal([(10, [1, 20, 40, 60])] * 4, 1, 1, patches=[500])
    layout = balance_samples(seal)
    (plan,) = plan_step(seal, layout, 0, CutSettings(170, "packed"))
    groups = [{slot.group for slot in batch.slots} for batch in plan.micro_batches]
    assert groups == [{0}, {1}, {2}, {3}]
    (text,) = plan_step(make_seal([(10, [1, 20, 40, 60])] * 4, 1, 1), layout, 0, CutSettings(170, "packed"))
    assert {slot.group for slot in text.micro_batches[0].slots} != {0}


def test_micro_batches_of_ranks_that_wait_for_each_other_are_even_with_the_cost_of_pictures() -> None:
    seal = make_seal([(10, [10])] * 6, 2, 1, patches=[4000, 0, 0])
    plans = [plan_step(seal, balance_samples(seal), rank, CutSettings(60, "packed"))[0] for rank in range(2)]
    for plan in plans:
        pictures = [sum(seal.groups[slot.group].patches for slot in batch.slots) for batch in plan.micro_batches]
        assert max(pictures) <= 4000
