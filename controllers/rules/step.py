"""The rules of a step, in the order in which it passes through them: offer, seal, send to the ranks, train, commit,
weight sync. Then the rules about stale prompts, and who evaluates which part of an evaluation.

Offer (the list of finished groups that a controller publishes): each write wakes every peer, and a batch can only be
sealed when the offers together contain enough groups for it. So a peer writes its offer when it has its share (1/n) of
what is still missing, or when everything that it has to produce is finished. A smaller offer is written after a delay,
because other peers sample replacements for prompts that ended without a group, and users watch the progress of the
step.

Staleness: if it is allowed, an offer also names the prompts in flight, soon after they were started. Then a seal waits
for prompts that would exceed the staleness limit in a later step. If it waits too long for one, that prompt is given up
and sampled again; after too many attempts it has failed. At staleness 0 none of this applies.

Evaluation: it is divided into parts. The members with engines are ordered by a hash of the weight version, and parts
are assigned to them round robin. If the owner of a part delivers nothing for a while, the next member takes over its
parts, beginning with the last, because the owner begins with the first. If a member leaves, the order changes at once.
Duplicate results of a part are harmless: the first one written counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from controllers.rules.actions import (
    AccumulateParts,
    CommitStep,
    FeedRank,
    FindBlobs,
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
"""Delay of an offer with at least this peer's share of the missing groups, so that more groups come with it."""

OUTCOME_S = 1.0
"""Delay of a smaller offer that has new outcomes (prompts that ended without a group)."""

GROUPS_S = 3.0
"""Delay of a smaller offer that has only new groups."""

EVALUATION_PATIENCE_S = 900.0
"""Maximum time that a complete batch waits for the evaluation of the present weights; each part of the evaluation that
arrives restarts it. The limit is needed because a flow may never run that evaluation."""

EXCHANGE_LIMIT_S = 60.0
"""A sealed batch is given up if no sample of it arrives for this long."""

STRANDED_PATIENCE_S = 10.0
"""Time after which a prompt in flight on a node without engines is given up. It may have all its responses and only
wait for its reward."""

TAKEOVER_S = 20.0
"""The next peer takes over a part of an evaluation if its owner has delivered nothing for this long. The peer after it
does so if both have delivered nothing for twice as long, and so on."""


def offer_groups(view: JobView) -> Iterator[Intent]:
    """Write this peer's offer if it differs from the stored one, after a delay that depends on what is new
    (`offer_delay_s`).

    An offer may name prompts that already have an outcome, because the peer that seals checks this. It must not name a
    group that this peer has dropped and that could be sealed (after a rollback it may be valid once more): the batch
    would be sealed and given up again and again. The number of outcomes is limited to what fits into one log entry; the
    others follow later.
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
    """An offer to write. `groups`, `outcomes`: how many of them the stored offer lacks.

    `void`: the stored offer names a group that this peer no longer holds. `misnamed`: its list of prompts in flight is
    outdated.
    """

    offer: Offer
    groups: int
    outcomes: int
    void: bool
    misnamed: bool


def _offer_change(view: JobView, stored: Offer | None) -> _OfferChange | None:
    """The offer to write instead of the stored one; None if nothing has changed."""
    head = view.head
    ended = dict(sorted(view.outcomes.items(), key=lambda item: stream_position(view, item[0]))[:MOST_OUTCOMES])
    named = {g.digest: g.ref for g in stored.groups} if stored else {}
    # Compared by version too: an outcome of a discarded branch differs from a later one.
    named_outcomes = {(o.ref, o.versions) for o in stored.outcomes} if stored else set()
    groups = sum(g.digest not in named for g in view.unsealed)
    outcomes = len({(ref, outcome.versions) for ref, outcome in ended.items()} - named_outcomes)
    held = {group.digest for group in view.holdings.values()}
    dropped = [ref for digest, ref in named.items() if digest not in held]
    void = any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in dropped)
    misnamed = is_offer_outdated(view, head, stored)
    if not (groups or outcomes or void or misnamed):
        return None
    # Groups in a seal stay in the offer, so that they are available if the seal is given up.
    offer = Offer(
        incarnation=view.me,
        groups=tuple(view.holdings[ref] for ref in sorted(view.holdings)),
        outcomes=tuple(ended[ref] for ref in sorted(ended)),
        in_flight=in_flight_refs(view),
    )
    return _OfferChange(offer, groups, outcomes, void, misnamed)


def in_flight_refs(view: JobView) -> tuple[InFlightRef, ...]:
    """The prompts in flight, with their oldest weights, for this peer's offer; empty at staleness 0."""
    if not view.rules.staleness:
        return ()
    return tuple(InFlightRef(ref=ref, version=version) for ref, version in sorted(view.in_flight.items()))


def is_offer_outdated(view: JobView, head: Head, stored: Offer | None) -> bool:
    """Whether the stored offer lacks prompts that are in flight, or names prompts that no longer are.

    A peer that seals can only wait for prompts that it knows from offers.
    """
    if not view.rules.staleness:
        return False
    named = {one.ref: one.version for one in stored.in_flight} if stored else {}
    if any(named.get(ref) != version for ref, version in view.in_flight.items()):
        return True
    ended = named.keys() - view.in_flight.keys() - view.holdings.keys() - view.outcomes.keys()
    return any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in ended)


