"""Selection of groups at staleness k of at least 1 (off-policy steps): which refs to sample, and what a seal takes.

A seal (the record that fixes a step's groups) does not wait for the oldest prompt. It takes offered groups in the order
of the oldest weights that generated them, then by (position, shard). The rest is carried over: finished groups stay
offered, unfinished responses continue across the weight sync, and both precede newly sampled prompts.

Taking the groups that finish first biases training towards short responses only if long ones are never trained. Two
rules prevent that; a quota is the number of groups of one step. First, no prompt is sampled while k + 1 quotas are
offered or in flight, or k quotas while a batch is being trained: a prompt sampled now is then trained before it is too
old. Generation continues during training. Second, a seal waits for groups that would be too old for the steps after it.
Of the groups that must be trained within j more steps, j quotas may be left for those steps; the seal takes the others.
`controllers.rules.step.give_up_stale_prompts` bounds the wait.

`gcore.ledger.selection` covers staleness 0. Neither module depends on the assignment of shards or on time.
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
"""Number of standard deviations above the mean in `max_kept` (99.9 % of a normal distribution lie below)."""


def steps_left(rules: StreamRules, head: Head, version: Version) -> int:
    """How many steps may still be committed before tokens of `version` are too old to be trained.

    0: only the step after head's may train them.
    """
    return rules.staleness - (head.step - version.step)


def due_refs(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> tuple[PromptRef, ...]:
    """Refs that may be sampled now, oldest first.

    Staleness k limits how much is offered or in flight on all controllers together: k + 1 quotas (groups per step), or
    the remaining steps if these are fewer. While the next step's batch is sealed and takes nothing more, the limit is k
    quotas, as in AReaL, whose capacity includes the batch in training. Because some prompts in flight will be filtered,
    their number is scaled up by the issue ratio, minus a margin for random variation (`max_kept`). With fewer quotas
    (`over_provision`) a step has less choice, but trains fresher groups. Refs whose controller died come first, because
    they are the oldest. `order`: as in `gcore.ledger.selection.due_refs`.
    """
    quotas, under_way = rules.quotas, _next_is_closed(head, seals)
    if under_way:  # prompts sampled now are too late for this batch; the k steps after it train them
        quotas = min(quotas, rules.staleness)
    if rules.steps is not None:
        quotas = max(min(quotas, rules.steps - head.step - under_way), 0)
    standing = math.ceil(rules.quota * quotas)
    there = len(_standing(rules, head, seals, offered.groups))
    wanted = _as_many_as(max(standing - there, 0), issue_ratio(rules, head))
    going_on = len(_standing(rules, head, seals, offered.in_flight))
    room = wanted - going_on
    if rules.limit is not None:  # remaining prompts of this step, less those that later steps already use
        used = head.tally.since_step.ended + len(_standing(rules, head, seals, offered.outcomes)) + there + going_on
        room = min(room, rules.limit + standing - rules.quota - used)
    unknown = (
        ref
        for ref in (refs_in_order(rules, head, seals) if order is None else order)
        if ref not in offered.groups and ref not in offered.in_flight and ref not in offered.outcomes
    )
    return tuple(itertools.islice(unknown, max(room, 0)))


def _next_is_closed(head: Head, seals: Collection[Seal]) -> bool:
    """Whether the batch of the step after head's is sealed and not committed yet."""
    return any(seal.step == head.step + 1 and seal.state is not SealState.OPEN for seal in seals)


def choose_seal(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> Choice:
    """Choose what to seal next: offered groups, those with the oldest weights first.

    Waits while refs in flight would otherwise become too old (`awaited_refs`), and while the quota is not reached.
    `order`: as in `gcore.ledger.selection.due_refs`.
    """
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
    """Upper bound, with probability 99.9 %, for how many of `count` prompts in flight pass the filters.

    One in `ratio` passes on average, independently (binomial, normal approximation). The mean alone would be exceeded
    half of the time; groups beyond what the next steps can take become too old, and these would be the slowest ones.
    """
    share = 1.0 / ratio
    return min(count, math.ceil(count * share + SURE * math.sqrt(count * share * (1.0 - share))))


def _as_many_as(room: int, ratio: float) -> int:
    """Maximum number of prompts in flight of which, by `max_kept`, at most `room` pass the filters."""
    return bisect_right(range(math.ceil(room * ratio) + 1), room, key=lambda count: max_kept(count, ratio)) - 1


def awaited_refs(rules: StreamRules, head: Head, seals: Collection[Seal], offered: OffersView) -> tuple[PromptRef, ...]:
    """Refs in flight that the next seal waits for, oldest first, because otherwise some would become too old.

    The seal waits for every ref that would be too old after it, even if enough other groups are finished: the
    unfinished refs are those that take longest. Of the groups that must be trained within j more steps (`steps_left`),
    j quotas may be trained by those steps. The next step must take the others, so the seal waits for them too. Refs in
    flight count with the number that may pass the filters (`max_kept`).
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
    """Metrics of a batch's off-policyness: mean and maximum age of its groups, and the number of mixed groups.

    The age of a group is the age in steps of the oldest weights that generated it; 0: the weights that the step trains.
    A mixed group was generated by several versions.
    """
    ages = [seal.step - 1 - _begun(group) for group in seal.groups]
    return {
        "staleness": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "mixed_groups": float(sum(len(group.versions) > 1 for group in seal.groups)),
    }


def _standing(
    rules: StreamRules, head: Head, seals: Collection[Seal], refs: Iterable[PromptRef]
) -> tuple[PromptRef, ...]:
    """Those of `refs` that may still be sampled or trained: `refs_in_order` contains them. In its order.

    Checks each ref instead of walking the order.
    """
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
