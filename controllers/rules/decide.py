"""Decides what a job should do now, from one view: which rules apply, how shards are assigned, and how a leaving
controller hands over.

Each rule is independent of the others and yields intents. A hash selects which controller acts first; `Timers` record
how long a condition has held. The view may be outdated, so a rule may be wrong. This does no harm: every transaction
compares the records that the rule has read, and after a failed compare the controller reads again. The reconciler
executes the intents whose delay is over, in the order of the rules.

Assignment of shards (parts of the prompt stream) to controllers: the numbers of shards differ by at most one, and no
shard moves without need. An assignment is a hint; the check of the seal prevents a prompt from being trained twice.

Hand-over: a controller that is asked to end marks its membership as leaving, and the others take its shards at once. It
starts nothing new and gives up its prompts in flight. Its finished groups stay in its offer until they are sealed and
sent to the ranks, for at most `LEAVE_WITHIN_S`. If it is the last member, it does not wait: the prompts are sampled
again. Its engines and ranks keep running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controllers.rules.actions import AssignShards, Intent, JoinJob, LeaveJob, SetPhase, StartJob
from controllers.rules.memory import apply_sleep_plan, take_turns
from controllers.rules.placement import (
    end_suspended_job,
    give_up_slots,
    is_suspended,
    release_slots,
    resume,
    take_lead,
    write_moves,
)
from controllers.rules.replication import copy_checkpoints, delete_orphans, fetch_inputs, report_folder
from controllers.rules.retention import (
    archive_evaluations,
    begin_epochs,
    prune_log,
    register_and_forget_checkpoints,
    sweep_old_worlds,
    warn_of_disks,
)
from controllers.rules.step import (
    exchange_batch,
    give_up_stale_prompts,
    offer_groups,
    publish_weights,
    seal_batch,
    train_parts,
    train_step,
)
from controllers.rules.view import JobView, turn_of
from controllers.rules.world import (
    add_engines,
    fail_barren_job,
    finish_job,
    lacking_slots,
    recover_world,
    relocate_judges,
    report_copies,
    resize_world,
)
from gcore.config.spec import uses_blobs
from gcore.ledger.records.chain import Assignment, SealState
from gcore.ledger.records.job import JobPhase
from gcore.types import PromptRef


def shard_assignment(members: Sequence[str], shards: int, old: Assignment | None) -> Assignment:
    """Assign every shard to a member; to none if there are no members. `old`: the present assignment.

    Without an old one, shards are assigned round robin, so that every section of the prompt stream is spread over all
    peers. Later only shards without an owner and those above a peer's fair share move. A peer with too many gives up
    evenly spaced ones, for the same reason.
    """
    ordered = tuple(sorted(members))
    if not ordered:
        return Assignment(members=(), owners=(None,) * shards)
    owner: list[str | None] = [None] * shards
    if old is not None and len(old.owners) == shards:
        alive = set(ordered)
        owner = [name if (name := old.owner(shard)) in alive else None for shard in range(shards)]
    held = {name: [shard for shard in range(shards) if owner[shard] == name] for name in ordered}
    # The larger shares go to the peers that hold most already, so that fewest shards move.
    by_load = sorted(ordered, key=lambda name: (-len(held[name]), name))
    base, more = divmod(shards, len(ordered))
    quota = {name: base + (i < more) for i, name in enumerate(by_load)}
    for name in ordered:
        for shard in _spread(held[name], len(held[name]) - quota[name]):
            owner[shard] = None
    loads = {name: min(len(held[name]), quota[name]) for name in ordered}
    for shard in range(shards):
        if owner[shard] is None:
            # The peer with the fewest shards takes the next one. In a fresh start this deals them out in turn.
            taker = min(
                (name for name in ordered if loads[name] < quota[name]),
                key=lambda name: (loads[name] - quota[name], ordered.index(name)),
            )
            owner[shard] = taker
            loads[taker] += 1
    index = {name: i for i, name in enumerate(ordered)}
    return Assignment(members=ordered, owners=tuple(None if name is None else index[name] for name in owner))


def _spread(shards: list[int], count: int) -> list[int]:
    """Choose `count` evenly spaced items of `shards`."""
    if count <= 0:
        return []
    return [shards[i * len(shards) // count] for i in range(count)]


def decide(view: JobView) -> tuple[Intent, ...]:
    """All intents of the rules that apply to the job's present state, in the order of the rules. Intents whose action
    already runs in the background are left out."""
    status = view.mirror.status
    if status is None or status.record.phase.ended:
        return ()
    if status.record.phase is JobPhase.PENDING:
        if view.claim.ends:
            return (
                Intent(SetPhase(JobPhase.CANCELLED, view.claim.ends), "end", turn_of(view.nodes, view.node, "end")),
            )
        if "start" in view.under_way:  # prevents retries until the watch reports its effect
            return ()
        if lacking_slots(view):  # more nodes may register
            return tuple(release_slots(view))
        return (Intent(StartJob(), "start", turn_of(view.nodes, view.node, "start")),)
    if view.mirror.head is None or view.mirror.plan is None or view.mirror.checkpoints is None:
        return ()
    if view.mirror.head.record.deleted:
        return ()
    if view.me not in view.mirror.members:
        return () if view.leaving or "join" in view.under_way else (Intent(JoinJob(), "join"),)
    # The rules of a suspended job, which has no workers, and those of a working job.
    standing_still = (leave, prune_log, sweep_old_worlds, archive_evaluations, release_slots, resume, end_suspended_job)
    working = (
        leave,
        assign_shards,
        offer_groups,
        seal_batch,
        exchange_batch,
        train_parts,
        train_step,
        register_and_forget_checkpoints,
        warn_of_disks,
        prune_log,
        sweep_old_worlds,
        archive_evaluations,
        begin_epochs,
        fail_barren_job,
        report_copies,
        recover_world,
        add_engines,
        relocate_judges,
        resize_world,
        take_lead,
        write_moves,
        report_folder,
        fetch_inputs,
        copy_checkpoints,
        delete_orphans,
        take_turns,
        apply_sleep_plan,
        publish_weights,
        give_up_stale_prompts,
        give_up_slots,
        release_slots,
        finish_job,
    )
    rules = standing_still if is_suspended(view) else working
    return tuple(intent for rule in rules for intent in rule(view) if intent.condition not in view.under_way)


def leave(view: JobView) -> Iterator[Intent]:
    """Mark the membership of a controller that is asked to end, so that others take its shards before its lease expires."""
    if view.leaving and not view.mirror.members[view.me].record.leaving:
        yield Intent(LeaveJob(), "leave")


MEMBERS_PATIENCE_S = 15.0
"""Seconds without a new member after which the prompts of a job with pictures are assigned to those that have joined."""


def assign_shards(view: JobView) -> Iterator[Intent]:
    """Assign every shard to a member whose node has engines in the plan; prompts of other members would never be
    sampled.

    A node that joined or returned after the plan was made has no engines. A leaving member gets no shards if there are others.

    The first member of a job with pictures waits for those of the other nodes with engines. Otherwise it would sample most
    prompts of the first step, and its blob store would send their blobs to the ranks of the other nodes.
    """
    mirror = view.mirror
    sources = (mirror.assign, mirror.plan, mirror.members)
    wanted = view.remembered.get("assignment", sources, lambda: _assignment(view))
    if wanted is not None:
        # The condition names the members, so a change of members restarts the delay.
        topic = f"assign {' '.join(wanted.members)}"
        there = {stored.record.node for stored in mirror.members.values()}
        new = mirror.assign is None or not mirror.assign.record.members
        waits = new and uses_blobs(view.spec) and not there >= set(view.plan.rollout_nodes)
        yield Intent(AssignShards(wanted), topic, view.turn(topic), after=MEMBERS_PATIENCE_S if waits else 0.1)


def _assignment(view: JobView) -> Assignment | None:
    """The assignment to write, or None if the present one is correct."""
    old = view.mirror.assign
    nodes = view.plan.rollout_nodes
    staying = {name: m for name, m in view.mirror.members.items() if not m.record.leaving} or view.mirror.members
    equipped = sorted(name for name, member in staying.items() if member.record.node in nodes)
    members = equipped or sorted(staying)
    if old is not None and sorted(old.record.members) == members and None not in old.record.owners:
        return None
    return shard_assignment(members, len(view.rules.shape.lengths), old.record if old else None)


def has_handed_over(view: JobView) -> bool:
    """Whether this leaving controller may end: other members have its shards, and no finished group would be lost with
    it. Also true if no other member can take over."""
    members = view.mirror.members
    mine = members.get(view.me)
    others = [name for name, member in members.items() if name != view.me and not member.record.leaving]
    if mine is None or not others:
        return True
    if not mine.record.leaving:
        return False
    if view.mirror.assign is None or view.me in view.mirror.assign.record.members:
        return False
    return not undelivered_refs(view)


def undelivered_refs(view: JobView) -> frozenset[PromptRef]:
    """The prompts whose groups or outcomes only this controller holds, because they are neither committed nor on every
    train rank."""
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