def stream_position(view: JobView, ref: PromptRef) -> tuple[int, int]:
    """The position of `ref` in the order of the prompt stream, as a sort key: position in its shard, then shard."""
    return view.rules.shape.position(ref), ref.shard


def offer_delay_s(view: JobView, groups: int, outcomes: int) -> float:
    """Seconds to delay an offer with this many new groups and outcomes while this peer is still producing more."""
    chosen = view.chosen
    lacking = chosen.missing if isinstance(chosen, AwaitGroups) else 0
    if view.rules.part is not None:  # a full part is worth a write
        lacking = min(lacking, view.rules.part)
    if groups + outcomes >= lacking / max(1, len(view.mirror.members)):
        return COALESCE_S
    return OUTCOME_S if outcomes else GROUPS_S


def seal_batch(view: JobView) -> Iterator[Intent]:
    """Seal the next batch when the offers contain enough groups for it, or a part of it when enough groups are certain
    to belong to it. If only outcomes without groups are left, record them; if the data is exhausted, end the job."""
    head = view.head
    slot = view.seal
    if view.is_over or (slot is not None and slot.state is not SealState.OPEN) or awaits_checkpoint(view):
        return
    seals = [stored.record for stored in view.mirror.seals.values()]
    chosen = view.chosen
    topic = f"seal {head.seq} {slot.attempt if slot else 0}"
    if isinstance(chosen, SealStep) and refuse_seal(view.rules, head, seals, chosen) is None:
        owed = owes_evaluation(view)
        # The topic contains the number of parts received, so each new part restarts the delay.
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
    """Whether the present weights must still be evaluated before the next batch is sealed. Groups carried over from
    earlier steps could complete the batch before the evaluation."""
    head = view.head
    if not view.rules.staleness or not view.is_evaluated_after(head.step, last=False):
        return False
    return str(head.version) not in view.mirror.evaluations


def exchange_batch(view: JobView) -> Iterator[Intent]:
    """Send the samples of a SEALED batch, or of a part of one, to the train ranks. Mark it READY when every rank has
    its share; give it up if a group is lost or nothing arrives for too long."""
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
        # The topic contains the number of missing samples and the fetched bytes, so each arrival restarts the delay: a large batch on a slow network
        # arrives eventually.
        left = sum(len(samples) for of_rank in missing.values() for samples in of_rank.values())
        fetched = sum(view.ranks[rank].fetched_bytes for rank in missing if rank in view.ranks)
        why = f"{len(undelivered)} groups were not delivered, and nothing arrived for {EXCHANGE_LIMIT_S:.0f} s"
        overdue = f"overdue {seal.token} {left} {fetched}"
        yield Intent(GiveUpBatch(seal.step, why), overdue, view.turn(topic), after=EXCHANGE_LIMIT_S)
    mine = view.held_for(seal)
    for rank in missing:
        if rank not in view.ranks or lost:
            continue
        if mine & view.unsent(seal, rank).keys():
            yield Intent(FeedRank(rank, seal.token), f"feed {rank} {seal.token}")
        if _unavailable(view, seal, rank):
            yield Intent(FindBlobs(rank, seal.token), f"find blobs of {rank} {seal.token}")


def _unavailable(view: JobView, seal: Seal, rank: int) -> frozenset[str]:
    """The groups of `seal` that this peer holds and for which `rank` finds a blob in no store, by digest."""
    fetching, mine = view.fetching(seal, rank), view.held_for(seal)
    return frozenset(digest for digest, one in fetching.items() if one.unavailable and digest in mine)


def why_groups_lost(view: JobView, seal: Seal, undelivered: set[str]) -> str:
    """Why one of the undelivered groups can never arrive: its holder has ended, or this controller is the holder and no
    longer has it. Empty if all may arrive. `undelivered`: digests of groups."""
    held = {group.digest for group in view.holdings.values()}
    for group in seal.groups:
        if group.digest not in undelivered:
            continue
        if group.holder == view.me and group.digest not in held:
            return f"{view.me} has lost the group of prompt {group.ref}"
        if group.holder not in view.mirror.members:
            return f"{group.holder} has ended, and the group of prompt {group.ref} is lost with it"
    return ""


def waits_for_others(view: JobView) -> bool:
    """Whether this peer can skip cycles: a sealed batch is being sent, this peer has sent all of its samples, and other
    peers are first in turn to mark it READY or give it up.

    Ranks report each arrival to every peer. With many peers, a cycle for each report would slow down the peers that
    still send.
    """
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.state is not SealState.SEALED:
        return False
    if any(condition.startswith("feed ") for condition in view.under_way):
        return False
    mine = view.held_for(seal)
    if any(mine & view.unsent(seal, rank).keys() or _unavailable(view, seal, rank) for rank in range(seal.world_size)):
        return False
    return view.turn(f"ready {seal.token}") > 0 and view.turn(f"exchange {seal.token}") > 0


