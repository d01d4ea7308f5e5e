"""The rules of a step, in its order: offer, seal, exchange, train, commit, publish. Then stale prompts, and the parts of an evaluation.

Offer: each write wakes every peer, and a seal can come only when the offers hold its quota. A peer therefore writes its offer when it has
its share (an n-th) of what the cluster still lacks, and when its own part is done. Less than a share waits a while, since others issue more
for refs that ended without a group, and people look at the progress of the step.

Staleness: where some is allowed, an offer also names the prompts in flight, at most a little after they were begun: other peers count them
and wait for those that would become too old. A prompt that a seal waits for because of its age is given up after a while and issued again;
after too many tries it has failed. At staleness 0 none of this applies.

Evaluation: the members that have engines are ordered by the version, and parts go to them in turn. If the owner of a part delivers nothing
for a while, the next member takes its parts over, from the end, since the owner goes from the beginning. If a member leaves, the order
changes at once. Two answers to one part do no harm: the first that is written counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from controllers.rules.actions import (
    AccumulateParts,
    CommitStep,
    FeedRank,
    GiveUpBatch,
    GiveUpPrompt,
    Intent,
    MakeSeal,
    MarkBatchReady,
    PublishWeights,
    PutOffer,
    RecordOutcomes,
    SetPhase,
    TrainBatch,
)
from controllers.rules.memory import sleeping_engines, train_delay_s
from controllers.rules.placement import awaits_checkpoint, wants_checkpoint
from controllers.rules.replication import gather_receipts, has_receipts, keeps_copies
from controllers.rules.view import SETTLE_S, JobView, turn_order
from controllers.rules.world import growth_delay_s
from gcore.ledger.records.chain import Head, InFlightRef, Member, Offer, Seal, SealState
from gcore.ledger.records.job import JobPhase, Plan
from gcore.ledger.selection import (
    MOST_OUTCOMES,
    AwaitGroups,
    CloseStep,
    DataExhausted,
    SealStep,
    is_ancestor,
    refuse_seal,
)
from gcore.ledger.staleness import steps_left
from gcore.ledger.statistics import shortage_reason
from gcore.ledger.transactions import Versioned
from gcore.types import PromptRef, Version

COALESCE_S = 0.3
"""A share of what lacks waits so long for more."""

OUTCOME_S = 1.0
"""Less than a share waits so long if there are outcomes in it,"""

GROUPS_S = 3.0
"""and so long if there are none."""

EVALUATION_PATIENCE_S = 900.0
"""A batch of carried groups waits so long for the evaluation of the weights before it, or for another part of that evaluation. A flow
may never ask for it."""

EXCHANGE_LIMIT_S = 60.0
"""A sealed batch of which nothing arrives for so long is given up."""

STRANDED_PATIENCE_S = 10.0
"""A prompt in flight on a node without engines may have all its responses and only wait for its reward: it gets so long to end."""

TAKEOVER_S = 20.0
"""The next peer takes a part when its owner has delivered nothing for so long. The peer after it takes the part when both have
delivered nothing for twice as long, and so on."""


def offer_groups(view: JobView) -> Iterator[Intent]:
    """What this peer holds and has not offered, once its part is complete, or a little later.

    An offer that names what is terminal by now does no harm: whoever seals checks it. One that names what this peer has
    dropped and what could be sealed again (after a rollback it may be fresh once more) must go, or it would be sealed and
    given up for ever. Of outcomes only so many as one entry takes: the others follow when those are written down.
    """
    stored = view.mirror.offers.get(view.me)
    sources = (view.me, view.holdings, view.outcomes, view.in_flight, stored, view.mirror.seals, view.mirror.head)
    change = view.remembered.get(
        "offer change", sources, lambda: _offer_change(view, stored.record if stored else None)
    )
    if change is not None:
        if change.void or not view.busy:
            after = 0.0
        else:
            after = COALESCE_S if change.misnamed else offer_delay_s(view, change.groups, change.outcomes)
        yield Intent(PutOffer(change.offer), "offer", after=after)


@dataclass(frozen=True, slots=True)
class _OfferChange:
    """The next offer, and how many groups and outcomes of it the stored offer lacks.

    `void`: the stored one names a group that is no longer held; `misnamed`: it is wrong about what is in flight.
    """

    offer: Offer
    groups: int
    outcomes: int
    void: bool
    misnamed: bool


def _offer_change(view: JobView, stored: Offer | None) -> _OfferChange | None:
    head = view.head
    ended = dict(sorted(view.outcomes.items(), key=lambda item: stream_position(view, item[0]))[:MOST_OUTCOMES])
    named = {g.digest: g.ref for g in stored.groups} if stored else {}
    # By their versions too: an outcome of a cut-off lineage does not stand for the one that came after it.
    named_outcomes = {(o.ref, o.versions) for o in stored.outcomes} if stored else set()
    groups = sum(g.digest not in named for g in view.unsealed)
    outcomes = len({(ref, outcome.versions) for ref, outcome in ended.items()} - named_outcomes)
    held = {group.digest for group in view.holdings.values()}
    dropped = [ref for digest, ref in named.items() if digest not in held]
    void = any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in dropped)
    misnamed = is_offer_outdated(view, head, stored)
    if not (groups or outcomes or void or misnamed):
        return None
    # Groups in a seal stay in the offer: if the seal is given up, they are there for the next.
    offer = Offer(
        incarnation=view.me,
        groups=tuple(view.holdings[ref] for ref in sorted(view.holdings)),
        outcomes=tuple(ended[ref] for ref in sorted(ended)),
        in_flight=in_flight_refs(view),
    )
    return _OfferChange(offer, groups, outcomes, void, misnamed)


def in_flight_refs(view: JobView) -> tuple[InFlightRef, ...]:
    """The prompts in flight that this peer's offer names."""
    if not view.rules.staleness:
        return ()
    return tuple(InFlightRef(ref=ref, version=version) for ref, version in sorted(view.in_flight.items()))


