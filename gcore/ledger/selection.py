"""What is due from the prompt stream, and what a seal takes: the strictly on-policy order; a job's constants; ancestry.

Refs come in the order (position, shard). At staleness 0 a seal takes them in that order and waits for them, never in the order in
which they finished, or training would lean towards short answers. What is due is computed anew at every look: not terminal at
head, in no open seal, inside each shard's window; there is no "next" pointer to lose.

Where prompts are filtered, more are issued at once than groups are wanted, as many as it took lately (`issue_ratio`), because each
filtered one would cost another round of generation. What is left over was generated in vain at staleness 0. A step uses up a
bounded number of prompts; `flow.on_limit` says what happens at the limit, or when the windows hold no more.

A job goes to a step, or through whole data epochs. In the second case the number of its steps is estimated, the last one is known
when it is sealed, and nothing beyond the epochs is ever issued. All of this reads nothing but the chain, so it is the same for
every controller, and a rollback takes it back too. A version carries its lineage, because step 5 of a rolled-back lineage is not
step 5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field

from gcore.config.load import stored_spec
from gcore.config.reward import RewardSpec
from gcore.config.spec import JobSpec, training_sources
from gcore.config.train import OnLimit
from gcore.data.order import StreamShape, shard_lengths
from gcore.ledger.records.chain import Checkpoint, EndedRef, Head, Offer, OfferedGroup, Seal, SealedGroup
from gcore.ledger.records.job import JobRecord
from gcore.types import PromptRef, Version


def is_ancestor(head: Head, version: Version) -> bool:
    """Whether the weights `version` are a state that head's chain went through.

    They are, if their lineage is one of head's, and no later one began below them: for every lineage after the version's,
    `step <= base_step`. A lineage that is not among head's was begun by a store that was put back to an older state since.
    """
    if version.step > head.step or all(one.number != version.lineage for one in head.lineages):
        return False
    return all(version.step <= later.base_step for later in head.lineages if later.number > version.lineage)


def is_fresh(step: int, versions: Iterable[Version], staleness: int) -> bool:
    """Whether tokens of these versions may be trained at `step`: `(step - 1) - oldest step <= staleness`."""
    return step - 1 - min(version.step for version in versions) <= staleness


def is_acceptable(head: Head, step: int, versions: tuple[Version, ...], staleness: int) -> bool:
    """Whether a group made by `versions` may be trained at `step` after `head`."""
    return (
        bool(versions)
        and all(is_ancestor(head, version) for version in versions)
        and is_fresh(step, versions, staleness)
    )


def resumable_checkpoints(head: Head, checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The checkpoints on head's chain, newest first: where a new world may start from."""
    on_chain = [c for c in checkpoints if is_ancestor(head, c.version)]
    return tuple(sorted(on_chain, key=lambda c: (c.step, c.lineage), reverse=True))


MOST_BYTES = 1 << 20
"""The record of a sealed step, or of an offer, must stay well under the store's 1.5 MiB a request."""

GROUP_BYTES, SAMPLE_BYTES, PART_BYTES = 260, 11, 32
"""What a group, beside its source's name, a sample, and a part of a reward, beside its own, take in a record, generously."""

OBSERVED_BYTES = 7
"""What else a sample takes that is shown something between its turns: how many tokens of it that is."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """The job's constants that the order and the size of a step depend on."""

    shape: StreamShape
    window: int
    quota: int
    staleness: int = 0
    steps: int | None = None
    """The last step, if it is known from the beginning."""
    epochs: int | None = None
    """Data epochs after which nothing is issued; None: it goes on and on, until the last step."""
    issue_cap: float = 1.0
    """Prompts that are issued at once for each group still wanted, at most."""
    limit: int | None = None
    """Prompts that one step may use up."""
    on_limit: OnLimit = "train_smaller"
    part: int | None = None
    """Groups from which on a part of the next step is sealed by itself; None: steps are sealed as a whole."""
    over_provision: float | None = None
    """Quotas that may be offered or in flight at once, at some staleness; None: as many as the staleness allows."""

    @property
    def quotas(self) -> float:
        """How many quotas may be offered or in flight at once."""
        return self.staleness + 1 if self.over_provision is None else min(self.over_provision, self.staleness + 1)


