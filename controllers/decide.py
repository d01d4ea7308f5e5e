"""What a controller should do for a job, from one look at it: a pure function.

Each rule stands alone and returns intents. None awaits, reads a clock or draws a number; whose turn it is follows from a
hash, how long a condition has held is `controllers.turns`' business. A rule may be wrong about the present, since its
view may be old: the transaction that follows compares, and a lost compare means to look again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controllers.actions import (
    Account,
    Accumulate,
    Apply,
    Assign,
    Commit,
    Feed,
    Intent,
    Join,
    Leave,
    MakeSeal,
    Publish,
    PutOffer,
    Ready,
    Reseal,
    SetPhase,
    StartJob,
)
from controllers.assignment import assign_shards
from controllers.carrying import EVALUATION_PATIENCE_S, expiring, is_misnamed, named_in_flight, owes_evaluation
from controllers.coalescing import COALESCE_S, patience_s
from controllers.ending import despairing, finishing, recovering
from controllers.forming import growing, held_for_growth, moving_judges, replanning, short_of_slots, taking_stock
from controllers.housekeeping import beginning, checkpointing, pruning, warning_of_disks
from controllers.leading import leading, placing
from controllers.sleeping import put_to_sleep, resting
from controllers.spreading import bringing, discarding, gathering, is_spread, is_witnessed, saying, spreading
from controllers.sweeping import forgetting, sweeping
from controllers.taking_turns import held_back_s, turning
from controllers.turns import SETTLE_S, turn
from controllers.view import JobView
from controllers.yielding import (
    awaits_checkpoint,
    ending,
    giving_back,
    is_suspended,
    resuming,
    wants_checkpoint,
    yielding,
)
from gcore.ledger.job import JobPhase
from gcore.ledger.records import Assignment, Offer, Seal, SealState
from gcore.ledger.shortage import why_short
from gcore.ledger.stream import MOST_OUTCOMES, AccountNow, SealNow, Short, refuse_seal
from gcore.types import PromptRef

EXCHANGE_LIMIT_S = 60.0
"""A sealed batch of which nothing arrives for so long is given up."""


def decide(view: JobView) -> tuple[Intent, ...]:
    """All that should be done now, in no particular order."""
    status = view.mirror.status
    if status is None or status.record.phase.ended:
        return ()
    if status.record.phase is JobPhase.PENDING:
        if view.claim.ends:
            return (Intent(SetPhase(JobPhase.CANCELLED, view.claim.ends), "end", turn(view.nodes, view.node, "end")),)
        if "start" in view.under_way:  # or it would be tried again and again until what it did is heard
            return ()
        if short_of_slots(view):  # the cluster may still fill up
            return tuple(giving_back(view))
        return (Intent(StartJob(), "start", turn(view.nodes, view.node, "start")),)
    if view.mirror.head is None or view.mirror.plan is None or view.mirror.checkpoints is None:
        return ()
    if view.mirror.head.record.deleted:
        return ()
    if view.me not in view.mirror.members:
        return () if view.leaving or "join" in view.under_way else (Intent(Join(), "join"),)
    # What a job does that has no workers, and what one does that has.
    standing_still = (departing, pruning, sweeping, forgetting, giving_back, resuming, ending)
    working = (
        departing,
        assigning,
        offering,
        sealing,
        exchanging,
        accumulating,
        training,
        checkpointing,
        warning_of_disks,
        pruning,
        sweeping,
        forgetting,
        beginning,
        despairing,
        taking_stock,
        recovering,
        replanning,
        moving_judges,
        growing,
        leading,
        placing,
        saying,
        bringing,
        spreading,
        discarding,
        turning,
        resting,
        publishing,
        expiring,
        yielding,
        giving_back,
        finishing,
    )
    rules = standing_still if is_suspended(view) else working
    return tuple(intent for rule in rules for intent in rule(view) if intent.condition not in view.under_way)


def departing(view: JobView) -> Iterator[Intent]:
    """Who is asked to end says so first, so that its shards are others' at once and not when its lease is over."""
    if view.leaving and not view.mirror.members[view.me].record.leaving:
        yield Intent(Leave(), "leave")


def assigning(view: JobView) -> Iterator[Intent]:
    """Every shard is some member's, and that member has engines to come: else its prompts would never be answered.

    A node that joined, or came back, after the plan was made has none. Who is leaving takes none, if there are others.
    """
    mirror = view.mirror
    sources = (mirror.assign, mirror.plan, mirror.members)
    wanted = view.remembered.get("assignment", sources, lambda: _assignment(view))
    if wanted is not None:
        # The condition names the members, so that who comes or goes meanwhile starts it anew.
        topic = f"assign {' '.join(wanted.members)}"
        yield Intent(Assign(wanted), topic, view.turn(topic), after=0.1)


