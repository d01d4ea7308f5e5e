"""What is due and what a seal takes where steps may train what older weights made (staleness k of at least 1).

A seal does not wait for the oldest prompt: it takes what is offered, what was issued for earlier steps before what was
issued for later ones, and (position, shard) among equals. What it leaves is not thrown away. Finished groups stay
offered, responses in flight go on over the change of weights, and both come before anything that is issued later.

Taking what finishes first leans towards short answers only if the long ones never come. So that they come, nothing new
is issued while k + 1 quotas are offered or in flight, or k beside a batch that is being trained: what is issued now then has its turn
before it is too old. So generation goes on while the trainer works. And a
seal waits for what would be too old after it; of what must be trained within j more steps, j quotas can wait, the rest
is taken now. The wait is bounded by whoever holds the prompt (`controllers.rules.step.give_up_stale_prompts`).

Staleness 0 is `gcore.ledger.selection`'s; who works on which shard, and time, are known to neither.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable

from gcore.ledger.records.chain import Head, Seal, SealedGroup, SealState
from gcore.ledger.selection import (
    AvailableGroups,
    AwaitGroups,
    Choice,
    OffersView,
    StreamRules,
    conclude_choice,
    issue_ratio,
    last_position,
    refs_in_order,
    sealed_refs,
)
from gcore.types import PromptRef, Version

SURE = 3.0
"""Standard deviations."""


def steps_left(rules: StreamRules, head: Head, version: Version) -> int:
    """After how many further steps tokens of `version` are too old to be trained; 0: the next step is the last that may."""
    return rules.staleness - (head.step - version.step)


def due_refs(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> tuple[PromptRef, ...]:
    """The refs that may be issued now, oldest first.

    Counts what is offered or in flight anywhere in the cluster against k + 1 quotas, or as many as there are steps left; against k
    while the next step's batch is closed, for it takes nothing more (AReaL's capacity, of which that batch is a part);
    in flight is as much more as the sizing says, less what chance could keep of it beyond that. Where fewer than k + 1 are wanted (`over_provision`) a step has less to
    choose from, and trains what is younger. What a dead holder had comes first, for it stands first in the order.
    """
    quotas, under_way = rules.quotas, _next_is_closed(head, seals)
    if under_way:  # what is issued now is too late for it, and has its turn in the k steps after it
        quotas = min(quotas, rules.staleness)
    if rules.steps is not None:
        quotas = max(min(quotas, rules.steps - head.step - under_way), 0)
    standing = math.ceil(rules.quota * quotas)
    there = len(_standing(rules, head, seals, offered.groups))
    wanted = _as_many_as(max(standing - there, 0), issue_ratio(rules, head))
    going_on = len(_standing(rules, head, seals, offered.in_flight))
    room = wanted - going_on
    if rules.limit is not None:  # what the step may still use up, and what later steps have of it already
        used = head.tally.since_step.ended + len(_standing(rules, head, seals, offered.outcomes)) + there + going_on
        room = min(room, rules.limit + standing - rules.quota - used)
    unknown = (
        ref
        for ref in (refs_in_order(rules, head, seals) if order is None else order)
        if ref not in offered.groups and ref not in offered.in_flight and ref not in offered.outcomes
    )
    return tuple(itertools.islice(unknown, max(room, 0)))


def _next_is_closed(head: Head, seals: Collection[Seal]) -> bool:
    """Whether the batch of the step after head's has been sealed, and is on its way to be committed."""
    return any(seal.step == head.step + 1 and seal.state is not SealState.OPEN for seal in seals)


