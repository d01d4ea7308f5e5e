"""What is due and what a seal takes where steps may train what older weights made (staleness k of at least 1).

A seal does not wait for the oldest prompt: it takes what is offered, what was issued for earlier steps before what was
issued for later ones, and (position, shard) among equals. What it leaves is not thrown away. Finished groups stay
offered, responses in flight go on over the change of weights, and both come before anything that is issued later.

Taking what finishes first leans towards short answers only if the long ones never come. So that they come, nothing new
is issued while k + 1 quotas are offered or in flight: what is issued now then has its turn before it is too old. And a
seal waits for what would be too old otherwise: of what must be trained within j more steps, j quotas can wait, the rest
is taken now. The wait is bounded by whoever holds the prompt (`controllers.decide.expiring`).

Pure. Staleness 0 is `gcore.ledger.stream`'s; who works on which shard, and time, are known to neither.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from gcore.ledger.records import Head, Seal, SealedGroup
from gcore.ledger.rules import StreamRules, issue_ratio
from gcore.ledger.stream import Choice, Found, Offered, concluded, in_order
from gcore.types import PromptRef, Version


def steps_left(rules: StreamRules, head: Head, version: Version) -> int:
    """After how many further steps tokens of `version` are too old to be trained; 0: the next step is the last that may."""
    return rules.staleness - (head.step - version.step)


def due(rules: StreamRules, head: Head, seals: Collection[Seal], offered: Offered) -> tuple[PromptRef, ...]:
    """The refs that may be issued now, oldest first.

    Counts what is offered or in flight anywhere in the cluster against k + 1 quotas, or as many as there are steps left;
    in flight is as much more as the sizing says. What a dead holder had comes first, for it stands first in the order.
    """
    quotas = rules.staleness + 1
    if rules.steps is not None:
        quotas = max(min(quotas, rules.steps - head.step), 0)
    unknown: list[PromptRef] = []
    there = going_on = ended = 0
    for ref in in_order(rules, head, seals):
        if ref in offered.groups:
            there += 1
        elif ref in offered.in_flight:
            going_on += 1
        elif ref in offered.outcomes:
            ended += 1
        else:
            unknown.append(ref)
    wanted = math.ceil(max(rules.quota * quotas - there, 0) * issue_ratio(rules, head))
    issued = wanted - going_on
    if rules.limit is not None:
        used = head.tally.since_step.ended + ended + there + going_on
        issued = min(issued, rules.limit + rules.quota * (quotas - 1) - used)
    return tuple(unknown[: max(issued, 0)])


def choose(rules: StreamRules, head: Head, seals: Collection[Seal], offered: Offered) -> Choice:
    """What to seal next; what follows from exhausted windows, limits and ends is as at staleness 0 (`concluded`)."""
    order = list(in_order(rules, head, seals))
    there = sorted((offered.groups[ref] for ref in order if ref in offered.groups), key=_begun)
    outcomes = tuple(offered.outcomes[ref] for ref in order if ref in offered.outcomes)
    groups = tuple(there[: rules.quota])
    used = head.tally.since_step.ended + len(outcomes) + len(there)
    limited = rules.limit is not None and used >= rules.limit and len(groups) < rules.quota
    late = awaited(rules, head, seals, offered)
    missing: tuple[PromptRef, ...] = ()
    if late:
        missing = late
    elif len(groups) < rules.quota and not limited:
        unknown = [ref for ref in order if ref not in offered.groups and ref not in offered.outcomes]
        missing = tuple(unknown[: rules.quota - len(groups)])
    return concluded(rules, head, Found(groups, outcomes, missing, limited))


def awaited(rules: StreamRules, head: Head, seals: Collection[Seal], offered: Offered) -> tuple[PromptRef, ...]:
    """The refs in flight that the next seal waits for, oldest first: without them some would become too old.

    Of the refs with at most j steps left, j quotas may be trained later. The rest must be in this seal; while too few of
    them are finished, it waits for those that are not. Of what has more than this step left, only so much counts as will
    be kept, by the sizing.
    """
    ratio = issue_ratio(rules, head)
    order = [ref for ref in in_order(rules, head, seals) if ref in offered.groups or ref in offered.in_flight]
    left = {ref: steps_left(rules, head, _version(offered, ref)) for ref in order}
    for j in range(rules.staleness + 1):
        within = [ref for ref in order if left[ref] <= j]
        unfinished = [ref for ref in within if ref in offered.in_flight]
        finished = len(within) - len(unfinished)
        expected = finished + (math.ceil(len(unfinished) / ratio) if j else len(unfinished))
        if unfinished and min(finished, rules.quota) < min(expected - j * rules.quota, rules.quota):
            return tuple(sorted(unfinished, key=lambda ref: left[ref]))
    return ()


def _begun(group: SealedGroup) -> int:
    return min(version.step for version in group.versions)


def _version(offered: Offered, ref: PromptRef) -> Version:
    """The oldest weights that had, or may have, a part in the ref's group."""
    return min(offered.groups[ref].versions, key=lambda v: v.step) if ref in offered.groups else offered.in_flight[ref]