def _assignment(view: JobView) -> Assignment | None:
    """The assignment that is to be, if it is not what stands."""
    assert view.mirror.plan is not None
    old = view.mirror.assign
    nodes = view.mirror.plan.record.rollout_nodes
    staying = {name: m for name, m in view.mirror.members.items() if not m.record.leaving} or view.mirror.members
    equipped = sorted(name for name, member in staying.items() if member.record.node in nodes)
    members = equipped or sorted(staying)
    if old is not None and sorted(old.record.members) == members and None not in old.record.owners:
        return None
    return assign_shards(members, len(view.rules.shape.lengths), old.record if old else None)


def offering(view: JobView) -> Iterator[Intent]:
    """What this peer holds and has not offered, once its part is complete, or a little later.

    An offer that names what is terminal by now does no harm: whoever seals checks it. One that names what this peer has
    dropped and what could be sealed again (after a rollback it may be fresh once more) must go, or it would be sealed and
    given up for ever. Of outcomes only so many as one entry takes: the others follow when those are written down.
    """
    stored = view.mirror.offers.get(view.me)
    sources = (view.me, view.holdings, view.outcomes, view.in_flight, stored, view.mirror.seals, view.mirror.head)
    untold = view.remembered.get("untold", sources, lambda: _untold(view, stored.record if stored else None))
    if untold is not None:
        if untold.void or not view.busy:
            after = 0.0
        else:
            after = COALESCE_S if untold.misnamed else patience_s(view, untold.groups, untold.outcomes)
        yield Intent(PutOffer(untold.offer), "offer", after=after)


@dataclass(frozen=True, slots=True)
class _Untold:
    """An offer, and what in it the stored one has not: how many groups and outcomes.

    `void`: the stored one names a group that is no longer held; `misnamed`: it is wrong about what is in flight.
    """

    offer: Offer
    groups: int
    outcomes: int
    void: bool
    misnamed: bool


def _untold(view: JobView, stored: Offer | None) -> _Untold | None:
    head = view.head
    ended = dict(sorted(view.outcomes.items(), key=lambda item: in_stream_order(view, item[0]))[:MOST_OUTCOMES])
    named = {g.digest: g.ref for g in stored.groups} if stored else {}
    # By their versions too: an outcome of a cut-off lineage does not stand for the one that came after it.
    named_outcomes = {(o.ref, o.versions) for o in stored.outcomes} if stored else set()
    groups = sum(g.digest not in named for g in view.unsealed)
    outcomes = len({(ref, outcome.versions) for ref, outcome in ended.items()} - named_outcomes)
    held = {group.digest for group in view.holdings.values()}
    dropped = [ref for digest, ref in named.items() if digest not in held]
    void = any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in dropped)
    misnamed = is_misnamed(view, head, stored)
    if not (groups or outcomes or void or misnamed):
        return None
    # Groups in a seal stay in the offer: if the seal is given up, they are there for the next.
    offer = Offer(
        incarnation=view.me,
        groups=tuple(view.holdings[ref] for ref in sorted(view.holdings)),
        outcomes=tuple(ended[ref] for ref in sorted(ended)),
        in_flight=named_in_flight(view),
    )
    return _Untold(offer, groups, outcomes, void, misnamed)


def in_stream_order(view: JobView, ref: PromptRef) -> tuple[int, int]:
    """Where `ref` comes in the order (position, shard)."""
    return view.rules.shape.position(ref), ref.shard


def sealing(view: JobView) -> Iterator[Intent]:
    """The batch is closed as soon as the offers hold its quota; a part of it, when enough of it is certain."""
    head = view.head
    slot = view.seal
    if view.is_over or (slot is not None and slot.state is not SealState.OPEN) or awaits_checkpoint(view):
        return
    seals = [stored.record for stored in view.mirror.seals.values()]
    chosen = view.chosen
    topic = f"seal {head.seq} {slot.attempt if slot else 0}"
    if isinstance(chosen, SealNow) and refuse_seal(view.rules, head, seals, chosen) is None:
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
    elif isinstance(chosen, AccountNow):
        yield Intent(Account(chosen.outcomes), f"account {head.seq}", view.turn(topic))
    elif isinstance(chosen, Short):
        why = why_short(view.rules, head, chosen, view.log.values())
        yield Intent(SetPhase(JobPhase.FAILED, why, at_head=True), f"short {head.seq}", view.turn(topic))