def is_offer_outdated(view: JobView, head: Head, stored: Offer | None) -> bool:
    """Whether the stored offer lacks what is in flight, or has what no longer is.

    What is not named when head moves could be passed over by a seal that it should have been waited for.
    """
    if not view.rules.staleness:
        return False
    named = {one.ref: one.version for one in stored.in_flight} if stored else {}
    if any(named.get(ref) != version for ref, version in view.in_flight.items()):
        return True
    ended = named.keys() - view.in_flight.keys() - view.holdings.keys() - view.outcomes.keys()
    return any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in ended)


def stream_position(view: JobView, ref: PromptRef) -> tuple[int, int]:
    """Where `ref` comes in the order (position, shard)."""
    return view.rules.shape.position(ref), ref.shard


def offer_delay_s(view: JobView, groups: int, outcomes: int) -> float:
    """Seconds that an offer waits which would tell of so many groups and outcomes, while this peer has more to come."""
    chosen = view.chosen
    lacking = chosen.missing if isinstance(chosen, AwaitGroups) else 0
    if view.rules.part is not None:  # as much as makes a part is worth a write
        lacking = min(lacking, view.rules.part)
    if groups + outcomes >= lacking / max(1, len(view.mirror.members)):
        return COALESCE_S
    return OUTCOME_S if outcomes else GROUPS_S


def seal_batch(view: JobView) -> Iterator[Intent]:
    """The batch is closed as soon as the offers hold its quota; a part of it, when enough of it is certain."""
    head = view.head
    slot = view.seal
    if view.is_over or (slot is not None and slot.state is not SealState.OPEN) or awaits_checkpoint(view):
        return
    seals = [stored.record for stored in view.mirror.seals.values()]
    chosen = view.chosen
    topic = f"seal {head.seq} {slot.attempt if slot else 0}"
    if isinstance(chosen, SealStep) and refuse_seal(view.rules, head, seals, chosen) is None:
        owed = owes_evaluation(view)
        # Named by the evaluation's parts while it is waited for: each that comes begins the wait anew.
        waits = f"{topic} evaluated {len(view.mirror.eval_parts_of(head.version))}" if owed else topic
        yield Intent(
            MakeSeal(head.step + 1, chosen, wants_checkpoint(view)),
            waits,
            view.turn(topic),
            after=EVALUATION_PATIENCE_S if owed else 0.0,
        )
    elif view.part is not None and refuse_seal(view.rules, head, seals, view.part) is None:
        yield Intent(MakeSeal(head.step + 1, view.part), f"part of {topic}", view.turn(topic))
    elif isinstance(chosen, CloseStep):
        yield Intent(RecordOutcomes(chosen.outcomes), f"account {head.seq}", view.turn(topic))
    elif isinstance(chosen, DataExhausted):
        why = shortage_reason(view.rules, head, chosen, view.log.values())
        yield Intent(SetPhase(JobPhase.FAILED, why, at_head=True), f"short {head.seq}", view.turn(topic))


