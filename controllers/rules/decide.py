"""What a controller should do for a job, from one look at it: a pure function.

Each rule stands alone and returns intents. None awaits, reads a clock or draws a number; whose turn it is follows from a
hash, how long a condition has held is `controllers.turns`' business. A rule may be wrong about the present, since its
view may be old: the transaction that follows compares, and a lost compare means to look again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controllers.rules.actions import Assign, Intent, Join, Leave, SetPhase, StartJob
from controllers.rules.memory import resting, turning
from controllers.rules.placement import ending, giving_back, is_suspended, leading, placing, resuming, yielding
from controllers.rules.replication import bringing, discarding, saying, spreading
from controllers.rules.retention import beginning, checkpointing, forgetting, pruning, sweeping, warning_of_disks
from controllers.rules.step import accumulating, exchanging, expiring, offering, publishing, sealing, training
from controllers.rules.view import JobView, turn
from controllers.rules.world import (
    despairing,
    finishing,
    growing,
    moving_judges,
    recovering,
    replanning,
    short_of_slots,
    taking_stock,
)
from gcore.ledger.records.chain import Assignment, SealState
from gcore.ledger.records.job import JobPhase
from gcore.types import PromptRef

# -------------------- assignment
# Which peer works on which shard: sticky and balanced, a pure function of the members and the old assignment.
#
# Loads differ by at most one, and no shard moves that need not. The assignment is a hint of who should work on what; what
# keeps a prompt from being trained twice is the seal's check.


def assign_shards(members: Sequence[str], shards: int, old: Assignment | None) -> Assignment:
    """Give every shard an owner. Without members: nobody's.

    At first shards are dealt out in turn, so that every stretch of the stream is spread over all peers. Then only what
    is nobody's, and what is above a peer's fair share, moves; of an overfull peer every k-th shard goes, for the same reason.
    """
    ordered = tuple(sorted(members))
    if not ordered:
        return Assignment(members=(), owners=(None,) * shards)
    owner: list[str | None] = [None] * shards
    if old is not None and len(old.owners) == shards:
        alive = set(ordered)
        owner = [name if (name := old.owner(shard)) in alive else None for shard in range(shards)]
    held = {name: [shard for shard in range(shards) if owner[shard] == name] for name in ordered}
    # The larger shares go to who holds most already, so that fewest shards move.
    by_load = sorted(ordered, key=lambda name: (-len(held[name]), name))
    base, more = divmod(shards, len(ordered))
    quota = {name: base + (i < more) for i, name in enumerate(by_load)}
    for name in ordered:
        for shard in _spread(held[name], len(held[name]) - quota[name]):
            owner[shard] = None
    loads = {name: min(len(held[name]), quota[name]) for name in ordered}
    for shard in range(shards):
        if owner[shard] is None:
            # The emptiest takes the next: in a fresh start that deals them out in turn.
            taker = min(
                (name for name in ordered if loads[name] < quota[name]),
                key=lambda name: (loads[name] - quota[name], ordered.index(name)),
            )
            owner[shard] = taker
            loads[taker] += 1
    index = {name: i for i, name in enumerate(ordered)}
    return Assignment(members=ordered, owners=tuple(None if name is None else index[name] for name in owner))


def _spread(shards: list[int], count: int) -> list[int]:
    """`count` of `shards`, evenly spread over them."""
    if count <= 0:
        return []
    return [shards[i * len(shards) // count] for i in range(count)]


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


# -------------------- leaving
# A controller that was asked to end: what it hands over, and when that is done.
#
# It says in its membership that it leaves (`controllers.decide.departing`); its shards are the others' at once. It begins
# nothing more and gives up what it has in flight, for the others begin that anew now. What it has finished stays in its offer
# and goes to the ranks when it is sealed; it waits for that, but only so long (`LEAVE_WITHIN_S`), and for nobody if it is the
# last: what is lost then is issued again. Its engines and ranks go on without it.
#
# Pure.


def has_handed_over(view: JobView) -> bool:
    """Whether nothing is left that it is worth staying for."""
    members = view.mirror.members
    mine = members.get(view.me)
    others = [name for name, member in members.items() if name != view.me and not member.record.leaving]
    if mine is None or not others:
        return True
    if not mine.record.leaving:
        return False
    if view.mirror.assign is None or view.me in view.mirror.assign.record.members:
        return False
    return not undelivered(view)


def undelivered(view: JobView) -> frozenset[PromptRef]:
    """The refs of what this controller has finished and nobody else has: what would be lost with it."""
    if view.mirror.head is None:
        return frozenset()
    head = view.mirror.head.record
    safe: set[PromptRef] = set()
    for stored in view.mirror.seals.values():
        seal = stored.record
        safe |= {outcome.ref for outcome in seal.outcomes}
        safe |= {group.ref for group in (seal.groups if seal.state is SealState.READY else seal.kept)}
    held = {*view.holdings, *view.outcomes}
    return frozenset(ref for ref in held - safe if not head.cursors.is_terminal(view.rules.shape, ref))
