"""Parts of a streamed step: stable parts, and the same batch as without streaming."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.train import OnLimit
from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.audit.audit import check_open
from gcore.ledger.audit.chain import ChainFacts, ChainTotals, FindingCollector
from gcore.ledger.balance import (
    balance_samples,
    certain_groups,
    next_part,
    part_digests,
    part_layout,
    parts_sha256,
    seal_up_to,
)
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef, Head, Offer, OfferedGroup, Seal, SealState
from gcore.ledger.selection import (
    AwaitGroups,
    CloseStep,
    DataExhausted,
    OffersView,
    SealPart,
    SealStep,
    StreamRules,
    begun_groups,
    choose_seal,
    due_refs,
    refs_in_order,
    refuse_seal,
)
from gcore.schema import Record
from gcore.types import PromptRef, Version

WRITER = ChainWriter("a.1", "n")
FIRST = Version(0, 0)


def rules(prompts: int = 12, *, quota: int = 4, part: int | None = 1, window: int = 8) -> StreamRules:
    return StreamRules(shard_lengths(prompts, 2), window, quota, part=part)


def start() -> Head:
    return chain.base_entry(2, "w", WRITER).head


def group(ref: PromptRef) -> OfferedGroup:
    return OfferedGroup(ref=ref, digest=f"d{ref}", prompt_tokens=3, response_tokens=(2, 9, 4), versions=(FIRST,))


def ended(ref: PromptRef) -> EndedRef:
    return EndedRef(ref=ref, kind="filtered", versions=(FIRST,))


class Cluster:
    """What offers tell, ref by ref, and the slot; seals whatever may be sealed, every part of it READY at once."""

    def __init__(self, rules_: StreamRules) -> None:
        self.rules = rules_
        self.head = start()
        self.slot: Seal | None = None
        self.kept: list[PromptRef] = []
        self.filtered: list[PromptRef] = []

    @property
    def seals(self) -> tuple[Seal, ...]:
        return (self.slot,) if self.slot is not None else ()

    @property
    def offered(self) -> OffersView:
        offer = Offer(incarnation="a", groups=tuple(map(group, self.kept)), outcomes=tuple(map(ended, self.filtered)))
        return OffersView.collect(self.rules, self.head, [offer])

    def due(self) -> tuple[PromptRef, ...]:
        return due_refs(self.rules, self.head, self.seals, self.offered)

    def finish(self, ref: PromptRef, *, kept: bool) -> None:
        (self.kept if kept else self.filtered).append(ref)

    def seal(self, chosen: SealStep | SealPart) -> Seal:
        assert refuse_seal(self.rules, self.head, self.seals, chosen) is None
        return chain.seal_slot(self.slot, self.head, chosen, world_size=2, mini_batches=1, sealer="a")

    def look(self) -> SealStep | DataExhausted | None:
        """Seals parts and accounts for outcomes; what there is at the end."""
        while True:
            chosen = choose_seal(self.rules, self.head, self.seals, self.offered)
            if isinstance(chosen, CloseStep):
                self.head = chain.account_entry(self.head, chosen.outcomes, self.rules.shape, WRITER).head
            elif isinstance(chosen, AwaitGroups):
                part = next_part(self.rules, self.head, self.seals, self.offered)
                if part is None:
                    return None
                self.slot = chain.ready_slot(self.seal(part))
            else:
                return chosen


def step_of(rules_: StreamRules, fates: dict[PromptRef, bool], seed: int) -> tuple[Cluster, SealStep | DataExhausted]:
    """One step, its prompts finishing in the seed's order."""
    cluster, chance = Cluster(rules_), random.Random(seed)
    for _ in range(200):
        chosen = cluster.look()
        if chosen is not None:
            return cluster, chosen
        ref = chance.choice(cluster.due())
        cluster.finish(ref, kept=fates.setdefault(ref, True))
    raise AssertionError("it does not end")


steps = st.builds(
    lambda quota, part, window, limit, on_limit, cap: replace(
        rules(20, quota=quota, part=part, window=window), limit=limit, on_limit=on_limit, issue_cap=cap
    ),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(2, 9),
    st.none() | st.integers(6, 14),
    st.sampled_from(["train_smaller", "pad_masked", "fail"]),
    st.sampled_from([1.0, 3.0]),
)


