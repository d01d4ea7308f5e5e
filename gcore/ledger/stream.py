"""What is due from the prompt stream, and what a seal takes: the strictly on-policy order.

Refs come in the order (position, shard). At staleness 0 a seal takes them in that order and waits for them, never in the
order in which they finished, or training would lean towards short answers. What is due is computed anew at every look:
not terminal at head, in no open seal, inside each shard's window; there is no "next" pointer to lose.

Pure. Knows nothing of who works on which shard, nor of time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gcore.ledger.ancestry import is_acceptable, is_ancestor
from gcore.ledger.records import EndedRef, Head, Offer, OfferedGroup, Seal, SealedGroup
from gcore.prompts.cursor import StreamShape, shard_lengths
from gcore.types import PromptRef, Version

MOST_OUTCOMES = 512
"""Outcomes that one seal or one account entry takes, at most: with their reasons they stay well under 1.5 MiB."""


def sealed_refs(seals: Collection[Seal]) -> frozenset[PromptRef]:
    """Every ref that an open seal holds."""
    return frozenset(ref for seal in seals for ref in (*(g.ref for g in seal.groups), *(o.ref for o in seal.outcomes)))


def in_order(rules: StreamRules, head: Head, seals: Collection[Seal]) -> Iterator[PromptRef]:
    """The refs that are neither terminal nor sealed, in the order (position, shard), to the windows' ends."""
    sealed = sealed_refs(seals)
    cursors = head.cursors.shards
    position = min(cursor.low_water for cursor in cursors)
    end = max(cursor.low_water for cursor in cursors) + rules.window
    while position < end:
        for shard, cursor in enumerate(cursors):
            if position >= cursor.low_water + rules.window or cursor.is_terminal(position):
                continue
            ref = rules.shape.ref(shard, position)
            if ref not in sealed:
                yield ref
        position += 1


@dataclass(frozen=True, slots=True)
class Offered:
    """All live offers, seen ref by ref; what is not acceptable for the step is left out."""

    groups: Mapping[PromptRef, SealedGroup]
    outcomes: Mapping[PromptRef, EndedRef]
    in_flight: Mapping[PromptRef, Version] = field(default_factory=dict)
    """What goes on from step to step and was not offered yet, with the oldest weights it was begun with."""

    @classmethod
    def collect(cls, rules: StreamRules, head: Head, offers: Sequence[Offer]) -> Offered:
        """Join the offers. Of two holders of one ref the smaller (incarnation, digest) counts; a group beats an outcome."""
        step = head.step + 1
        groups: dict[PromptRef, SealedGroup] = {}
        outcomes: dict[PromptRef, EndedRef] = {}
        in_flight: dict[PromptRef, Version] = {}
        for offer in sorted(offers, key=lambda o: o.incarnation):
            for group in offer.groups:
                if group.ref not in groups and is_acceptable(head, step, group.versions, rules.staleness):
                    groups[group.ref] = held_by(group, offer.incarnation)
            for ended in offer.outcomes:
                # Outcomes need ancestry, no staleness bound; a prompt that failed before it was generated has no version.
                if ended.ref not in outcomes and all(is_ancestor(head, v) for v in ended.versions):
                    outcomes[ended.ref] = ended
            for one in offer.in_flight:
                if is_acceptable(head, step, (one.version,), rules.staleness):
                    in_flight[one.ref] = min(one.version, in_flight.get(one.ref, one.version))
        outcomes = {ref: ended for ref, ended in outcomes.items() if ref not in groups}
        going_on = {ref: version for ref, version in in_flight.items() if ref not in groups and ref not in outcomes}
        return cls(groups, outcomes, going_on)


def held_by(group: OfferedGroup, holder: str) -> SealedGroup:
    """The offered group as a seal names it."""
    return SealedGroup.model_construct(**group.__dict__, holder=holder)


def due(
    rules: StreamRules, head: Head, seals: Collection[Seal], offered: Offered, *, ahead: int = 0
) -> tuple[PromptRef, ...]:
    """The refs that must still be produced for the next seal, oldest first.

    Walks the order until quota (+ `ahead`) refs were met that are kept or may yet be; those among them that nobody has
    offered are due.
    """
    wanted: list[PromptRef] = []
    counted = 0
    for ref in in_order(rules, head, seals):
        if counted >= rules.quota + ahead:
            break
        if ref in offered.outcomes:
            continue
        counted += 1
        if ref not in offered.groups:
            wanted.append(ref)
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class SealNow:
    """The quota is met (or cannot be met, and this is what there is)."""

    groups: tuple[SealedGroup, ...]
    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class AccountNow:
    """Outcomes must be written down first: the windows are exhausted and move on by it, or there are very many."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class NotYet:
    """The seal waits for `oldest` and `missing - 1` others."""

    oldest: PromptRef
    missing: int


def choose(rules: StreamRules, head: Head, seals: Collection[Seal], offered: Offered) -> SealNow | AccountNow | NotYet:
    """What to seal next.

    Exhausted means: every ref in every shard's window is terminal, sealed or offered. Then a full quota cannot come, and
    waiting for it would be for ever: first the outcomes are accounted for; when there are none, the groups that are
    there make a smaller step. Outcomes do not wait for a quota once there are `MOST_OUTCOMES`: neither a seal nor the
    offers that name them have room for as many as the windows hold. Nor once there are as many as an epoch has prompts:
    it is to be seen soon that the data bring nothing.
    """
    groups: list[SealedGroup] = []
    outcomes: list[EndedRef] = []
    missing: list[PromptRef] = []
    for ref in in_order(rules, head, seals):
        if len(groups) + len(missing) >= rules.quota:
            break
        if ref in offered.groups:
            groups.append(offered.groups[ref])
        elif ref in offered.outcomes:
            outcomes.append(offered.outcomes[ref])
        else:
            missing.append(ref)
    room = min(MOST_OUTCOMES, sum(rules.shape.lengths))
    if len(outcomes) >= room:
        return AccountNow(tuple(outcomes[:room]))
    if missing:
        return NotYet(missing[0], len(missing))
    if len(groups) < rules.quota and outcomes:
        return AccountNow(tuple(outcomes))
    return SealNow(tuple(groups), tuple(outcomes))


def refuse_seal(rules: StreamRules, head: Head, seals: Collection[Seal], seal: SealNow) -> str | None:
    """Why this must not be sealed, or None. Ref by ref: not terminal, in no open seal, once within the seal."""
    seen = set(sealed_refs(seals))
    for ref in (*(g.ref for g in seal.groups), *(o.ref for o in seal.outcomes)):
        if head.cursors.is_terminal(rules.shape, ref):
            return f"prompt {ref} is terminal already"
        if ref in seen:
            return f"prompt {ref} is sealed already"
        seen.add(ref)
    for group in seal.groups:
        if not is_acceptable(head, head.step + 1, group.versions, rules.staleness):
            return (
                f"prompt {group.ref} was made by {', '.join(map(str, group.versions))}, too old or of a cut-off lineage"
            )
    return None if seal.groups else "there is no group in it"
