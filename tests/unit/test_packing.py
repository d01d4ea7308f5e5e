"""Micro-batches: every sample once, within the budget, equally many on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.balance import SampleSlot, balance
from gcore.ledger.records import Seal, SealedGroup, SealState
from gcore.train.packing import length, pack, plan_step
from gcore.types import PromptRef, Version


def make_seal(lengths: list[tuple[int, list[int]]], ranks: int, mini_batches: int) -> Seal:
    groups = tuple(
        SealedGroup(
            ref=PromptRef(0, 0, number),
            digest=f"{number:032x}",
            prompt_tokens=prompt,
            response_tokens=tuple(responses),
            versions=(Version(0, 0),),
            holder="h",
        )
        for number, (prompt, responses) in enumerate(lengths)
    )
    return Seal(
        lineage=0,
        step=1,
        attempt=1,
        state=SealState.READY,
        world="w",
        world_size=ranks,
        mini_batches=mini_batches,
        groups=groups,
    )


seals = st.builds(
    make_seal,
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    st.integers(1, 5),
    st.integers(1, 4),
)
budgets = st.integers(1, 300)


@given(seals, budgets)
def test_every_sample_is_in_exactly_one_micro_batch_of_one_rank_and_mini_batch(seal: Seal, budget: int) -> None:
    layout = balance(seal)
    found: list[SampleSlot] = []
    for rank in range(seal.world_size):
        for number, plan in enumerate(plan_step(seal, layout, rank, budget)):
            slots = [slot for batch in plan.micro_batches for slot in batch]
            assert sorted(slots) == list(layout.share(number, rank))
            found += slots
    every = [SampleSlot(g, s) for g, group in enumerate(seal.groups) for s in range(len(group.response_tokens))]
    assert sorted(found) == every


@given(seals, budgets)
def test_all_ranks_run_equally_many_micro_batches_and_divide_by_the_same_counts(seal: Seal, budget: int) -> None:
    layout = balance(seal)
    plans = [plan_step(seal, layout, rank, budget) for rank in range(seal.world_size)]
    for of_ranks in zip(*plans, strict=True):
        assert len({(len(plan.micro_batches), plan.tokens, plan.sequences) for plan in of_ranks}) == 1
        assert any(all(plan.micro_batches) for plan in of_ranks), "somebody needs that many"
    assert sum(plan.tokens for plan in plans[0]) == sum(sum(group.response_tokens) for group in seal.groups)


@given(seals, budgets)
def test_a_micro_batch_stays_within_the_budget_unless_it_is_one_long_sample(seal: Seal, budget: int) -> None:
    slots = tuple(SampleSlot(g, s) for g, group in enumerate(seal.groups) for s in range(len(group.response_tokens)))
    batches = pack(seal, slots, budget)
    for batch in batches:
        longest = max(length(seal, slot) for slot in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    lengths = [length(seal, slot) for batch in batches for slot in batch]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("budget", "sizes"),
    [
        pytest.param(1000, [5], id="all at once"),
        pytest.param(20, [2, 3], id="two of ten, three of four"),
        pytest.param(1, [1, 1, 1, 1, 1], id="each alone"),
    ],
)
def test_the_budget_counts_padding(budget: int, sizes: list[int]) -> None:
    seal = make_seal([(2, [8, 2, 8, 2, 2])], 1, 1)
    batches = pack(seal, tuple(SampleSlot(0, s) for s in range(5)), budget)
    assert [len(batch) for batch in batches] == sizes