def exchanging(view: JobView) -> Iterator[Intent]:
    """A SEALED batch, or a part of one, goes to the ranks; what cannot be delivered is given up."""
    seal = view.seal
    if seal is None or seal.state not in (SealState.SEALED, SealState.PARTIAL):
        return
    missing = {rank: view.missing(seal, rank) for rank in range(seal.world_size)}
    topic = f"exchange {seal.token}"
    if not any(missing.values()):
        yield Intent(Ready(seal.step), f"ready {seal.token}", view.turn(topic), after=held_for_growth(view))
        return
    undelivered = {digest for of_rank in missing.values() for digest in of_rank}
    lost = lost_groups(view, seal, undelivered)
    if lost:
        yield Intent(Reseal(seal.step, lost), f"reseal {seal.token}", view.turn(topic), after=SETTLE_S / 2)
    else:
        # Named by how much is missing: whatever arrives begins the wait anew, for a large batch over a slow line gets there.
        left = sum(len(samples) for of_rank in missing.values() for samples in of_rank.values())
        why = f"{len(undelivered)} groups were not delivered, and nothing arrived for {EXCHANGE_LIMIT_S:.0f} s"
        yield Intent(Reseal(seal.step, why), f"overdue {seal.token} {left}", view.turn(topic), after=EXCHANGE_LIMIT_S)
    mine = view.held_for(seal)
    for rank, of_rank in missing.items():
        if rank in view.ranks and mine & of_rank.keys() and not lost:
            yield Intent(Feed(rank, seal.token), f"feed {rank} {seal.token}")


def lost_groups(view: JobView, seal: Seal, undelivered: set[str]) -> str:
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


def accumulating(view: JobView) -> Iterator[Intent]:
    """READY parts of a step are added to its gradients by every rank, while the rest of it is collected and exchanged."""
    seal = view.seal
    if seal is None or not seal.ready_parts or seal.state is SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.lost` sees to it
    for rank in range(seal.world_size):
        known = view.ranks.get(rank)
        if known is not None and view.begun(known) < seal.ready_parts:
            topic = f"accumulate {rank} {seal.lineage} {seal.step} {seal.ready_parts}"
            yield Intent(Accumulate(rank, seal.token), topic, view.turn(f"accumulate {seal.step} {seal.ready_parts}"))


def training(view: JobView) -> Iterator[Intent]:
    """A READY batch is trained by every rank, then committed."""
    seal = view.seal
    if seal is None or seal.state is not SealState.READY:
        return
    if any(view.contradicts(rank) for rank in view.ranks.values()):
        return  # `controllers.lost` sees to it
    behind = [rank for rank in range(seal.world_size) if _applied(view, rank) != seal.token]
    if not behind and not is_witnessed(view, seal.token):
        yield from gathering(view, seal.token)
    elif not behind:
        yield Intent(Commit(seal.step), f"commit {seal.token}", view.turn(f"commit {seal.token}"))
    for rank in behind:
        if rank in view.ranks:
            topic, mine = f"apply {rank} {seal.token}", view.turn(f"exchange {seal.token}")
            yield Intent(Apply(rank, seal.token), topic, mine, after=held_back_s(view, rank))


def publishing(view: JobView) -> Iterator[Intent]:
    """Engines serve what was committed; only after the commit, and only those that are awake.

    One after the other: the end of the one before would let the engine go on while it is given the next.
    """
    version = view.head.version
    kinds = ("publish ", "sleep ", "wake ")
    under_way = {condition.split()[1] for condition in view.under_way if condition.startswith(kinds)}
    asleep = put_to_sleep(view)
    for engine in view.engines.values():
        if engine.asleep or engine.instance in asleep:
            continue
        if engine.instance in under_way or (is_spread(view) and not _is_here(view, engine.instance)):
            continue
        if engine.version != version and version in view.staged and not engine.silent:
            yield Intent(Publish(engine.instance, version), f"publish {engine.instance} {version}")


def _is_here(view: JobView, instance: str) -> bool:
    """Whether an engine is on this node: where nodes share no folder, it sees no weights but its own node's."""
    worker = view.workers.get(instance)
    return worker is not None and worker.node == view.node


def _applied(view: JobView, rank: int) -> object:
    known = view.ranks.get(rank)
    return known.applied if known else None
