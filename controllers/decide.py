"""What a controller should do for a job, from one look at it: a pure function.

Each rule stands alone and returns intents. None awaits, reads a clock or draws a number; whose turn it is follows from a
hash, how long a condition has held is `controllers.turns`' business. A rule may be wrong about the present, since its
view may be old: the transaction that follows compares, and a lost compare means to look again.
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.actions import (
    Account,
    Apply,
    Assign,
    Commit,
    Feed,
    Intent,
    Join,
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
from controllers.ending import despairing, finishing, recovering
from controllers.housekeeping import SETTLE_S, beginning, checkpointing, pruning
from controllers.turns import turn
from controllers.view import JobView
from gcore.ledger.balance import balance
from gcore.ledger.job import JobPhase
from gcore.ledger.records import Offer, Seal, SealState
from gcore.ledger.shortage import why_short
from gcore.ledger.stream import AccountNow, SealNow, Short, refuse_seal

COALESCE_S = 0.3
"""An offer that is not complete yet waits so long for more, so that a step takes few writes."""
EXCHANGE_LIMIT_S = 60.0
"""A sealed batch that is not delivered by then is given up."""


def decide(view: JobView) -> tuple[Intent, ...]:
    """All that should be done now, in no particular order."""
    status = view.mirror.status
    if status is None or status.record.phase.ended:
        return ()
    if status.record.phase is JobPhase.PENDING:
        return (Intent(StartJob(), "start", turn(view.nodes, view.node, "start")),)
    if view.mirror.head is None or view.mirror.plan is None or view.mirror.checkpoints is None:
        return ()
    if view.mirror.head.record.deleted:
        return ()
    if view.me not in view.mirror.members:
        return (Intent(Join(), "join"),)
    rules = (
        assigning,
        offering,
        sealing,
        exchanging,
        training,
        checkpointing,
        pruning,
        beginning,
        despairing,
        recovering,
        publishing,
        expiring,
        finishing,
    )
    return tuple(intent for rule in rules for intent in rule(view) if intent.condition not in view.under_way)


def assigning(view: JobView) -> Iterator[Intent]:
    """Every shard is some member's, and that member has engines to come: else its prompts would never be answered.

    A node that joined, or came back, after the plan was made has none.
    """
    assert view.mirror.plan is not None
    old = view.mirror.assign
    nodes = {place.node for place in view.mirror.plan.record.engines}
    equipped = sorted(name for name, member in view.mirror.members.items() if member.record.node in nodes)
    members = equipped or sorted(view.mirror.members)
    if old is None or sorted(old.record.members) != members or None in old.record.owners:
        new = assign_shards(members, len(view.rules.shape.lengths), old.record if old else None)
        # The condition names the members, so that who comes or goes meanwhile starts it anew.
        topic = f"assign {' '.join(members)}"
        yield Intent(Assign(new), topic, view.turn(topic), after=0.1)


def offering(view: JobView) -> Iterator[Intent]:
    """What this peer holds and has not offered, once its part is complete, or a little later.

    An offer that names what is terminal by now does no harm: whoever seals checks it. One that names what this peer has
    dropped and what could be sealed again (after a rollback it may be fresh once more) must go, or it would be sealed and
    given up for ever.
    """
    head = view.head
    stored = view.mirror.offers.get(view.me)
    named = {g.digest: g.ref for g in stored.record.groups} if stored else {}
    named_outcomes = {o.ref for o in stored.record.outcomes} if stored else set()
    new = any(g.digest not in named for g in view.unsealed) or bool(view.outcomes.keys() - named_outcomes)
    held = {group.digest for group in view.holdings.values()}
    dropped = [ref for digest, ref in named.items() if digest not in held]
    void = any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in dropped)
    misnamed = is_misnamed(view, head, stored.record if stored else None)
    if new or void or misnamed:
        # Groups in a seal stay in the offer: if the seal is given up, they are there for the next.
        offer = Offer(
            incarnation=view.me,
            groups=tuple(view.holdings[ref] for ref in sorted(view.holdings)),
            outcomes=tuple(view.outcomes[ref] for ref in sorted(view.outcomes)),
            in_flight=named_in_flight(view),
        )
        yield Intent(PutOffer(offer), "offer", after=0.0 if void or not view.busy else COALESCE_S)


def sealing(view: JobView) -> Iterator[Intent]:
    """The batch is closed as soon as the offers hold its quota."""
    head = view.head
    slot = view.seal
    if view.is_over or (slot is not None and slot.state is not SealState.OPEN):
        return
    seals = [stored.record for stored in view.mirror.seals.values()]
    chosen = view.chosen
    topic = f"seal {head.seq} {slot.attempt if slot else 0}"
    if isinstance(chosen, SealNow) and refuse_seal(view.rules, head, seals, chosen) is None:
        owed = owes_evaluation(view)
        # Named by the evaluation's parts while it is waited for: each that comes begins the wait anew.
        waits = f"{topic} evaluated {len(view.mirror.eval_parts_of(head.version))}" if owed else topic
        yield Intent(
            MakeSeal(head.step + 1, chosen), waits, view.turn(topic), after=EVALUATION_PATIENCE_S if owed else 0.0
        )
    elif isinstance(chosen, AccountNow):
        yield Intent(Account(chosen.outcomes), f"account {head.seq}", view.turn(topic))
    elif isinstance(chosen, Short):
        why = why_short(view.rules, head, chosen, [stored.record for stored in view.mirror.log.values()])
        yield Intent(SetPhase(JobPhase.FAILED, why, at_head=True), f"short {head.seq}", view.turn(topic))


def exchanging(view: JobView) -> Iterator[Intent]:
    """A SEALED batch goes to the ranks; what cannot be delivered is given up."""
    seal = view.seal
    if seal is None or seal.state is not SealState.SEALED:
        return
    layout = balance(seal)
    missing = {rank: view.missing(seal, layout, rank) for rank in range(seal.world_size)}
    topic = f"exchange {seal.token}"
    if not any(missing.values()):
        yield Intent(Ready(seal.step), f"ready {seal.token}", view.turn(topic))
        return
    undelivered = {digest for of_rank in missing.values() for digest in of_rank}
    lost = lost_groups(view, seal, undelivered)
    if lost:
        yield Intent(Reseal(seal.step, lost), f"reseal {seal.token}", view.turn(topic), after=SETTLE_S / 2)
    else:
        why = f"{len(undelivered)} groups were not delivered within {EXCHANGE_LIMIT_S:.0f} s"
        yield Intent(Reseal(seal.step, why), f"overdue {seal.token}", view.turn(topic), after=EXCHANGE_LIMIT_S)
    mine = {g.digest for g in seal.groups if g.holder == view.me}
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


def training(view: JobView) -> Iterator[Intent]:
    """A READY batch is trained by every rank, then committed."""
    seal = view.seal
    if seal is None or seal.state is not SealState.READY:
        return
    behind = [rank for rank in range(seal.world_size) if _applied(view, rank) != seal.token]
    if not behind:
        yield Intent(Commit(seal.step), f"commit {seal.token}", view.turn(f"commit {seal.token}"))
    for rank in behind:
        if rank in view.ranks:
            yield Intent(Apply(rank, seal.token), f"apply {rank} {seal.token}", view.turn(f"exchange {seal.token}"))


def publishing(view: JobView) -> Iterator[Intent]:
    """Engines serve what was committed; only after the commit."""
    version = view.head.version
    for engine in view.engines.values():
        if engine.version != version and version in view.staged:
            yield Intent(Publish(engine.instance, version), f"publish {engine.instance} {version}")


def _applied(view: JobView, rank: int) -> object:
    known = view.ranks.get(rank)
    return known.applied if known else None
