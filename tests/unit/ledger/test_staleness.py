"""Off-policy steps: due refs, the selection of a seal, and its waits."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef, Head, InFlightRef, Offer, OfferedGroup, Seal, SealState
from gcore.ledger.selection import AwaitGroups, CloseStep, OffersView, SealStep, StreamRules, refs_in_order, refuse_seal
from gcore.ledger.staleness import awaited_refs, choose_seal, due_refs, max_kept, staleness_stats, steps_left
from gcore.types import PromptRef, Version

WRITER = ChainWriter("a.1", "n")


def rules(staleness: int = 1, *, prompts: int = 40, shards: int = 4, window: int = 8, quota: int = 4) -> StreamRules:
    return StreamRules(shard_lengths(prompts, shards), window, quota, staleness=staleness)


def at(step: int, shards: int = 4) -> Head:
    return chain.base_entry(shards, "w", WRITER).head.model_copy(update={"step": step})


def group(ref: PromptRef, *steps: int) -> OfferedGroup:
    versions = tuple(Version(0, step) for step in steps)
    return OfferedGroup(ref=ref, digest=str(ref), prompt_tokens=3, response_tokens=(2, 2), versions=versions)


def offer(*groups: OfferedGroup, flying: dict[PromptRef, int] | None = None, name: str = "a") -> Offer:
    in_flight = tuple(InFlightRef(ref=ref, version=Version(0, step)) for ref, step in (flying or {}).items())
    return Offer(incarnation=name, groups=groups, in_flight=in_flight)


def refs(r: StreamRules, head: Head, count: int) -> list[PromptRef]:
    return list(refs_in_order(r, head, ()))[:count]


def sealed(chosen: object) -> list[PromptRef]:
    assert isinstance(chosen, SealStep)
    return [one.ref for one in chosen.groups]


def test_a_seal_takes_what_is_offered_and_does_not_wait_for_the_oldest() -> None:
    r, head = rules(), at(0)
    first = refs(r, head, 6)
    known = OffersView.collect(r, head, [offer(*(group(ref, 0) for ref in first[1:5]), flying={first[0]: 0})])
    assert sealed(choose_seal(r, head, (), known)) == first[1:5]


def test_refs_begun_for_an_earlier_step_come_first() -> None:
    r, head = rules(), at(1)
    first = refs(r, head, 6)
    groups = [group(ref, 1) for ref in first[:4]] + [group(first[4], 0, 1), group(first[5], 0)]
    known = OffersView.collect(r, head, [offer(*groups)])
    assert sealed(choose_seal(r, head, (), known)) == [first[4], first[5], first[0], first[1]]


def test_a_seal_waits_for_what_would_be_too_old_after_it_though_the_quota_is_there() -> None:
    r, head = rules(), at(1)
    first = refs(r, head, 6)
    known = OffersView.collect(r, head, [offer(*(group(ref, 1) for ref in first[1:]), flying={first[0]: 0})])
    assert choose_seal(r, head, (), known) == AwaitGroups(first[0], 1)
    assert awaited_refs(r, head, (), known) == (first[0],)


def test_refs_with_one_step_left_are_awaited_only_if_they_fill_a_quota() -> None:
    """With two steps left for twelve prompts of four a step, four of them must be in this one."""
    r, head = rules(2), at(1)
    first = refs(r, head, 14)
    newer = [group(ref, 1) for ref in first[8:12]]
    few = OffersView.collect(r, head, [offer(*newer, flying=dict.fromkeys(first[:4], 0))])
    many = OffersView.collect(r, head, [offer(*newer, flying=dict.fromkeys(first[:8], 0))])
    assert sealed(choose_seal(r, head, (), few)) == first[8:12]
    assert isinstance(choose_seal(r, head, (), many), AwaitGroups)
    assert awaited_refs(r, head, (), many) == tuple(first[:8])


def test_nothing_is_waited_for_that_is_too_old_already_or_whose_holder_is_gone() -> None:
    r, head = rules(), at(2)
    first = refs(r, head, 6)
    known = OffersView.collect(r, head, [offer(*(group(ref, 2) for ref in first[1:5]), flying={first[0]: 0})])
    assert sealed(choose_seal(r, head, (), known)) == first[1:5]
    assert first[0] in due_refs(r, head, (), known)


def test_nothing_new_is_issued_while_k_and_one_quotas_are_offered_or_in_flight() -> None:
    r, head = rules(), at(1)
    first = refs(r, head, 12)
    assert due_refs(r, head, (), OffersView({}, {})) == tuple(first[:8])
    held = offer(*(group(ref, 0) for ref in first[2:5]), flying=dict.fromkeys(first[5:8], 0))
    assert due_refs(r, head, (), OffersView.collect(r, head, [held])) == tuple(first[:2])
    full = offer(*(group(ref, 0) for ref in first[:5]), flying=dict.fromkeys(first[5:8], 0), name="b")
    assert due_refs(r, head, (), OffersView.collect(r, head, [full])) == ()


def test_beside_a_batch_that_is_being_trained_k_quotas_are_issued() -> None:
    r, head = rules(2), at(0)
    first = refs(r, head, 20)
    ready = chain.ready_slot(sealed_of(r, head, first[:4]))
    assert due_refs(r, head, (ready,), OffersView({}, {})) == tuple(first[4:12])
    held = offer(*(group(ref, 0) for ref in first[4:7]), flying=dict.fromkeys(first[7:10], 0))
    assert due_refs(r, head, (ready,), OffersView.collect(r, head, [held])) == tuple(first[10:12])
    reopened = ready.model_copy(update={"state": SealState.OPEN, "groups": ()})
    assert len(due_refs(r, head, (reopened,), OffersView({}, {}))) == 12


def sealed_of(r: StreamRules, head: Head, chosen: list[PromptRef]) -> Seal:
    known = OffersView.collect(r, head, [offer(*(group(ref, head.step) for ref in chosen))])
    now = choose_seal(r, head, (), known)
    assert isinstance(now, SealStep)
    return chain.seal_slot(None, head, now, world_size=2, mini_batches=2, sealer="a")


def test_refs_of_a_dead_holder_are_due_before_new_ones() -> None:
    r, head = rules(), at(1)
    first = refs(r, head, 12)
    left = offer(*(group(ref, 0) for ref in first[3:6]), flying={first[6]: 0})
    wanted = due_refs(r, head, (), OffersView.collect(r, head, [left]))
    assert wanted == (*first[:3], first[7])


def test_towards_the_end_no_more_is_issued_than_the_last_steps_take() -> None:
    r = StreamRules(shard_lengths(40, 4), 8, 4, staleness=2, steps=3)
    assert [len(due_refs(r, at(step), (), OffersView({}, {}))) for step in range(4)] == [12, 8, 4, 0]
    trained = [chain.ready_slot(sealed_of(r, at(step), refs(r, at(step), 4))) for step in range(3)]
    assert [len(due_refs(r, at(step), (trained[step],), OffersView({}, {}))) for step in range(3)] == [8, 4, 0]


def test_an_offer_that_names_nothing_in_flight_is_written_as_before() -> None:
    assert b"in_flight" not in Offer(incarnation="a").encode()
    named = offer(flying={PromptRef(0, 0, 0): 3})
    assert Offer.decode(named.encode()) == named


def test_of_two_holders_that_both_have_begun_a_prompt_the_older_counts() -> None:
    r, head = rules(2), at(2)
    ref = refs(r, head, 1)[0]
    both = [offer(flying={ref: 1}, name="a"), offer(flying={ref: 0}, name="b")]
    assert OffersView.collect(r, head, both).in_flight == {ref: Version(0, 0)}


def test_a_step_tells_how_old_its_weights_were() -> None:
    r, head = rules(2), at(2)
    first = refs(r, head, 4)
    groups = [group(first[0], 0, 2), group(first[1], 1), group(first[2], 2), group(first[3], 1, 2)]
    chosen = choose_seal(r, head, (), OffersView.collect(r, head, [offer(*groups)]))
    assert isinstance(chosen, SealStep)
    seal = chain.seal_slot(None, head, chosen, world_size=1, mini_batches=1, sealer="a")
    assert staleness_stats(seal) == {"staleness": 1.0, "staleness_max": 2.0, "mixed_groups": 2.0}


@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 6), st.integers(1, 7), st.data())
def test_sealed_refs_are_fresh_enough_and_taken_once_without_deadlock(
    staleness: int, shards: int, window: int, quota: int, data: st.DataObject
) -> None:
    """Arbitrary prompts finish, are filtered or go on at every look; what a seal waits for is finished then."""
    r = rules(staleness, prompts=shards * 3 + 1, shards=shards, window=window, quota=quota)
    head = at(0, shards)
    groups: dict[PromptRef, OfferedGroup] = {}
    outcomes: dict[PromptRef, EndedRef] = {}
    flying: dict[PromptRef, int] = {}
    ended: set[PromptRef] = set()
    for _ in range(12):
        held = Offer(
            incarnation="a",
            groups=tuple(groups.values()),
            outcomes=tuple(outcomes.values()),
            in_flight=offer(flying=flying).in_flight,
        )
        known = OffersView.collect(r, head, [held])
        assert set(known.in_flight) == set(flying), "what is in flight never becomes too old"
        late = set(awaited_refs(r, head, (), known))
        chosen = choose_seal(r, head, (), known)
        if isinstance(chosen, AwaitGroups):
            flying |= dict.fromkeys(due_refs(r, head, (), known), head.step)
            assert flying
            for ref in sorted(flying):
                what = "g" if ref in late else data.draw(st.sampled_from("gfn"))
                if what == "g":
                    groups[ref] = group(ref, *sorted({flying.pop(ref), head.step}))
                elif what == "f":
                    outcomes[ref] = EndedRef(ref=ref, kind="filtered", versions=(Version(0, flying.pop(ref)),))
            continue
        if isinstance(chosen, CloseStep):
            advance = chain.account_entry(head, chosen.outcomes, r.shape, WRITER)
        else:
            assert isinstance(chosen, SealStep)
            assert refuse_seal(r, head, (), chosen) is None
            assert all(steps_left(r, head, one.versions[0]) >= 0 for one in chosen.groups)
            seal = chain.seal_slot(None, head, chosen, world_size=2, mini_batches=2, sealer="a")
            if data.draw(st.booleans()):  # generation goes on while the batch is trained
                flying |= dict.fromkeys(due_refs(r, head, (chain.ready_slot(seal),), known), head.step)
            advance = chain.commit_entry(head, chain.ready_slot(seal), r.shape, WRITER, keep_cursors=False)
        gone = {one.ref for one in advance.entry.delta}
        assert not gone & ended
        ended |= gone
        head = advance.head
        groups = {ref: one for ref, one in groups.items() if ref not in gone}
        outcomes = {ref: one for ref, one in outcomes.items() if ref not in gone}


def test_fewer_than_k_and_one_quotas_may_be_wanted_in_flight() -> None:
    head = at(1)
    for over_provision, issued in ((1.0, 4), (1.5, 6), (1.6, 7), (2.0, 8), (None, 8)):
        r = replace(rules(), over_provision=over_provision)
        assert len(due_refs(r, head, (), OffersView({}, {}))) == issued
    half = replace(rules(), over_provision=1.5)
    first = refs(half, head, 8)
    held = offer(group(first[0], 1), flying=dict.fromkeys(first[1:4], 1))
    assert due_refs(half, head, (), OffersView.collect(half, head, [held])) == tuple(first[4:6])


@given(st.integers(0, 500), st.floats(1.0, 16.0))
def test_where_prompts_are_filtered_chance_may_keep_more_than_the_mean_and_never_more_than_all(
    count: int, ratio: float
) -> None:
    assert count / ratio - 1e-9 <= max_kept(count, ratio) <= count
    assert max_kept(count, ratio) <= max_kept(count + 1, ratio)
    assert max_kept(count, 1.0) == count


@given(st.integers(1, 40), st.integers(1, 3), st.floats(1.0, 8.0))
def test_of_what_is_issued_no_more_is_kept_than_the_steps_to_come_can_take(
    quota: int, staleness: int, took: float
) -> None:
    r = replace(rules(staleness, prompts=4000, shards=8, window=400, quota=quota), issue_cap=8.0)
    head = at(1, shards=8)
    tally = head.tally.model_copy(update={"issue_ratio": took})
    head = head.model_copy(update={"tally": tally})
    issued = len(due_refs(r, head, (), OffersView({}, {})))
    room = quota * (staleness + 1)
    assert room <= issued <= math.ceil(room * took)
    assert max_kept(issued, took) <= room
    assert issued == math.ceil(room * took) or max_kept(issued + 1, took) > room
