"""The strictly on-policy order: due refs, and the selection of a seal."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import shard_lengths
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.chain import EndedRef, Head, Offer, OfferedGroup, Seal
from gcore.ledger.selection import (
    MOST_OUTCOMES,
    AwaitGroups,
    CachedOrder,
    CloseStep,
    OffersView,
    SealStep,
    StreamRules,
    choose_seal,
    due_refs,
    refs_in_order,
    refuse_seal,
)
from gcore.types import PromptRef, Version

WRITER = ChainWriter("a.1", "n")


def rules(prompts: int = 12, shards: int = 4, window: int = 8, quota: int = 4) -> StreamRules:
    return StreamRules(shard_lengths(prompts, shards), window, quota)


def start(shards: int = 4) -> Head:
    return chain.base_entry(shards, "w", WRITER).head


FIRST = Version(0, 0)


def group(ref: PromptRef, version: Version = FIRST) -> OfferedGroup:
    return OfferedGroup(ref=ref, digest=str(ref), prompt_tokens=3, response_tokens=(2, 2), versions=(version,))


def offered(rules_: StreamRules, head: Head, *offers: Offer) -> OffersView:
    return OffersView.collect(rules_, head, offers)


def test_refs_come_by_position_then_shard() -> None:
    order = list(refs_in_order(rules(), start(), ()))[:6]
    assert order == [PromptRef(0, s, 0) for s in range(4)] + [PromptRef(0, 0, 1), PromptRef(0, 1, 1)]


def test_positions_run_on_into_the_next_epoch() -> None:
    refs = [r for r in refs_in_order(rules(), start(), ()) if r.shard == 0]
    assert [(r.data_epoch, r.seq) for r in refs] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_an_order_that_is_walked_twice_is_the_same_however_far_it_was_walked_at_first() -> None:
    whole = list(refs_in_order(rules(), start(), ()))
    walked = CachedOrder(rules(), start(), ())
    assert list(itertools.islice(walked, 3)) == whole[:3]
    one, other = iter(walked), iter(walked)
    assert [ref for pair in zip(one, other, strict=False) for ref in pair] == [ref for ref in whole for _ in range(2)]
    assert list(walked) == whole


def test_a_seal_waits_for_the_oldest_even_if_later_ones_are_there() -> None:
    r = rules()
    refs = list(refs_in_order(r, start(), ()))
    chosen = choose_seal(
        r, start(), (), offered(r, start(), Offer(incarnation="a", groups=tuple(map(group, refs[1:6]))))
    )
    assert chosen == AwaitGroups(refs[0], 1)


def test_a_filtered_ref_makes_one_more_due() -> None:
    r = rules()
    refs = list(refs_in_order(r, start(), ()))
    known = offered(r, start(), Offer(incarnation="a", outcomes=(EndedRef(ref=refs[0], kind="filtered"),)))
    assert due_refs(r, start(), (), known) == tuple(refs[1:5])


def test_a_group_made_by_an_older_version_is_not_offered() -> None:
    r = rules()
    head = start().model_copy(update={"step": 1})
    known = offered(r, head, Offer(incarnation="a", groups=(group(PromptRef(0, 0, 0), Version(0, 0)),)))
    assert not known.groups


def test_a_window_full_of_filtered_refs_is_accounted_for() -> None:
    r = rules(window=2)
    refs = list(refs_in_order(r, start(), ()))
    known = offered(
        r, start(), Offer(incarnation="a", outcomes=tuple(EndedRef(ref=ref, kind="filtered") for ref in refs))
    )
    chosen = choose_seal(r, start(), (), known)
    assert isinstance(chosen, CloseStep)
    assert {o.ref for o in chosen.outcomes} == set(refs)


def test_very_many_outcomes_do_not_wait_for_the_quota() -> None:
    """Otherwise a dataset without a working score would fill offers and a seal beyond the store's limit."""
    r = rules(prompts=8192, window=4096)
    refs = list(refs_in_order(r, start(), ()))
    few, many = refs[: MOST_OUTCOMES - 1], refs[: MOST_OUTCOMES + 7]
    ended = {n: tuple(EndedRef(ref=ref, kind="failed") for ref in n_refs) for n, n_refs in ((0, few), (1, many))}
    assert isinstance(
        choose_seal(r, start(), (), offered(r, start(), Offer(incarnation="a", outcomes=ended[0]))), AwaitGroups
    )
    chosen = choose_seal(r, start(), (), offered(r, start(), Offer(incarnation="a", outcomes=ended[1])))
    assert chosen == CloseStep(ended[1][:MOST_OUTCOMES])