def rules_of(job: JobRecord) -> StreamRules:
    """The rules of a job. They change only with a goal that is raised after the job's end."""
    spec = stored_spec(job.spec)
    flow = spec.flow
    by_prompts = flow.steps is None and flow.count == "prompts"
    return StreamRules(
        shape=shard_lengths(job.prompts, spec.data.shards),
        window=spec.data.window,
        quota=flow.groups_per_step,
        staleness=spec.rollout.staleness,
        steps=flow.last_step(job.prompts),
        epochs=flow.epochs if by_prompts else None,
        # One peer may come to hold all that was issued, and must be able to offer it.
        issue_cap=max(1.0, min(flow.issue_cap, MOST_BYTES / offer_bytes(spec))),
        limit=flow.prompt_limit,
        on_limit=flow.on_limit,
        part=spec.train.part_of(flow.groups_per_step),
        over_provision=spec.rollout.over_provision,
    )


def cursor_bytes(spec: JobSpec) -> int:
    """At most what the cursors take in head, and in each entry of the log: of each shard a bit for each place of its window."""
    return spec.data.shards * (24 + spec.data.window // 4)


def offer_bytes(spec: JobSpec) -> int:
    """About what the groups that one controller may hold at once take in its offer: k + 1 quotas at staleness k."""
    return seal_bytes(spec) * (spec.rollout.staleness + 1)


def seal_bytes(spec: JobSpec) -> int:
    """What the groups of a whole step take in its record, generously."""
    group = GROUP_BYTES + max(len(source.name) + _parts_bytes(source.reward) for source in training_sources(spec))
    sample = SAMPLE_BYTES + (0 if spec.environment is None else OBSERVED_BYTES)
    return spec.flow.groups_per_step * (group + sample * spec.flow.samples_per_prompt)


def _parts_bytes(reward: RewardSpec) -> int:
    """What the parts of a group's reward take; of what they are themselves made of there is no telling."""
    return sum(len(part.shown_as) + PART_BYTES for part in reward.parts) or 2 * PART_BYTES


def last_position(rules: StreamRules, shard: int) -> int | None:
    """The first position of `shard` that is never issued; None if there is none."""
    return None if rules.epochs is None else rules.epochs * rules.shape.lengths[shard]


def prompts_left(rules: StreamRules, head: Head) -> int | None:
    """Prompts of the job's epochs without an outcome; None for a job that goes by steps."""
    if rules.epochs is None:
        return None
    return rules.epochs * sum(rules.shape.lengths) - head.cursors.terminal_count


def is_over(rules: StreamRules, head: Head) -> bool:
    """Whether there is no step after head's."""
    if rules.steps is not None:
        return head.step >= rules.steps
    return prompts_left(rules, head) == 0


def is_last(rules: StreamRules, head: Head, groups: Sized, outcomes: Sized) -> bool:
    """Whether no step follows the one after head's, if it takes `groups` and `outcomes`."""
    if rules.steps is not None:
        return head.step + 1 >= rules.steps
    return prompts_left(rules, head) == len(groups) + len(outcomes)


def planned_steps(rules: StreamRules, head: Head) -> int | None:
    """How many steps the job will have had: known, or estimated from what a kept group has taken lately."""
    if rules.steps is not None:
        return rules.steps
    left = prompts_left(rules, head)
    return None if left is None else head.step + math.ceil(left / (rules.quota * head.tally.issue_ratio))


def issue_ratio(rules: StreamRules, head: Head) -> float:
    """Prompts issued at once for each group that is still wanted."""
    return min(rules.issue_cap, max(1.0, head.tally.issue_ratio))


MOST_OUTCOMES = 512
"""Outcomes that one seal or one account entry takes, at most: with their reasons they stay well under 1.5 MiB."""


def sealed_refs(seals: Collection[Seal]) -> frozenset[PromptRef]:
    """Every ref that an open seal holds."""
    return frozenset(ref for seal in seals for ref in (*(g.ref for g in seal.groups), *(o.ref for o in seal.outcomes)))


def begun_groups(head: Head, seals: Collection[Seal]) -> tuple[SealedGroup, ...]:
    """The groups of the next step that parts of it hold, READY or not, while its batch is not closed: they count for its quota."""
    slots = (seal.groups for seal in seals if seal.step == head.step + 1 and seal.collects)
    return next(slots, ())


def refs_in_order(rules: StreamRules, head: Head, seals: Collection[Seal]) -> Iterator[PromptRef]:
    """The refs that are neither terminal nor sealed, in the order (position, shard), to the ends of windows and epochs."""
    sealed = sealed_refs(seals)
    cursors = head.cursors.shards
    ends = [cursor.low_water + rules.window for cursor in cursors]
    for shard in range(len(cursors)):
        last = last_position(rules, shard)
        ends[shard] = ends[shard] if last is None else min(ends[shard], last)
    position, end = min(cursor.low_water for cursor in cursors), max(ends)
    while position < end:
        for shard, cursor in enumerate(cursors):
            if position >= ends[shard] or cursor.is_terminal(position):
                continue
            ref = rules.shape.ref(shard, position)
            if ref not in sealed:
                yield ref
        position += 1


class CachedOrder(Iterable[PromptRef]):
    """What `refs_in_order` gives, for who walks it more than once: each ref is worked out when it is first come to."""

    def __init__(self, rules: StreamRules, head: Head, seals: Collection[Seal]) -> None:
        self._walk = refs_in_order(rules, head, seals)
        self._found: list[PromptRef] = []

    def __iter__(self) -> Iterator[PromptRef]:
        found = self._found
        for place in itertools.count():
            if place == len(found):
                ref = next(self._walk, None)
                if ref is None:
                    return
                found.append(ref)
            yield found[place]


@dataclass(frozen=True, slots=True)
class OffersView:
    """Live offers, seen ref by ref."""

    groups: Mapping[PromptRef, SealedGroup]
    outcomes: Mapping[PromptRef, EndedRef]
    in_flight: Mapping[PromptRef, Version] = field(default_factory=dict)
    """What goes on from step to step and was not offered yet, with the oldest weights it was begun with."""

    @classmethod
    def of(cls, rules: StreamRules, head: Head, offer: Offer) -> OffersView:
        """One live offer; what is not acceptable for the step is left out. Of two groups of one ref the first counts."""
        step = head.step + 1
        fits: dict[tuple[Version, ...], bool] = {}
        """By versions, of which many groups have few."""
        groups: dict[PromptRef, SealedGroup] = {}
        for group in reversed(offer.groups):
            if group.versions not in fits:
                fits[group.versions] = is_acceptable(head, step, group.versions, rules.staleness)
            if fits[group.versions]:
                groups[group.ref] = sealed_group(group, offer.incarnation)
        # Outcomes need ancestry, no staleness bound; a prompt that failed before it was generated has no version.
        outcomes = {
            one.ref: one
            for one in reversed(offer.outcomes)
            if all(is_ancestor(head, version) for version in one.versions)
        }
        in_flight = {
            one.ref: one.version
            for one in offer.in_flight
            if is_acceptable(head, step, (one.version,), rules.staleness)
        }
        return cls(groups, outcomes, in_flight)

    @classmethod
    def collect(
        cls,
        rules: StreamRules,
        head: Head,
        offers: Iterable[Offer],
        part: Callable[[StreamRules, Head, Offer], OffersView] | None = None,
    ) -> OffersView:
        """Join the offers. Of two holders of one ref the smaller incarnation counts; a group beats an outcome.

        `part`: `OffersView.of`, or what remembers its results.
        """
        ordered = sorted(offers, key=lambda offer: offer.incarnation)
        parts = [(part or OffersView.of)(rules, head, offer) for offer in ordered]
        groups: dict[PromptRef, SealedGroup] = {}
        outcomes: dict[PromptRef, EndedRef] = {}
        in_flight: dict[PromptRef, Version] = {}
        for one in reversed(parts):  # the first counts, so it comes last
            groups.update(one.groups)
            outcomes.update(one.outcomes)
            for ref, version in one.in_flight.items():
                in_flight[ref] = min(version, in_flight.get(ref, version))
        outcomes = {ref: ended for ref, ended in outcomes.items() if ref not in groups}
        going_on = {ref: version for ref, version in in_flight.items() if ref not in groups and ref not in outcomes}
        return cls(groups, outcomes, going_on)


def sealed_group(group: OfferedGroup, holder: str) -> SealedGroup:
    """The offered group as a seal names it."""
    return SealedGroup.model_construct(**group.__dict__, holder=holder)


def due_refs(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    ahead: int = 0,
    order: Iterable[PromptRef] | None = None,
) -> tuple[PromptRef, ...]:
    """The refs that must still be produced for the next seal, oldest first.

    Walks the order until quota (+ `ahead`) groups are there or may be expected: a ref that nobody has offered is due, and
    counts for as much of a group as recent prompts came to. Everything that `choose_seal` waits for is among them. No walk is
    longer than the prompts that the step may still use up. `order`: what `refs_in_order` gives, if it is `CachedOrder` already.
    """
    wanted: list[PromptRef] = []
    ratio = issue_ratio(rules, head)
    kept = len(begun_groups(head, seals))
    room = None if rules.limit is None else rules.limit + ahead - head.tally.since_step.ended - kept
    for walked, ref in enumerate(refs_in_order(rules, head, seals) if order is None else order):
        if kept + len(wanted) / ratio >= rules.quota + ahead or (room is not None and walked >= room):
            break
        if ref in offered.groups:
            kept += 1
        elif ref not in offered.outcomes:
            wanted.append(ref)
    return tuple(wanted)


@dataclass(frozen=True, slots=True)
class SealStep:
    """The quota is met, or this is what there is. `padding`: groups that lack and count in the denominators all the same.

    `last`: no step follows. `planned`: how many steps the job will have had, as far as it is known (`planned_steps`).
    """

    groups: tuple[SealedGroup, ...]
    outcomes: tuple[EndedRef, ...]
    padding: int = 0
    last: bool = False
    planned: int | None = None


@dataclass(frozen=True, slots=True)
class SealPart:
    """So many groups of the next step are certain. `groups`: those of the parts before, then the new part's."""

    groups: tuple[SealedGroup, ...]

    outcomes: tuple[EndedRef, ...] = ()
    """None: they go into the whole seal, like all that is said of the whole."""
    padding: int = 0
    last: bool = False
    planned: int | None = None


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Outcomes must be written down first: the windows are exhausted and move on by it, or there are very many."""

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class AwaitGroups:
    """The seal waits for `oldest` and `missing - 1` others."""

    oldest: PromptRef
    missing: int


@dataclass(frozen=True, slots=True)
class DataExhausted:
    """The step has used up its prompts without its quota, and the job is to fail, or cannot but fail: with no group at all.

    `outcomes`: those of its prompts that have not been written down. `exhausted`: it is not the limit that was reached, the
    windows have no more prompts.
    """

    groups: int
    outcomes: tuple[EndedRef, ...]
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class AvailableGroups:
    """What there is for the next seal. `limited`: the step has used up its prompts, without having met its quota."""

    groups: tuple[SealedGroup, ...]
    outcomes: tuple[EndedRef, ...]
    missing: tuple[PromptRef, ...]
    limited: bool = False


Choice = SealStep | CloseStep | AwaitGroups | DataExhausted


def choose_seal(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> Choice:
    """What to seal next: the first groups of the order, as many as the quota, once nothing before the last is missing.

    `order`: what `refs_in_order` gives, if it is `CachedOrder` already.
    """
    return conclude_choice(rules, head, find_groups(rules, head, seals, offered, order=order))


def find_groups(
    rules: StreamRules,
    head: Head,
    seals: Collection[Seal],
    offered: OffersView,
    *,
    order: Iterable[PromptRef] | None = None,
) -> AvailableGroups:
    """What of the next step's batch is there, in the order, and what is missing: what parts hold already comes first.

    All groups that it gives are certain to be in the batch. Before each are fewer refs than the quota that are kept or may
    be; each that ends without a group only makes more room (`gcore.ledger.balance`).
    """
    groups: list[SealedGroup] = list(begun_groups(head, seals))
    outcomes: list[EndedRef] = []
    missing: list[PromptRef] = []
    room = None if rules.limit is None else rules.limit - head.tally.since_step.ended - len(groups)
    limited = False
    last = max((_place(rules, group.ref) for group in groups), default=(-1, -1))
    for walked, ref in enumerate(refs_in_order(rules, head, seals) if order is None else order):
        if len(groups) + len(missing) >= rules.quota:
            # What ended before a group that a part holds is this step's, too; anything else there came too late.
            if _place(rules, ref) > last:
                break
            if ref in offered.outcomes:
                outcomes.append(offered.outcomes[ref])
            continue
        if room is not None and walked >= room:
            limited = True
            break
        if ref in offered.groups:
            groups.append(offered.groups[ref])
        elif ref in offered.outcomes:
            outcomes.append(offered.outcomes[ref])
        else:
            missing.append(ref)
    return AvailableGroups(tuple(groups), tuple(outcomes), tuple(missing), limited)


def _place(rules: StreamRules, ref: PromptRef) -> tuple[int, int]:
    """Where a ref stands in the order."""
    return rules.shape.position(ref), ref.shard


def conclude_choice(rules: StreamRules, head: Head, found: AvailableGroups) -> Choice:
    """What follows from what was found, at any staleness.

    Exhausted means: every ref in every shard's window is terminal, sealed or offered. Then a full quota cannot come, and
    waiting for it would be for ever: first the outcomes are accounted for; when there are none, it is as if the step had
    come to its limit. Outcomes do not wait for a quota once there are `MOST_OUTCOMES`: neither a seal nor the
    offers that name them have room for as many as the windows hold. Nor once there are as many as an epoch has prompts:
    it is to be seen soon that the data bring nothing.

    What remains of the job's last epoch makes the last step, which may be smaller, and is empty if all of it was filtered:
    a step there must be, for the last checkpoint is written in one. A job of which nothing was ever trained has none.
    """
    ends = rules.epochs is not None and prompts_left(rules, head) == len(found.groups) + len(found.outcomes)
    closes = ends and not found.groups and head.step > 0
    room = min(MOST_OUTCOMES, sum(rules.shape.lengths))
    if len(found.outcomes) >= room and not (closes and len(found.outcomes) == room):
        return CloseStep(found.outcomes[:room])
    if found.missing:
        return AwaitGroups(found.missing[0], len(found.missing))
    full = len(found.groups) >= rules.quota
    if full or (ends and (found.groups or closes)):
        return _sealed(rules, head, found)
    if found.outcomes and not found.limited:
        return CloseStep(found.outcomes)
    if (found.limited and not found.groups) or (found.groups and rules.on_limit == "fail"):
        return DataExhausted(len(found.groups), found.outcomes, exhausted=not found.limited)
    return _sealed(rules, head, found, padded=rules.on_limit == "pad_masked")


def _sealed(rules: StreamRules, head: Head, found: AvailableGroups, *, padded: bool = False) -> SealStep:
    last = is_last(rules, head, found.groups, found.outcomes)
    return SealStep(
        groups=found.groups,
        outcomes=found.outcomes,
        padding=rules.quota - len(found.groups) if padded else 0,
        last=last,
        planned=head.step + 1 if last else planned_steps(rules, head),
    )


def refuse_seal(rules: StreamRules, head: Head, seals: Collection[Seal], seal: SealStep | SealPart) -> str | None:
    """Why this must not be sealed, or None. Ref by ref: not terminal, in no open seal, once within the seal; and what ranks may
    have begun to train stands first in it."""
    kept = begun_groups(head, seals)
    if seal.groups[: len(kept)] != kept:
        return "it is without groups that every rank holds for good"
    seen = set(sealed_refs(seals)) - {group.ref for group in kept}
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
    return None if seal.groups or (seal.last and seal.outcomes) else "there is no group in it"