@given(steps, st.integers(0, 10**6), st.floats(0, 1), st.integers(0, 10**6))
def test_the_batch_is_the_same_with_and_without_parts_in_whatever_order_prompts_finish(
    rules_: StreamRules, fate: int, kept: float, order: int
) -> None:
    chance = random.Random(fate)
    fates = {ref: chance.random() < kept for ref in refs_in_order(rules_, start(), ())}
    streamed, one = step_of(rules_, dict(fates), order)
    whole, other = step_of(replace(rules_, part=None), dict(fates), order + 1)
    assert type(one) is type(other)
    if not isinstance(one, SealStep) or not isinstance(other, SealStep):
        assert one == other
        return
    assert {g.ref for g in one.groups} == {g.ref for g in other.groups}
    assert (one.padding, one.last, one.planned) == (other.padding, other.last, other.planned)
    ended_ = {o.ref for o in one.outcomes} | {r for r in fates if streamed.head.cursors.is_terminal(rules_.shape, r)}
    assert ended_ == {o.ref for o in other.outcomes} | {
        r for r in fates if whole.head.cursors.is_terminal(rules_.shape, r)
    }


@given(steps, st.integers(0, 10**6), st.floats(0.2, 1))
def test_certain_groups_are_sealed_whatever_happens_to_the_others(rules_: StreamRules, seed: int, kept: float) -> None:
    chance = random.Random(seed)
    cluster = Cluster(rules_)
    for ref in list(refs_in_order(rules_, cluster.head, ()))[: rules_.quota * 3]:
        if chance.random() < 0.5:
            cluster.finish(ref, kept=chance.random() < 0.7)
    sure = {g.ref for g in certain_groups(rules_, cluster.head, (), cluster.offered)}
    for _ in range(200):  # no parts are sealed: everything goes on as without them
        chosen = choose_seal(rules_, cluster.head, (), cluster.offered)
        if isinstance(chosen, CloseStep):
            cluster.head = chain.account_entry(cluster.head, chosen.outcomes, rules_.shape, WRITER).head
        elif isinstance(chosen, AwaitGroups):
            cluster.finish(chance.choice(cluster.due()), kept=chance.random() < kept)
        else:
            break
    groups = chosen.groups if isinstance(chosen, SealStep) else ()
    assert isinstance(chosen, DataExhausted) or sure <= {g.ref for g in groups}


def test_a_group_that_earlier_ones_may_yet_push_out_is_not_certain() -> None:
    cluster = Cluster(rules(quota=2))
    first, second, third, fourth = list(refs_in_order(cluster.rules, cluster.head, ()))[:4]
    cluster.finish(third, kept=True)
    assert certain_groups(cluster.rules, cluster.head, (), cluster.offered) == ()
    cluster.finish(first, kept=False)
    assert [g.ref for g in certain_groups(cluster.rules, cluster.head, (), cluster.offered)] == [third]
    cluster.finish(fourth, kept=True)
    assert [g.ref for g in certain_groups(cluster.rules, cluster.head, (), cluster.offered)] == [third]
    cluster.finish(second, kept=True)
    assert isinstance(choose_seal(cluster.rules, cluster.head, (), cluster.offered), SealStep)


def test_a_part_waits_until_it_is_worth_its_exchange() -> None:
    cluster = Cluster(rules(quota=4, part=2))
    first, second, third = list(refs_in_order(cluster.rules, cluster.head, ()))[:3]
    cluster.finish(third, kept=True)
    assert next_part(cluster.rules, cluster.head, (), cluster.offered) is None
    cluster.finish(first, kept=True)
    part = next_part(cluster.rules, cluster.head, (), cluster.offered)
    assert part is not None
    assert [g.ref for g in part.groups] == [first, third]
    assert next_part(replace(cluster.rules, part=None), cluster.head, (), cluster.offered) is None
    assert second in cluster.due()


def parted() -> Cluster:
    """One part is READY, another is being exchanged."""
    cluster = Cluster(rules(quota=4))
    refs = list(refs_in_order(cluster.rules, cluster.head, ()))
    cluster.finish(refs[0], kept=True)
    assert cluster.look() is None
    cluster.finish(refs[2], kept=True)
    part = next_part(cluster.rules, cluster.head, cluster.seals, cluster.offered)
    assert part is not None
    cluster.slot = cluster.seal(part)
    return cluster