def test_an_exhausted_window_without_outcomes_makes_a_smaller_step() -> None:
    r = rules(window=1, quota=6)
    refs = list(refs_in_order(r, start(), ()))
    chosen = choose_seal(r, start(), (), offered(r, start(), Offer(incarnation="a", groups=tuple(map(group, refs)))))
    assert isinstance(chosen, SealStep)
    assert len(chosen.groups) == 4


def test_two_holders_of_one_ref_give_one_group() -> None:
    r = rules()
    refs = list(refs_in_order(r, start(), ()))[:4]
    both = [Offer(incarnation=name, groups=tuple(map(group, refs))) for name in ("b", "a")]
    chosen = choose_seal(r, start(), (), offered(r, start(), *both))
    assert isinstance(chosen, SealStep)
    assert {g.holder for g in chosen.groups} == {"a"}
    assert refuse_seal(r, start(), (), chosen) is None


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.data())
def test_sealed_refs_are_accepted_and_end_once(shards: int, window: int, quota: int, data: st.DataObject) -> None:
    """Many steps with arbitrary offers: every ref ends once, in order, and the stream never gets stuck."""
    r = rules(prompts=shards * 3 + 1, shards=shards, window=window, quota=quota)
    head = start(shards)
    ended: set[PromptRef] = set()
    for _ in range(6):
        open_refs = list(refs_in_order(r, head, ()))
        kinds = data.draw(st.lists(st.sampled_from("gfn"), min_size=len(open_refs), max_size=len(open_refs)))
        kinds_by_ref = dict(zip(open_refs, kinds, strict=True))
        version = head.version
        groups = tuple(group(ref, version) for ref, k in kinds_by_ref.items() if k == "g")
        outcomes = tuple(EndedRef(ref=ref, kind="filtered") for ref, k in kinds_by_ref.items() if k == "f")
        known = offered(r, head, Offer(incarnation="a", groups=groups, outcomes=outcomes))
        wanted = due_refs(r, head, (), known)
        chosen = choose_seal(r, head, (), known)
        if isinstance(chosen, AwaitGroups):
            assert wanted
            assert chosen.oldest == wanted[0]
            continue
        if isinstance(chosen, CloseStep):
            advance = chain.account_entry(head, chosen.outcomes, r.shape, WRITER)
        else:
            assert refuse_seal(r, head, (), chosen) is None
            seal = chain.seal_slot(None, head, chosen, world_size=2, mini_batches=2, sealer="a")
            advance = chain.commit_entry(head, chain.ready_slot(seal), r.shape, WRITER, keep_cursors=False)
        refs = {e.ref for e in advance.entry.delta}
        assert not refs & ended
        ended |= refs
        head = advance.head
        assert head.cursors.terminal_count == len(ended)


def test_the_attempt_survives_a_reseal() -> None:
    r = rules()
    refs = list(refs_in_order(r, start(), ()))[:4]
    chosen = choose_seal(r, start(), (), offered(r, start(), Offer(incarnation="a", groups=tuple(map(group, refs)))))
    assert isinstance(chosen, SealStep)
    first = chain.seal_slot(None, start(), chosen, world_size=1, mini_batches=1, sealer="a")
    emptied = chain.reseal_slot(first, "b")
    second = chain.seal_slot(emptied, start(), chosen, world_size=1, mini_batches=1, sealer="b")
    assert [s.attempt for s in (first, emptied, second)] == [1, 2, 3]
    assert emptied.groups == ()


def test_records_survive_encoding() -> None:
    r = rules()
    refs = list(refs_in_order(r, start(), ()))[:4]
    known = offered(r, start(), Offer(incarnation="a", groups=tuple(map(group, refs))))
    chosen = choose_seal(r, start(), (), known)
    assert isinstance(chosen, SealStep)
    seal = chain.seal_slot(None, start(), chosen, world_size=1, mini_batches=1, sealer="a")
    assert Seal.decode(seal.encode()) == seal
    assert Head.decode(start().encode()) == start()
