"""Controllers' decisions for a streamed step, from hand-made views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import ME, PEER, RULES, offered_group, running_job, stored, with_mirror

from controllers.rules.actions import (
    AccumulateParts,
    FeedRank,
    GiveUpBatch,
    MakeSeal,
    MarkBatchReady,
    Rollback,
    TrainBatch,
)
from controllers.rules.decide import decide, undelivered_refs
from controllers.rules.step import COALESCE_S, GROUPS_S, offer_delay_s
from controllers.rules.view import JobView, Memo, RankView
from controllers.rules.waits import current_waits
from controllers.rules.world import is_between_steps
from gcore.ledger import chain
from gcore.ledger.balance import balance_samples, part_digests, parts_sha256
from gcore.ledger.records.chain import EndedRef, Offer, Seal, SealState
from gcore.ledger.selection import SealPart, SealStep, refs_in_order, sealed_group
from gcore.types import PromptRef

STREAMED = replace(RULES, part=1)


def actions(view: JobView) -> list[Any]:
    return [intent.action for intent in decide(view)]


def kinds(view: JobView) -> set[type]:
    return {type(action) for action in actions(view)}


def streaming(*finished: int, holder: str = PEER, **changes: Any) -> JobView:
    """Those refs of the order are finished, and offered by `holder`."""
    view = replace(running_job(), rules=STREAMED, **changes)
    refs = ordered(view)
    groups = tuple(offered_group(refs[number]) for number in finished)
    offer = Offer(incarnation=holder, groups=groups)
    holdings = {g.ref: g for g in groups} if holder == ME else {}
    return replace(with_mirror(view, offers={holder: stored(offer)}), holdings=holdings)


def ordered(view: JobView) -> list[PromptRef]:
    return list(refs_in_order(RULES, view.mirror.head.record, ()))


def parted(view: JobView, *numbers: int, ready: bool = True, holder: str = PEER) -> tuple[JobView, Seal]:
    """With one more part in the slot."""
    refs, slot = ordered(view), view.seal
    kept = slot.groups if slot is not None else ()
    chosen = SealPart((*kept, *(sealed_group(offered_group(refs[number]), holder) for number in numbers)))
    seal = chain.seal_slot(slot, view.head, chosen, world_size=2, mini_batches=1, sealer=ME)
    seal = chain.ready_slot(seal) if ready else seal
    return with_mirror(view, seals={1: stored(seal, 5 + seal.attempt + 10 * ready)}), seal


def holding(view: JobView, seal: Seal, *, begun: int = 0, attempt: int | None = None) -> JobView:
    views = {}
    for rank in range(2):
        held: dict[str, set[int]] = {}
        for slot in balance_samples(seal).of_rank(rank):
            held.setdefault(seal.groups[slot.group].digest, set()).add(slot.sample)
        token = seal.token if attempt is None else seal.token._replace(attempt=attempt)
        views[rank] = RankView(
            rank,
            holding=token,
            held={d: frozenset(s) for d, s in held.items()},
            begun=begun,
            begun_step=seal.step if begun else 0,
            begun_content=parts_sha256(part_digests(seal, begun)) if begun else b"",
        )
    return replace(view, ranks=views)


def test_a_group_that_is_certain_is_sealed_while_others_are_missing() -> None:
    view = streaming(0, 2)
    (made,) = [action for action in actions(view) if isinstance(action, MakeSeal)]
    assert isinstance(made.chosen, SealPart)
    assert [g.ref for g in made.chosen.groups] == [ordered(view)[0], ordered(view)[2]]
    assert MakeSeal not in kinds(replace(view, rules=replace(STREAMED, part=3))), "so few are not worth it"
    assert MakeSeal not in kinds(replace(view, rules=RULES)), "nor is anything where steps are not streamed"


def test_a_group_that_may_yet_be_pushed_out_is_not_sealed() -> None:
    assert MakeSeal not in kinds(streaming(4, 5))


def test_the_whole_is_sealed_as_the_whole() -> None:
    (made,) = [action for action in actions(streaming(0, 1, 2, 3)) if isinstance(action, MakeSeal)]
    assert isinstance(made.chosen, SealStep)
    view, seal = parted(streaming(0, 1, 2, 3), 1)
    (made,) = [action for action in actions(holding(view, seal, begun=1)) if isinstance(action, MakeSeal)]
    assert isinstance(made.chosen, SealStep)
    assert made.chosen.groups[0].ref == ordered(view)[1]


def test_a_part_goes_to_the_ranks_and_is_ready_when_they_hold_it() -> None:
    view, seal = parted(streaming(0, 1, holder=ME), 0, ready=False, holder=ME)
    assert seal.state is SealState.PARTIAL
    assert FeedRank in kinds(view)
    assert not {MarkBatchReady, AccumulateParts, TrainBatch} & kinds(view)
    held = holding(view, seal)
    assert MarkBatchReady in kinds(held)
    assert not {FeedRank, AccumulateParts, TrainBatch} & kinds(held)


def test_a_part_whose_holder_is_gone_is_given_up_and_one_that_is_ready_never() -> None:
    view, _ = parted(streaming(0, 1), 0, ready=False, holder="node-9.gone")
    assert GiveUpBatch in kinds(view)
    ready, _ = parted(streaming(0, 1), 0, holder="node-9.gone")
    assert GiveUpBatch not in kinds(ready)


def test_ready_parts_are_begun_on_every_rank_that_has_not_by_any_controller_until_the_whole_is_ready() -> None:
    view, seal = parted(streaming(0, 1, 2), 0)
    told = [a for a in actions(holding(view, seal)) if isinstance(a, AccumulateParts)]
    assert told == [AccumulateParts(0, seal.token), AccumulateParts(1, seal.token)]
    begun = holding(view, seal, begun=1)
    assert AccumulateParts not in kinds(begun)
    more, second = parted(begun, 1, ready=False)
    assert AccumulateParts not in kinds(more)
    both, second = parted(begun, 1)
    half = replace(both, ranks={0: holding(both, second, begun=2).ranks[0], 1: holding(both, seal, begun=1).ranks[1]})
    assert [a for a in actions(half) if isinstance(a, AccumulateParts)] == [AccumulateParts(1, second.token)]
    refs = ordered(view)
    chosen = SealStep((*second.groups, *(sealed_group(offered_group(refs[n]), PEER) for n in (2, 3))), ())
    last = chain.seal_slot(second, both.head, chosen, world_size=2, mini_batches=1, sealer=ME)
    exchanged = with_mirror(half, seals={1: stored(last)})
    assert AccumulateParts in kinds(exchanged), "also while the rest is exchanged"
    whole = with_mirror(half, seals={1: stored(chain.ready_slot(last))})
    assert TrainBatch in kinds(whole)
    assert AccumulateParts not in kinds(whole)


def test_samples_held_by_ranks_count_for_every_attempt_of_a_streamed_step() -> None:
    view, seal = parted(streaming(0, 1), 0, ready=False)
    early = holding(view, seal, attempt=seal.attempt - 1)
    assert MarkBatchReady in kinds(early)
    assert MarkBatchReady not in kinds(replace(early, rules=RULES, remembered=Memo()))


def test_a_rank_that_has_begun_what_the_store_does_not_name_means_rollback_if_the_slots_are_still_that() -> None:
    """A restored store seals other parts."""
    view, seal = parted(streaming(0, 1, 2), 0)
    begun = holding(view, seal, begun=1)
    other, _ = parted(streaming(0, 1, 2), 1)
    for seen in (
        replace(begun, mirror=other.mirror),
        with_mirror(begun, seals={}),
        with_mirror(begun, seals={1: stored(chain.reseal_slot(parted(streaming(0), 0, ready=False)[1], ME))}),
    ):
        (action,) = [a for a in actions(seen) if isinstance(a, Rollback)]
        assert "has started parts of step 1 that are not in its seal" in action.reason
        assert action.slots_as_seen
        assert not {AccumulateParts, TrainBatch} & kinds(seen)
    assert Rollback not in kinds(begun)


def test_a_step_of_which_a_part_is_ready_is_no_moment_for_a_larger_world() -> None:
    exchanged, _ = parted(streaming(0, 1), 0, ready=False)
    ready, _ = parted(streaming(0, 1), 0)
    assert is_between_steps(exchanged)
    assert not is_between_steps(ready)


def test_groups_of_a_ready_part_count_as_delivered() -> None:
    view, _ = parted(streaming(0, 1, holder=ME), 0, holder=ME)
    assert undelivered_refs(view) == {ordered(view)[1]}
    waiting, _ = parted(streaming(0, 1, holder=ME), 0, ready=False, holder=ME)
    assert undelivered_refs(waiting) == {*ordered(view)[:2]}


def test_while_a_part_is_exchanged_the_step_waits_for_groups_and_for_ranks() -> None:
    view, _ = parted(streaming(0, 1), 0, ready=False)
    causes = {wait.cause for wait in current_waits(view)}
    assert {"groups", "exchange"} <= causes
    (groups,) = [wait for wait in current_waits(view) if wait.cause == "groups"]
    assert groups.what.startswith("step 1 needs 2 more prompts")


def test_an_offer_that_makes_a_part_is_written_soon() -> None:
    view = streaming(0)
    assert offer_delay_s(view, 1, 0) == COALESCE_S
    assert offer_delay_s(replace(view, rules=RULES), 1, 0) == GROUPS_S


def test_an_outcome_before_what_a_part_holds_is_the_steps() -> None:
    view = streaming(1, 2, 3, 4)
    offer = view.mirror.offers[PEER].record
    more = offer.model_copy(update={"outcomes": (EndedRef(ref=ordered(view)[0], kind="filtered"),)})
    view, _ = parted(with_mirror(view, offers={PEER: stored(more)}), 1, 2, 3, 4)
    (made,) = [action for action in actions(view) if isinstance(action, MakeSeal)]
    assert isinstance(made.chosen, SealStep)
    assert [o.ref for o in made.chosen.outcomes] == [ordered(view)[0]]