def train_parts(view: JobView) -> Iterator[Intent]:
    """Have every train rank compute and add up the gradients of the READY parts of a step, while the rest is generated
    and sent."""
    seal = view.seal
    if seal is None or not seal.ready_parts or seal.state is SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.rules.world` handles this
    for rank in range(seal.world_size):
        known = view.ranks.get(rank)
        if known is not None and view.begun(known) < seal.ready_parts:
            topic = f"accumulate {rank} {seal.lineage} {seal.step} {seal.ready_parts}"
            yield Intent(
                AccumulateParts(rank, seal.token), topic, view.turn(f"accumulate {seal.step} {seal.ready_parts}")
            )


def train_step(view: JobView) -> Iterator[Intent]:
    """Have every train rank train a READY batch; commit it when all have."""
    seal = view.seal
    if seal is None or seal.state is not SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.rules.world` handles this
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
    """The token of the batch that a rank has trained last."""
    known = view.ranks.get(rank)
    return known.applied if known else None


def publish_weights(view: JobView) -> Iterator[Intent]:
    """Weight sync: load the committed weights into the awake engines that this controller manages and that have others.

    Only one sleep, wake or load runs at a time per engine, because the end of one would resume the engine during the
    next.
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
    """Whether an engine is on this node. If nodes share no folder, an engine sees only its own node's weights."""
    worker = view.workers.get(instance)
    return worker is not None and worker.node == view.node


def give_up_stale_prompts(view: JobView) -> Iterator[Intent]:
    """Give up prompts in flight here that can no longer be trained, whose node has no engine any more, or for which a
    seal has waited too long."""
    if not view.rules.staleness:
        return
    head = view.head
    awaited, stranded = frozenset(view.awaited), _stranded_prompts(view)
    for ref, version in view.in_flight.items():
        topic = f"late {ref} {version}"
        if head.cursors.is_terminal(view.rules.shape, ref) or not is_ancestor(head, version):
            yield Intent(GiveUpPrompt(ref, "its prompt or its lineage has ended", stale=False), topic)
        elif steps_left(view.rules, head, version) < 0:
            yield Intent(
                GiveUpPrompt(
                    ref, f"its first tokens are from version {version}, which exceeds the staleness limit", stale=True
                ),
                topic,
            )
        elif ref in stranded:
            why = "this node has no engine any more, and the shard belongs to another peer"
            yield Intent(GiveUpPrompt(ref, why, stale=False), f"{topic} stranded", after=STRANDED_PATIENCE_S)
        elif ref in awaited:
            why = f"the next step waited {view.spec.rollout.timeout_s:g} s for it"
            yield Intent(GiveUpPrompt(ref, why, stale=True), f"{topic} awaited", after=view.spec.rollout.timeout_s)


def _stranded_prompts(view: JobView) -> frozenset[PromptRef]:
    """The prompts in flight here that cannot be finished: this peer has no awake engine, and the plan places none on
    its node. Only prompts whose shard belongs to another peer, which samples them again."""
    assign = view.mirror.assign
    if not view.in_flight or assign is None or view.node in view.plan.rollout_nodes:
        return frozenset()
    if not all(engine.asleep for engine in view.engines.values()):
        return frozenset()
    mine = assign.record.shards_of(view.me)
    return frozenset(ref for ref in view.in_flight if ref.shard not in mine)


def evaluation_order(version: Version, members: Collection[str]) -> tuple[str, ...]:
    """The members in the order in which they evaluate parts of the evaluation of `version`."""
    return turn_order(members, f"eval {version}")


def members_with_engines(members: Mapping[str, Versioned[Member]], plan: Plan | None) -> tuple[str, ...]:
    """The members on whose nodes the plan has rollout engines; all members if there are none."""
    nodes = plan.rollout_nodes if plan is not None else frozenset()
    return tuple(sorted(name for name, member in members.items() if member.record.node in nodes)) or tuple(
        sorted(members)
    )


def evaluation_turn(me: str, number: int, members: tuple[str, ...]) -> int:
    """The place of `me` in the order of takeover for part `number` of an evaluation: 0 owns the part, 1 takes over
    first. A peer that is not among the `members` comes last."""
    return (members.index(me) - number) % len(members) if me in members else len(members)


def parts_to_take(
    me: str, open_parts: Collection[int], members: tuple[str, ...], quiet_s: Mapping[str, float]
) -> tuple[int, ...]:
    """The unfinished parts of an evaluation that this peer evaluates now, in its order of work: its own parts, then
    those that it takes over.

    `members`: in the order of `evaluation_order`. `quiet_s`: seconds since each of them last delivered a result.
    """

    def is_mine(number: int, place: int) -> bool:
        ahead = (members[(number + before) % len(members)] for before in range(place))
        return all(quiet_s[name] >= place * TAKEOVER_S for name in ahead)

    places = {number: evaluation_turn(me, number, members) for number in open_parts}
    mine = [number for number, place in places.items() if is_mine(number, place)]
    return tuple(sorted(mine, key=lambda number: (places[number], -number if places[number] else number)))