def test_a_part_that_is_not_ready_is_given_up_and_one_that_is_stays() -> None:
    slot = parted().slot
    assert slot is not None
    assert (slot.state, slot.attempt, slot.parts, slot.ready_parts) == (SealState.PARTIAL, 2, (1, 1), 1)
    given_up = chain.reseal_slot(slot, "b")
    assert (given_up.state, given_up.attempt, given_up.parts, given_up.ready_parts) == (SealState.OPEN, 3, (1,), 1)
    assert given_up.groups == slot.groups[:1] == given_up.kept
    ready = chain.ready_slot(slot)
    assert (ready.state, ready.attempt, ready.kept) == (SealState.OPEN, 2, slot.groups)
    with pytest.raises(ValueError, match="only a SEALED or PARTIAL slot can be resealed"):
        chain.reseal_slot(ready, "b")
    with pytest.raises(ValueError, match="only a SEALED or PARTIAL slot can become READY"):
        chain.ready_slot(ready)


def test_a_whole_seal_begins_with_its_ready_parts_and_is_refused_without_them() -> None:
    cluster = parted()
    assert cluster.slot is not None
    cluster.slot = chain.ready_slot(cluster.slot)
    refs = list(refs_in_order(cluster.rules, cluster.head, ()))
    for ref in (refs[1], refs[3]):
        cluster.finish(ref, kept=True)
    chosen = cluster.look()
    assert isinstance(chosen, SealStep)
    assert [g.ref for g in chosen.groups] == [refs[0], refs[2], refs[1], refs[3]]
    whole = cluster.seal(chosen)
    assert (whole.state, whole.parts, whole.ready_parts) == (SealState.SEALED, (1, 1, 2), 2)
    assert chain.reseal_slot(whole, "b").groups == cluster.slot.groups
    ready = chain.ready_slot(whole)
    assert (ready.state, ready.ready_parts) == (SealState.READY, 3)
    without = SealStep(chosen.groups[1:], ())
    why = refuse_seal(cluster.rules, cluster.head, cluster.seals, without)
    assert why == "groups of its READY parts are missing"
    with pytest.raises(ValueError, match="would lose its READY parts"):
        chain.seal_slot(cluster.slot, cluster.head, without, world_size=2, mini_batches=1, sealer="a")
    twice = SealStep((*cluster.slot.groups, cluster.slot.groups[0]), ())
    assert "is already sealed" in str(refuse_seal(cluster.rules, cluster.head, cluster.seals, twice))


def test_groups_in_parts_count_for_the_quota_and_are_not_due_again() -> None:
    cluster = parted()
    refs = list(refs_in_order(cluster.rules, cluster.head, ()))
    assert {g.ref for g in begun_groups(cluster.head, cluster.seals)} == {refs[0], refs[2]}
    assert cluster.due() == (refs[1], refs[3])
    assert choose_seal(cluster.rules, cluster.head, cluster.seals, cluster.offered) == AwaitGroups(refs[1], 2)


