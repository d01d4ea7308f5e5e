"""Selection of groups for a step: which refs to sample next, what a seal takes, which versions are acceptable.

A ref names one prompt in one data epoch. A group is all samples of one prompt. A seal is the record that fixes which
groups form a step. Refs are ordered by (position, shard). At staleness 0 a seal takes groups in this order and waits
for them. Taking groups in the order in which they finish would bias training towards short responses. The refs to
sample are recomputed on every call: those without an outcome at head, in no open seal, and within the window of their
shard. There is no stored "next" pointer that could be lost.

If prompts are filtered, more prompts are sampled at once than groups are needed. Their ratio is the recent number of
prompts per trained group (`issue_ratio`), because each filtered prompt would otherwise cost another round of
generation. At staleness 0 surplus groups are wasted. A step uses a bounded number of prompts; `flow.on_limit` defines
what happens at the limit, or when the windows are exhausted.

A job runs to a step, or through complete data epochs. In the second case the number of steps is an estimate, the last
step is known when it is sealed, and nothing beyond the epochs is sampled. All rules depend only on the chain (the log
entries up to head), so every controller computes the same result and a rollback undoes everything. A version includes
its lineage, because the same step on a discarded branch has other weights.
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
    """Return whether `version` is on head's chain, and not on a branch that a rollback discarded.

    It is if its lineage is one of head's and no later lineage starts below it: `step <= base_step` for every later
    lineage. A lineage that head does not list was lost when the store was restored from a backup.
    """
    if version.step > head.step or all(one.number != version.lineage for one in head.lineages):
        return False
    return all(version.step <= later.base_step for later in head.lineages if later.number > version.lineage)


def is_fresh(step: int, versions: Iterable[Version], staleness: int) -> bool:
    """Return whether tokens of these versions may be trained at `step`: `(step - 1) - oldest step <= staleness`."""
    return step - 1 - min(version.step for version in versions) <= staleness


def is_acceptable(head: Head, step: int, versions: tuple[Version, ...], staleness: int) -> bool:
    """Return whether a group may be trained at `step` after `head`: its `versions` are on head's chain and not too old.

    False without versions.
    """
    return (
        bool(versions)
        and all(is_ancestor(head, version) for version in versions)
        and is_fresh(step, versions, staleness)
    )


def resumable_checkpoints(head: Head, checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Checkpoints on head's chain, newest first. A new train world may start from them."""
    on_chain = [c for c in checkpoints if is_ancestor(head, c.version)]
    return tuple(sorted(on_chain, key=lambda c: (c.step, c.lineage), reverse=True))


MOST_BYTES = 1 << 20
"""Maximum size of a seal or an offer, well below the store's limit of 1.5 MiB per request."""

GROUP_BYTES, SAMPLE_BYTES, PART_BYTES = 260, 11, 32
"""Upper estimates of encoded sizes in bytes: of a group without its source's name, of a sample, and of a part of the
group's reward without its name.
"""

OBSERVED_BYTES = 7
"""Upper estimate, in bytes, of the encoded number of observed tokens of a sample; for jobs with an environment."""


@dataclass(frozen=True, slots=True)
class StreamRules:
    """Settings of a job that determine which groups form its steps.

    `shape`: lengths of the shards of the prompt stream. `window`: how many positions sampling may run ahead of a
    shard's oldest unfinished prompt. `quota`: groups per step. `staleness`: maximum age in steps of the weights that
    generated a trained token. `on_limit`: what to do with a step that used up its prompts.
    """

    shape: StreamShape
    window: int
    quota: int
    staleness: int = 0
    steps: int | None = None
    """Number of the last step, if it is known from the beginning."""
    epochs: int | None = None
    """Number of data epochs; None: the job ends at its last step."""
    issue_cap: float = 1.0
    """Maximum of `issue_ratio`: prompts that are sampled at once per missing group."""
    limit: int | None = None
    """Maximum number of prompts that one step may use."""
    on_limit: OnLimit = "train_smaller"
    part: int | None = None
    """Minimum number of groups in a part of a streamed step; None: steps are sealed as a whole."""
    over_provision: float | None = None
    """Maximum number of prompts offered or in flight at once, in multiples of `quota`; None: `staleness` + 1."""

    @property
    def quotas(self) -> float:
        """How many steps' worth of groups may be offered or in flight at once: at most `staleness` + 1."""
        return self.staleness + 1 if self.over_provision is None else min(self.over_provision, self.staleness + 1)