def owes_evaluation(view: JobView) -> bool:
    """Whether head's weights are still to be evaluated. What is carried could close the next batch before they are."""
    head = view.head
    if not view.rules.staleness or not view.is_evaluated_after(head.step, last=False):
        return False
    return str(head.version) not in view.mirror.evaluations


def exchange_batch(view: JobView) -> Iterator[Intent]:
    """A SEALED batch, or a part of one, goes to the ranks; what cannot be delivered is given up."""
    seal = view.seal
    if seal is None or seal.state not in (SealState.SEALED, SealState.PARTIAL):
        return
    missing = {rank: view.missing(seal, rank) for rank in range(seal.world_size)}
    topic = f"exchange {seal.token}"
    if not any(missing.values()):
        yield Intent(MarkBatchReady(seal.step), f"ready {seal.token}", view.turn(topic), after=growth_delay_s(view))
        return
    undelivered = {digest for of_rank in missing.values() for digest in of_rank}
    lost = why_groups_lost(view, seal, undelivered)
    if lost:
        yield Intent(GiveUpBatch(seal.step, lost), f"reseal {seal.token}", view.turn(topic), after=SETTLE_S / 2)
    else:
        # Named by how much is missing: whatever arrives begins the wait anew, for a large batch over a slow line gets there.
        left = sum(len(samples) for of_rank in missing.values() for samples in of_rank.values())
        why = f"{len(undelivered)} groups were not delivered, and nothing arrived for {EXCHANGE_LIMIT_S:.0f} s"
        yield Intent(
            GiveUpBatch(seal.step, why), f"overdue {seal.token} {left}", view.turn(topic), after=EXCHANGE_LIMIT_S
        )
    mine = view.held_for(seal)
    for rank, of_rank in missing.items():
        if rank in view.ranks and mine & of_rank.keys() and not lost:
            yield Intent(FeedRank(rank, seal.token), f"feed {rank} {seal.token}")


def why_groups_lost(view: JobView, seal: Seal, undelivered: set[str]) -> str:
    """Why some of the undelivered groups will never come, or nothing."""
    held = {group.digest for group in view.holdings.values()}
    for group in seal.groups:
        if group.digest not in undelivered:
            continue
        if group.holder == view.me and group.digest not in held:
            return f"{view.me} no longer holds the group of prompt {group.ref}"
        if group.holder not in view.mirror.members:
            return f"{group.holder} is gone and with it the group of prompt {group.ref}"
    return ""


def waits_for_others(view: JobView) -> bool:
    """Whether a sealed batch is on its way, none of it from here any more, and others are the first to do what follows.

    Ranks tell every peer of each part that comes; with many peers, looking at each would keep all of them busy that feed.
    """
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.state is not SealState.SEALED:
        return False
    if any(condition.startswith("feed ") for condition in view.under_way):
        return False
    mine = view.held_for(seal)
    if any(mine & view.missing(seal, rank).keys() for rank in range(seal.world_size)):
        return False
    return view.turn(f"ready {seal.token}") > 0 and view.turn(f"exchange {seal.token}") > 0


def train_parts(view: JobView) -> Iterator[Intent]:
    """READY parts of a step are added to its gradients by every rank, while the rest of it is collected and exchanged."""
    seal = view.seal
    if seal is None or not seal.ready_parts or seal.state is SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.rules.world` sees to it
    for rank in range(seal.world_size):
        known = view.ranks.get(rank)
        if known is not None and view.begun(known) < seal.ready_parts:
            topic = f"accumulate {rank} {seal.lineage} {seal.step} {seal.ready_parts}"
            yield Intent(
                AccumulateParts(rank, seal.token), topic, view.turn(f"accumulate {seal.step} {seal.ready_parts}")
            )


def train_step(view: JobView) -> Iterator[Intent]:
    """A READY batch is trained by every rank, then committed."""
    seal = view.seal
    if seal is None or seal.state is not SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.rules.world` sees to it
    behind = [rank for rank in range(seal.world_size) if _applied(view, rank) != seal.token]
    if not behind and not has_receipts(view, seal.token):
        yield from gather_receipts(view, seal.token)
    elif not behind:
        yield Intent(CommitStep(seal.step), f"commit {seal.token}", view.turn(f"commit {seal.token}"))
    for rank in behind:
        if rank in view.ranks:
            topic, mine = f"apply {rank} {seal.token}", view.turn(f"exchange {seal.token}")
            yield Intent(TrainBatch(rank, seal.token), topic, mine, after=train_delay_s(view, rank))