def test_changes_of_a_step_in_progress_do_not_change_its_parts() -> None:
    """Otherwise ranks that were notified of a part by different states of the slot would not compute it together."""
    slot = parted().slot
    assert slot is not None
    begun_with = seal_up_to(slot, 1).encode()
    of_a_part = {"lineage", "step", "world", "world_size", "sequence_parallel", "mini_batches", "attention_equals_at"}
    of_a_part |= {"groups", "parts", "near"}
    later: dict[str, Any] = {
        "attempt": 7,
        "state": SealState.SEALED,
        "outcomes": (EndedRef(ref=PromptRef(0, 0, 9), kind="filtered", reason="r"),),
        "sealer": "z",
        "padding": 1,
        "last": True,
        "planned_steps": 9,
        "ready_parts": slot.ready_parts + 1,
        "checkpoint": True,
    }
    assert {*later, *of_a_part} == {*Seal.model_fields} - {*Record.model_fields}, "each field is one or the other"
    for name, value in later.items():
        assert getattr(slot, name) != value
        assert seal_up_to(slot.model_copy(update={name: value}), 1).encode() == begun_with, name


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.integers(1, 4))
def test_a_parts_layout_does_not_depend_on_what_follows_and_all_of_them_make_the_whole(
    parts: list[int], ranks: int
) -> None:
    slot = parted().slot
    assert slot is not None
    one = slot.groups[0]
    groups = tuple(
        one.model_copy(update={"ref": PromptRef(0, 0, n), "digest": f"{n}", "response_tokens": (n + 1, 3)})
        for n in range(sum(parts))
    )
    seal = slot.model_copy(
        update={"groups": groups, "parts": tuple(parts), "ready_parts": len(parts), "world_size": ranks}
    )
    whole = balance_samples(seal)
    assert whole.mini_batches == len(parts)
    for number in range(len(parts)):
        early = seal_up_to(seal, number + 1)
        assert part_layout(early, number) == part_layout(seal, number)
        assert part_layout(seal, number).shares == (whole.shares[number],)
        later = seal.model_copy(update={"attempt": 9, "state": SealState.READY, "last": True, "sealer": "z"})
        assert seal_up_to(later, number + 1).encode() == early.encode()
        assert early.kept == early.groups
    every = sorted(slot_ for rank in range(ranks) for slot_ in whole.of_rank(rank))
    assert [(s.group, s.sample) for s in every] == [(g, s) for g in range(len(groups)) for s in range(2)]
    assert len({parts_sha256(part_digests(seal, n)) for n in range(len(parts) + 1)}) == len(parts) + 1


def test_a_seal_in_parts_outlives_the_store() -> None:
    slot = parted().slot
    assert slot is not None
    assert Seal.decode(slot.encode()) == slot
    plain = slot.model_copy(update={"parts": (), "ready_parts": 0, "state": SealState.SEALED})
    assert b"parts" not in plain.encode(), "what nodes of the version before read as ever"


def test_an_audit_lets_ready_parts_stand_in_an_open_slot_and_nothing_else() -> None:
    cluster = parted()
    assert cluster.slot is not None

    def findings(seal: Seal) -> list[str]:
        found = FindingCollector()
        facts = ChainFacts((), cluster.head.lineages, ())
        walk = ChainTotals(cluster.rules, cluster.head, facts, found)
        check_open(cluster.rules, cluster.head, [seal], (), walk, found)
        return [finding.sentence for finding in found.findings]

    assert findings(cluster.slot) == []
    assert findings(chain.reseal_slot(cluster.slot, "b")) == []
    assert findings(chain.ready_slot(cluster.slot)) == []
    (loose,) = findings(cluster.slot.model_copy(update={"state": SealState.OPEN}))
    assert loose == f"the open seal of step 1 is OPEN but holds {cluster.slot.groups[1].ref}"
    (wrong,) = findings(cluster.slot.model_copy(update={"parts": (1, 2)}))
    assert wrong == "the open seal of step 1 has parts of (1, 2) groups, 1 of them READY, but 2 groups in total"


CHOICES: tuple[OnLimit, ...] = ("train_smaller", "pad_masked", "fail")


def test_a_later_part_does_not_change_who_is_near_the_blobs_of_earlier_parts() -> None:
    cluster = parted()
    assert cluster.slot is not None
    slot = chain.ready_slot(cluster.slot)
    groups = tuple(group.model_copy(update={"media_bytes": 9, "holder": "a"}) for group in slot.groups)
    slot = slot.model_copy(update={"groups": groups, "near": {"a": (0,)}})
    new = [groups[0].model_copy(update={"holder": holder, "digest": holder}) for holder in ("a", "b")]
    near = {"a": (1,), "b": (1,), "c": (1,)}
    chosen = SealStep((*groups, *new), ())
    later = chain.seal_slot(slot, cluster.head, chosen, world_size=2, mini_batches=1, sealer="a", near=near)
    assert later.near == {"a": (0,), "b": (1,)}
    assert seal_up_to(later, slot.ready_parts) == seal_up_to(slot, slot.ready_parts)
    unknown = slot.model_copy(update={"near": {}})
    later = chain.seal_slot(unknown, cluster.head, chosen, world_size=2, mini_batches=1, sealer="a", near=near)
    assert later.near == {"b": (1,)}