def rules_of(job: JobRecord) -> StreamRules:
    """Build the rules from a job's record. They change only if the goal is raised after the job's end."""
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
        # One controller may hold all sampled groups, and its offer must fit into one record.
        issue_cap=max(1.0, min(flow.issue_cap, MOST_BYTES / offer_bytes(spec))),
        limit=flow.prompt_limit,
        on_limit=flow.on_limit,
        part=spec.train.part_of(flow.groups_per_step),
        over_provision=spec.rollout.over_provision,
    )


def cursor_bytes(spec: JobSpec) -> int:
    """Maximum size in bytes of the cursors in head and log entries: per shard, one bit per position of its window."""
    return spec.data.shards * (24 + spec.data.window // 4)


def offer_bytes(spec: JobSpec) -> int:
    """Estimated size in bytes of one controller's offer, if it holds the groups of all k + 1 steps at staleness k."""
    return seal_bytes(spec) * (spec.rollout.staleness + 1)


def seal_bytes(spec: JobSpec) -> int:
    """Upper estimate of the size in bytes of a complete step's groups in the seal."""
    group = GROUP_BYTES + max(len(source.name) + _parts_bytes(source.reward) for source in training_sources(spec))
    sample = SAMPLE_BYTES + (0 if spec.environment is None else OBSERVED_BYTES)
    return spec.flow.groups_per_step * (group + sample * spec.flow.samples_per_prompt)


def _parts_bytes(reward: RewardSpec) -> int:
    """Estimated size in bytes of the values of a group's reward parts, without nested parts."""
    return sum(len(part.shown_as) + PART_BYTES for part in reward.parts) or 2 * PART_BYTES


def last_position(rules: StreamRules, shard: int) -> int | None:
    """The position at which `shard` ends: the first beyond the job's data epochs; None if the job counts steps."""
    return None if rules.epochs is None else rules.epochs * rules.shape.lengths[shard]


def prompts_left(rules: StreamRules, head: Head) -> int | None:
    """Number of prompts of the job's data epochs that have no outcome yet; None for a job that counts steps."""
    if rules.epochs is None:
        return None
    return rules.epochs * sum(rules.shape.lengths) - head.cursors.terminal_count


def is_over(rules: StreamRules, head: Head) -> bool:
    """Return whether the job has reached its goal: head is at the last step, or no prompt of its epochs is left."""
    if rules.steps is not None:
        return head.step >= rules.steps
    return prompts_left(rules, head) == 0


def is_last(rules: StreamRules, head: Head, groups: Sized, outcomes: Sized) -> bool:
    """Return whether the step after head's is the job's last, if it takes `groups` and records `outcomes`."""
    if rules.steps is not None:
        return head.step + 1 >= rules.steps
    return prompts_left(rules, head) == len(groups) + len(outcomes)


def planned_steps(rules: StreamRules, head: Head) -> int | None:
    """Total number of steps of the job: as configured, or estimated from the prompts left and the recent prompts per
    trained group. None if the job has no end.
    """
    if rules.steps is not None:
        return rules.steps
    left = prompts_left(rules, head)
    return None if left is None else head.step + math.ceil(left / (rules.quota * head.tally.issue_ratio))


def issue_ratio(rules: StreamRules, head: Head) -> float:
    """Number of prompts to sample per missing group: the recent mean, between 1 and `rules.issue_cap`."""
    return min(rules.issue_cap, max(1.0, head.tally.issue_ratio))


MOST_OUTCOMES = 512
"""Maximum number of outcomes in one seal or account entry. With their reasons they stay well below 1.5 MiB."""


def sealed_refs(seals: Collection[Seal]) -> frozenset[PromptRef]:
    """All refs that open seals contain, as groups or as outcomes."""
    return frozenset(ref for seal in seals for ref in (*(g.ref for g in seal.groups), *(o.ref for o in seal.outcomes)))


def begun_groups(head: Head, seals: Collection[Seal]) -> tuple[SealedGroup, ...]:
    """Groups in the sealed parts of the next step, while its batch is still incomplete (streamed steps only).

    They count for its quota. Includes a part that is not READY yet.
    """
    slots = (seal.groups for seal in seals if seal.step == head.step + 1 and seal.collects)
    return next(slots, ())


def refs_in_order(rules: StreamRules, head: Head, seals: Collection[Seal]) -> Iterator[PromptRef]:
    """Yield the refs that have no outcome and are in no open seal, ordered by (position, shard).

    Ends where every shard's window, or the last data epoch, ends.
    """
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
    """The result of `refs_in_order`, computed lazily and cached, so that several functions can iterate over it."""

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
    """What controllers offer for the next step, by ref; without content that is too old or of a discarded branch."""

    groups: Mapping[PromptRef, SealedGroup]
    outcomes: Mapping[PromptRef, EndedRef]
    in_flight: Mapping[PromptRef, Version] = field(default_factory=dict)
    """Unfinished refs whose generation continues across steps, with the oldest version that generated a part of them.
    Empty at staleness 0.
    """

    @classmethod
    def of(cls, rules: StreamRules, head: Head, offer: Offer) -> OffersView:
        """Keep what the step after `head` may use of one offer. Of two groups with the same ref the first counts."""
        step = head.step + 1
        fits: dict[tuple[Version, ...], bool] = {}
        """Cache by versions: many groups have the same few."""
        groups: dict[PromptRef, SealedGroup] = {}
        for group in reversed(offer.groups):
            if group.versions not in fits:
                fits[group.versions] = is_acceptable(head, step, group.versions, rules.staleness)
            if fits[group.versions]:
                groups[group.ref] = sealed_group(group, offer.incarnation)
        # Outcomes need ancestry but no staleness bound. A prompt that failed before generation has no version.
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
        """Merge the acceptable content of all `offers`.

        For a ref that two controllers offer, the one with the smaller incarnation counts. A group takes precedence over
        an outcome. `part`: replaces `OffersView.of`, for example with a function that caches its results.
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
    """Convert an offered group to a sealed one. `holder`: incarnation of the controller that holds the samples."""
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
    """Refs to sample for the next seal, oldest first. For staleness 0.

    Walks the order until quota + `ahead` groups exist or are expected. A ref that no controller offers is due; it
    counts as 1 / `issue_ratio` of a group. The result contains every ref that `choose_seal` waits for. The walk is
    bounded by the number of prompts that the step may still use. `order`: the result of `refs_in_order` for these
    arguments, for example a `CachedOrder`; None: computed here.
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
    """Decision: seal a complete step with these groups, and record these outcomes with its commit.

    `padding`: number of missing groups that still count in the loss denominators. `last`: no step follows. `planned`:
    total number of steps of the job, if known (`planned_steps`).
    """

    groups: tuple[SealedGroup, ...]
    outcomes: tuple[EndedRef, ...]
    padding: int = 0
    last: bool = False
    planned: int | None = None


@dataclass(frozen=True, slots=True)
class SealPart:
    """Decision: seal one more part of a streamed step. `groups`: those of earlier parts, then those of the new part."""

    groups: tuple[SealedGroup, ...]

    outcomes: tuple[EndedRef, ...] = ()
    """Like the fields below, never set: only the seal of the complete step has these values."""
    padding: int = 0
    last: bool = False
    planned: int | None = None


@dataclass(frozen=True, slots=True)
class CloseStep:
    """Decision: record `outcomes` in an account entry, without a training step.

    Needed when the windows are exhausted and must advance, or when there are many outcomes (`conclude_choice`).
    """

    outcomes: tuple[EndedRef, ...]


@dataclass(frozen=True, slots=True)
class AwaitGroups:
    """Decision: do not seal yet. The step waits for the ref `oldest` and for `missing - 1` others."""

    oldest: PromptRef
    missing: int


@dataclass(frozen=True, slots=True)
class DataExhausted:
    """Decision: fail the job, because the step used up its prompts without reaching its quota.

    This happens with `flow.on_limit: fail`, or if the step has no group at all. `groups`: number of groups that it has.
    `outcomes`: those of its filtered and failed prompts that no log entry records yet. `exhausted`: whether the windows
    ran out of prompts before the step's limit was reached.
    """

    groups: int
    outcomes: tuple[EndedRef, ...]
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class AvailableGroups:
    """Groups and outcomes that are available for the next seal.

    `missing`: refs that the seal waits for, oldest first. `limited`: whether the step has used up its prompts without
    reaching its quota.
    """

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
    """Choose what to seal next at staleness 0: the first groups in order up to the quota, once none before is missing.

    `order`: as in `due_refs`.
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
    """Walk the order and collect the next step's groups and outcomes, and the refs that are missing.

    Groups in sealed parts come first. All returned groups are certain to be in the batch (`gcore.ledger.balance`):
    fewer refs than the quota precede each group, and a preceding ref that ends without a group only makes room.
    `order`: as in `due_refs`.
    """
    groups: list[SealedGroup] = list(begun_groups(head, seals))
    outcomes: list[EndedRef] = []
    missing: list[PromptRef] = []
    room = None if rules.limit is None else rules.limit - head.tally.since_step.ended - len(groups)
    limited = False
    last = max((_place(rules, group.ref) for group in groups), default=(-1, -1))
    for walked, ref in enumerate(refs_in_order(rules, head, seals) if order is None else order):
        if len(groups) + len(missing) >= rules.quota:
            # Outcomes before a group in a sealed part belong to this step too; other refs there are too late for it.
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
    """Sort key of a ref in the order of sampling: (position, shard)."""
    return rules.shape.position(ref), ref.shard


def conclude_choice(rules: StreamRules, head: Head, found: AvailableGroups) -> Choice:
    """Decide what to seal from the available groups, at any staleness.

    The windows are exhausted if every ref in every shard's window is ended, sealed or offered. Then the quota cannot be
    reached. Outcomes are recorded first, so that the windows advance; without outcomes the step is treated as if it had
    reached its limit. Outcomes are also recorded when there are `MOST_OUTCOMES`, because a seal and the offers cannot
    hold more, or as many as an epoch has prompts, so that useless data are reported early.

    The last step of a job that runs through epochs takes what is left of the last epoch. It may be smaller than the
    quota, and it is empty if all of its prompts were filtered: a step is needed, because the last checkpoint is written
    in a step. A job that never trained a group has no such step.
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
    """Return the reason why the step after head's must not be sealed with `seal`, or None if it may be.

    Every ref must have no outcome, be in no open seal, and occur once in `seal`; every group must be fresh enough.
    Groups of READY parts, which ranks may already train, must come first.
    """
    kept = begun_groups(head, seals)
    if seal.groups[: len(kept)] != kept:
        return "groups of its READY parts are missing"
    seen = set(sealed_refs(seals)) - {group.ref for group in kept}
    for ref in (*(g.ref for g in seal.groups), *(o.ref for o in seal.outcomes)):
        if head.cursors.is_terminal(rules.shape, ref):
            return f"prompt {ref} already has an outcome"
        if ref in seen:
            return f"prompt {ref} is already sealed"
        seen.add(ref)
    for group in seal.groups:
        if not is_acceptable(head, head.step + 1, group.versions, rules.staleness):
            versions = ", ".join(map(str, group.versions))
            return f"prompt {group.ref} was generated by {versions}: too old or discarded"
    return None if seal.groups or (seal.last and seal.outcomes) else "it has no groups"