def _applied(view: JobView, rank: int) -> object:
    known = view.ranks.get(rank)
    return known.applied if known else None


def publish_weights(view: JobView) -> Iterator[Intent]:
    """Engines serve what was committed; only after the commit, and only those that are awake.

    One after the other: the end of the one before would let the engine go on while it is given the next.
    """
    version = view.head.version
    kinds = ("publish ", "sleep ", "wake ")
    under_way = {condition.split()[1] for condition in view.under_way if condition.startswith(kinds)}
    asleep = sleeping_engines(view)
    for engine in view.engines.values():
        if engine.asleep or engine.instance in asleep:
            continue
        if engine.instance in under_way or (keeps_copies(view) and not _is_here(view, engine.instance)):
            continue
        if engine.version != version and version in view.staged and not engine.silent:
            yield Intent(PublishWeights(engine.instance, version), f"publish {engine.instance} {version}")


def _is_here(view: JobView, instance: str) -> bool:
    """Whether an engine is on this node: where nodes share no folder, it sees no weights but its own node's."""
    worker = view.workers.get(instance)
    return worker is not None and worker.node == view.node


def give_up_stale_prompts(view: JobView) -> Iterator[Intent]:
    """Give up the prompts that a seal has waited for too long, and those that can no longer be trained."""
    if not view.rules.staleness:
        return
    head = view.head
    awaited, stranded = frozenset(view.awaited), _stranded_prompts(view)
    for ref, version in view.in_flight.items():
        topic = f"late {ref} {version}"
        if head.cursors.is_terminal(view.rules.shape, ref) or not is_ancestor(head, version):
            yield Intent(GiveUpPrompt(ref, "its prompt has ended, or its lineage", stale=False), topic)
        elif steps_left(view.rules, head, version) < 0:
            yield Intent(GiveUpPrompt(ref, f"its first tokens are of {version}, too old by now", stale=True), topic)
        elif ref in stranded:
            why = "no engine is left here, and its shard is another peer's"
            yield Intent(GiveUpPrompt(ref, why, stale=False), f"{topic} stranded", after=STRANDED_PATIENCE_S)
        elif ref in awaited:
            why = f"it was waited for {view.spec.rollout.timeout_s:g} s"
            yield Intent(GiveUpPrompt(ref, why, stale=True), f"{topic} awaited", after=view.spec.rollout.timeout_s)


def _stranded_prompts(view: JobView) -> frozenset[PromptRef]:
    """The prompts in flight here that will never end, and that no other peer begins: the plan has no engine here any more, this peer asks
    no engine of a lost node, and the shard belongs to another peer."""
    assign = view.mirror.assign
    if not view.in_flight or assign is None or view.node in view.plan.rollout_nodes:
        return frozenset()
    if not all(engine.asleep for engine in view.engines.values()):
        return frozenset()
    mine = assign.record.shards_of(view.me)
    return frozenset(ref for ref in view.in_flight if ref.shard not in mine)


def evaluation_order(version: Version, members: Collection[str]) -> tuple[str, ...]:
    """The members in the order of the version's evaluation."""
    return turn_order(members, f"eval {version}")


def members_with_engines(members: Mapping[str, Versioned[Member]], plan: Plan | None) -> tuple[str, ...]:
    """The members on whose nodes the plan has rollout engines; all of them if that is none."""
    nodes = plan.rollout_nodes if plan is not None else frozenset()
    return tuple(sorted(name for name, member in members.items() if member.record.node in nodes)) or tuple(
        sorted(members)
    )


def evaluation_turn(me: str, number: int, members: tuple[str, ...]) -> int:
    """My place in the order of part `number`: 0 answers it. Whoever is not among the `members` comes last."""
    return (members.index(me) - number) % len(members) if me in members else len(members)


def parts_to_take(
    me: str, open_parts: Collection[int], members: tuple[str, ...], quiet_s: Mapping[str, float]
) -> tuple[int, ...]:
    """The open parts that this peer answers now, the most urgent first.

    `members` in the version's order; `quiet_s`: since when each of them has delivered nothing.
    """

    def is_mine(number: int, place: int) -> bool:
        ahead = (members[(number + before) % len(members)] for before in range(place))
        return all(quiet_s[name] >= place * TAKEOVER_S for name in ahead)

    places = {number: evaluation_turn(me, number, members) for number in open_parts}
    mine = [number for number, place in places.items() if is_mine(number, place)]
    return tuple(sorted(mine, key=lambda number: (places[number], -number if places[number] else number)))
