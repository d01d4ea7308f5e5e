"""Kept checkpoints: a job always keeps its resume point, its best, and every k-th step forever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import Checkpoint, Head, Lineage
from gcore.ledger.retention import KeepReason, Retention, keep_reasons
from gcore.ledger.selection import is_ancestor, resumable_checkpoints
from gcore.types import Version


def checkpoint(step: int, lineage: int = 0) -> Checkpoint:
    file = f"checkpoints/{lineage}-{step}" if step else ""
    return Checkpoint(lineage=lineage, step=step, seq=1000 * lineage + step, file=file)


def head_at(step: int, *bases: int) -> Head:
    """Head of a chain that was rolled back to each of `bases` in turn."""
    first = chain.base_entry(2, "w", ChainWriter("a", "n")).head
    later = tuple(Lineage(number=number, base_step=base) for number, base in enumerate(bases, 1))
    return first.model_copy(update={"step": step, "lineage": len(bases), "lineages": (*first.lineages, *later)})


def kept(head: Head, known: list[Checkpoint], policy: Retention) -> list[int]:
    return [one.step for one in keep_reasons(head, known, policy)]


FEW = [checkpoint(step) for step in (0, 2, 4, 6, 8)]


def test_the_first_model_and_the_newest_are_kept() -> None:
    assert kept(head_at(9), FEW, Retention(2)) == [0, 6, 8]
    assert kept(head_at(9), FEW, Retention(9)) == [0, 2, 4, 6, 8]


def test_the_best_is_kept_beside_the_newest_until_there_is_a_better() -> None:
    assert kept(head_at(9), FEW, Retention(1, best=4)) == [0, 4, 8]
    assert kept(head_at(9), FEW, Retention(1, best=0)) == [0, 8], "the first model always is there"
    assert kept(head_at(9), FEW, Retention(1, best=5)) == [0, 8], "a step without one"


def test_every_kth_is_kept_for_ever() -> None:
    assert kept(head_at(9), FEW, Retention(1, every=4)) == [0, 4, 8]
    assert kept(head_at(9), FEW, Retention(1, every=3)) == [0, 6, 8]


def test_each_is_told_why_it_is_kept() -> None:
    found = keep_reasons(head_at(9), FEW, Retention(2, every=4, best=8))
    assert {one.step: why for one, why in found.items()} == {
        0: {KeepReason.FIRST},
        4: {KeepReason.EVERY},
        6: {KeepReason.NEWEST},
        8: {KeepReason.NEWEST, KeepReason.EVERY, KeepReason.BEST},
    }


def test_checkpoints_of_a_discarded_branch_are_not_kept() -> None:
    known = [checkpoint(0), checkpoint(4), checkpoint(8), checkpoint(6, lineage=1)]
    assert kept(head_at(7, 4), known, Retention(9, every=8, best=8)) == [0, 4, 6]


STEPS = st.sets(st.integers(1, 40), max_size=12)
POLICIES = st.builds(
    Retention,
    newest=st.integers(1, 5),
    every=st.none() | st.integers(1, 12),
    best=st.none() | st.integers(0, 40),
)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Head, list[Checkpoint]]:
    """A head with up to two rollbacks behind it, and checkpoints of all its lineages, some of them cut off."""
    head = head_at(draw(st.integers(0, 40)), *draw(st.lists(st.integers(0, 40), max_size=2)))
    known = [checkpoint(0)]
    for lineage in range(head.lineage + 1):
        known += [checkpoint(step, lineage) for step in sorted(draw(STEPS))]
    return head, known


@given(chains(), POLICIES)
def test_kept_is_what_a_reason_names_and_nothing_else(found: tuple[Head, list[Checkpoint]], policy: Retention) -> None:
    head, known = found
    on_chain = [c for c in resumable_checkpoints(head, known) if c.file]
    wanted = keep_reasons(head, known, policy)
    assert checkpoint(0) in wanted, "the base: without it a chain could not be resumed at all"
    assert all(one in wanted for one in on_chain[: policy.newest])
    assert resumable_checkpoints(head, wanted)[0] == resumable_checkpoints(head, known)[0], (
        "where a new world starts is never lost"
    )
    for one in known:
        if one.file and is_ancestor(head, Version(one.lineage, one.step)):
            by_every = policy.every is not None and one.step % policy.every == 0
            named = one in on_chain[: policy.newest] or by_every or one.step == policy.best
            assert (one in wanted) == named
        elif one.file:
            assert one not in wanted
    assert [*wanted] == [one for one in known if one in wanted], "in their order: the oldest first"
    assert [*keep_reasons(head, wanted, policy)] == [*wanted], "to forget twice forgets no more"


@given(chains(), POLICIES, st.integers(1, 20))
def test_checkpoints_kept_every_k_steps_stay_forever(
    found: tuple[Head, list[Checkpoint]], policy: Retention, more: int
) -> None:
    head, known = found
    before = [one for one, why in keep_reasons(head, known, policy).items() if KeepReason.EVERY in why]
    later = head.model_copy(update={"step": head.step + more})
    newer = [checkpoint(step, head.lineage) for step in range(head.step + 1, head.step + more + 1)]
    after = keep_reasons(later, [*keep_reasons(head, known, policy), *newer], policy)
    assert all(one in after for one in before)