def choose_seal(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> Choice:
    """What to seal next: what was begun first of what is offered, unless something else would then become too old."""
    groups = [offered.groups[ref] for ref in _standing(rules, head, seals, offered.groups)]
    groups.sort(key=_begun)
    outcomes = tuple(offered.outcomes[ref] for ref in _standing(rules, head, seals, offered.outcomes))
    lacking = rules.quota - len(groups)
    late = awaited_refs(rules, head, seals, offered)
    if late:
        return AwaitGroups(late[0], max(len(late), lacking))
    used = head.tally.since_step.ended + len(outcomes) + min(len(groups), rules.quota)
    limited = lacking > 0 and rules.limit is not None and used >= rules.limit
    missing: tuple[PromptRef, ...] = ()
    if lacking > 0 and not limited:
        order = refs_in_order(rules, head, seals) if order is None else order
        open_refs = (ref for ref in order if ref not in offered.groups and ref not in offered.outcomes)
        missing = tuple(itertools.islice(open_refs, lacking))
    return conclude_choice(rules, head, AvailableGroups(tuple(groups[: rules.quota]), outcomes, missing, limited))


def max_kept(count: int, ratio: float) -> int:
    """Of so many prompts in flight, of which one in `ratio` is kept, so many are kept at most: but for once in a thousand times.

    What is kept beyond what the steps to come can take becomes too old, and it would be what took longest. So it must be rare:
    the mean alone is exceeded every other time.
    """
    share = 1.0 / ratio
    return min(count, math.ceil(count * share + SURE * math.sqrt(count * share * (1.0 - share))))


def _as_many_as(room: int, ratio: float) -> int:
    """The most that may be in flight while only `room` more groups can be taken."""
    return bisect_right(range(math.ceil(room * ratio) + 1), room, key=lambda count: max_kept(count, ratio)) - 1


def awaited_refs(rules: StreamRules, head: Head, seals: Collection[Seal], offered: OffersView) -> tuple[PromptRef, ...]:
    """The refs in flight that the next seal waits for, oldest first: without them some would become too old.

    It waits for everything that would be too old after it, even if there are a quota without it: what is not finished
    then is what takes longest. Of what has at most j steps left, j quotas may be trained later; while too few of the rest
    are finished, it waits for those too. Of these only so many count as will be kept, by the sizing.
    """
    ratio = issue_ratio(rules, head)
    groups = [
        steps_left(rules, head, _oldest(offered.groups[r])) for r in _standing(rules, head, seals, offered.groups)
    ]
    flying = {
        ref: steps_left(rules, head, offered.in_flight[ref]) for ref in _standing(rules, head, seals, offered.in_flight)
    }
    for j in range(rules.staleness + 1):
        finished = sum(left <= j for left in groups)
        unfinished = [ref for ref, left in flying.items() if left <= j]
        kept = finished + max_kept(len(unfinished), ratio)
        if unfinished and (j == 0 or min(finished, rules.quota) < min(kept - j * rules.quota, rules.quota)):
            return tuple(sorted(unfinished, key=flying.__getitem__))
    return ()


def staleness_stats(seal: Seal) -> dict[str, float]:
    """How old the weights of a batch's groups were, in steps: 0 are those that the step trains."""
    ages = [seal.step - 1 - _begun(group) for group in seal.groups]
    return {
        "staleness": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "mixed_groups": float(sum(len(group.versions) > 1 for group in seal.groups)),
    }


def _standing(
    rules: StreamRules, head: Head, seals: Collection[Seal], refs: Iterable[PromptRef]
) -> tuple[PromptRef, ...]:
    """Those of `refs` that `refs_in_order` gives, in its order, without walking it."""
    sealed = sealed_refs(seals)
    found = []
    for ref in refs:
        cursor, position = head.cursors.shards[ref.shard], rules.shape.position(ref)
        last = last_position(rules, ref.shard)
        end = cursor.low_water + rules.window
        if position < (end if last is None else min(end, last)) and not cursor.is_terminal(position):
            found.append((position, ref.shard, ref))
    return tuple(ref for _, _, ref in sorted(found) if ref not in sealed)


def _oldest(group: SealedGroup) -> Version:
    return min(group.versions, key=lambda version: version.step)


def _begun(group: SealedGroup) -> int:
    return _oldest(group).step
