"""The train world: when it is lost, recovered, grown or resized, and how the job ends.

A node that joins gets its engines at once, by a change of the plan that keeps the world. The world is formed again only between steps, when
head's state is available, so that no training is lost, and only if a larger world saves clearly more time in the remaining steps than its
start takes. If a placement policy moves slots (`placement.is_live`), the policy decides the world's size and records it; any controller may
form the world.

Before a world is formed, each node reports once, for that head, which copies of train states are in its memory.

A job has succeeded when its last step, that step's checkpoint and its evaluation are on head's chain. A job has failed when its data contains
nothing to train, when a worker cannot be started, or when several worlds in a row die without a step. Otherwise a world that lost a
rank is replaced (`controllers.job.rollback`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from controllers.rules.actions import ChangePlan, Intent, ReportCopies, Rollback, SetPhase
from controllers.rules.replication import HOLDERS_GRACE_S, newest_checkpoint_away, why_start_lost
from controllers.rules.view import SETTLE_S, JobView
from gcore.engines.emulated.launch import emulation_remark
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry, SealState, StateName, WorldState, head_state_names, whole_state
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import JobPhase, Move, MoveKind
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.statistics import barren_epoch, explain_barren_epoch
from placement.placer import GrowthMeasurements, new_placer, worth_forming
from placement.request import PlacementRequest, count_lacking_slots, count_ranks
from placement.slots import NodeSlots, Snapshot, sizes_of, trim_to_replicas


@dataclass(frozen=True, slots=True)
class WorldLoss:
    """Why a world cannot continue. `by_the_slots`: derived from the open steps, so a controller that has not seen one yet may be wrong.
    `instance`: the worker that caused the loss, if one did."""

    why: str
    by_the_slots: bool = False
    instance: str = ""


def world_loss(view: JobView) -> WorldLoss | None:
    """Why head's world cannot continue, or None."""
    return view.remembered.get("lost", (view,), lambda: _lost_world(view))  # used by several rules


def _lost_world(view: JobView) -> WorldLoss | None:
    head = view.head
    for place in view.plan.ranks:
        claim = view.mirror.claim(head.world, place.rank)
        if claim is None:
            if place.node not in view.nodes:
                return WorldLoss(f"{place.node}, which should run rank {place.rank}, is gone")
            if view.has_lost(place.node, (place.slot,)):
                return WorldLoss(f"{place.node} lost slot {place.slot}, which should run rank {place.rank}")
            continue
        worker = view.workers.get(claim.instance)
        if worker is None:
            return WorldLoss(f"rank {place.rank} on {place.node} is gone", instance=claim.instance)
        if worker.state in ("failed", "stopping"):
            why = f"rank {place.rank} on {place.node} failed: {worker.reason or worker.state}"
            return WorldLoss(why, instance=claim.instance)
    if why := _ahead(view):
        return WorldLoss(why, by_the_slots=True)
    why = why_start_lost(view)
    return WorldLoss(why) if why else None


def _ahead(view: JobView) -> str:
    """Why a rank's state contradicts the store: etcd was restored from an older backup. The rank would ignore later requests as outdated.

    A rank that is one step ahead of head has trained a step that is not committed yet, if the step's seal exists. If only this controller has
    not seen head or the seal yet, the compares of the rollback fail.
    """
    head, seal = view.head, view.seal
    back = f"etcd was restored from a backup of step {head.step}"
    for rank in view.ranks.values():
        applied = rank.applied
        if view.begun(rank) and view.contradicts(rank):
            return f"rank {rank.rank} has started parts of step {head.step + 1} that are not in its seal: {back}"
        if applied is None or applied.lineage != head.lineage or applied.step <= head.step:
            continue
        if view.contradicts(rank):
            return f"rank {rank.rank} has trained a batch for step {applied.step} that differs from its seal: {back}"
        if applied.step > head.step + 1 or seal is None or seal.collects:
            return f"rank {rank.rank} has trained step {applied.step}, which the store does not contain: {back}"
    return ""


JOIN_SETTLE_S = 2.0
"""Delay after a node joins, because several nodes often join together."""

AWAY_S = 15.0
"""If a node is away for this long, the engines of its judges are started elsewhere. A restarted node is back by then."""

GROW_AFTER_S = 1.0
"""Delay between a commit and the formation of a larger world; by then the nodes have reported their copies."""

HOLD_S = 5.0
"""Maximum delay of a batch for a larger world; afterwards the current world trains it."""

STOCK_PATIENCE_S = 3.0
"""Extra delay of a rollback while a node has not reported its copies."""

MAX_TRIES_FROM_COPIES = 2
"""Consecutive worlds that may start from copies without a step in between; the next one starts from a checkpoint."""


def report_copies(view: JobView) -> Iterator[Intent]:
    """Report which copies this node's memory holds, if a world is about to be formed."""
    if not may_use_copies(view) or not (world_loss(view) or growth_reason(view)):
        return
    known = view.mirror.copies.get(view.node)
    if known is None or known.record.by != view.me or known.record.seq != view.head.seq:
        yield Intent(ReportCopies(view.head.seq), f"stock {view.head.seq}")


def add_engines(view: JobView) -> Iterator[Intent]:
    """Add engines on nodes that joined after the plan was made; the world stays as it is."""
    stored = view.mirror.plan
    assert stored is not None
    plan = view.remembered.get(
        "joined",
        (stored, view.nodes, view.share),
        lambda: new_placer(view.spec).with_new_nodes(stored.record, placement_snapshot(view)),
    )
    if plan is not None and not view.is_over:
        topic = f"replan {plan.generation} {' '.join(sorted(view.nodes))}"
        yield Intent(ChangePlan(plan), topic, view.turn(topic), after=JOIN_SETTLE_S)


def relocate_judges(view: JobView) -> Iterator[Intent]:
    """Start the judges' engines of absent nodes elsewhere. If a rank is lost, the whole world is placed again with all judges, so this rule only
    handles the loss of nodes without a rank."""
    stored = view.mirror.plan
    assert stored is not None
    plan = view.remembered.get(
        "moved",
        (stored, view.nodes, view.share),
        lambda: new_placer(view.spec).without_nodes(stored.record, placement_snapshot(view)),
    )
    if plan is not None and not view.is_over and not world_loss(view):
        topic = f"move judges {plan.generation} {' '.join(sorted(view.nodes))}"
        yield Intent(ChangePlan(plan), topic, view.turn(topic), after=AWAY_S)


def resize_world(view: JobView) -> Iterator[Intent]:
    """Form a world of another size right after a step, from exactly head's state: a larger one, or the one that a policy wants."""
    why = growth_reason(view)
    if not why or world_loss(view) or not is_between_steps(view) or not is_state_at_hand(view):
        return
    topic, move = f"grow {view.head.seq}", wanted_world(view)
    split = None if move is None else move.after
    yield Intent(
        Rollback(why, between_steps=True, slots_as_seen=True, split=split), topic, view.turn(topic), after=GROW_AFTER_S
    )


def awaits_world(view: JobView) -> bool:
    """Whether a train world that a policy wants may still be formed. Other changes of the plan would prevent it."""
    return wanted_world(view) is not None and growth_delay_s(view) > 0


def growth_delay_s(view: JobView) -> float:
    """Seconds that a batch, or its first part, is held before it is READY, so that a larger world can be formed even if batches follow at once."""
    if not growth_reason(view) or world_loss(view) or not is_between_steps(view):
        return 0.0
    return HOLD_S if is_state_at_hand(view) or (may_use_copies(view) and unreported_nodes(view)) else 0.0


def growth_reason(view: JobView) -> str:
    """Why a larger world is worth its start; empty if it is not. Never twice without a step in between, and not before every registered node
    works on the job: a rank on a node that still downloads the model would delay all others."""
    mirror = view.mirror
    sources = (view.rules, mirror.plan, mirror.log, mirror.head, mirror.members, view.nodes, view.share, mirror.movings)
    return view.remembered.get("growth", sources, lambda: _growth(view))


def wanted_world(view: JobView) -> Move | None:
    """The change to another world size that a policy wants, if it applies to this head and plan."""
    move = view.mirror.moves.newest
    if (
        move is None
        or view.mirror.plan is None
        or view.mirror.pin.frozen
        or move.state != "wanted"
        or move.kind is not MoveKind.WORLD
    ):
        return None
    plan = view.mirror.plan.record
    return move if (move.seq, move.generation) == (view.head.seq, plan.generation + 1) else None


def _growth(view: JobView) -> str:
    if view.spec.placement.is_live:
        move = wanted_world(view)
        return "" if move is None or view.is_over else f"placement: {move.reason}"
    entry = newest_step(view)
    ready = {stored.record.node for stored in view.mirror.members.values()}
    if view.is_over or entry is None or entry.lineage != view.head.lineage or not ready >= view.nodes.keys():
        return ""
    now, there = len(view.plan.ranks), view.spec.flow.steps
    wanted = count_ranks(placement_snapshot(view), PlacementRequest.by(view.spec))
    left = None if there is None else there - view.head.step
    seconds = entry.stats.get("train_s"), entry.stats.get("start_seconds")
    return worth_forming(GrowthMeasurements(now, wanted, train_s=seconds[0], start_s=seconds[1], steps_left=left))


def is_between_steps(view: JobView) -> bool:
    """Whether no step, nor a part of one, is being trained. Its groups stay with their holders and are sealed again for the new world."""
    seal = view.seal
    return seal is None or (seal.state is not SealState.READY and not seal.ready_parts)


def is_state_at_hand(view: JobView) -> bool:
    """Whether a new world can start from exactly head's state."""
    saved = resumable_checkpoints(view.head, view.checkpoints)
    return (bool(saved) and saved[0].step == view.head.step) or state_at_hand(view, frozenset(view.nodes)) is not None


def state_at_hand(view: JobView, nodes: frozenset[str]) -> WorldState | None:
    """Head's state, if the nodes' memory contains all of it according to their reports for this head."""
    if not may_use_copies(view):
        return None
    held = {n: stored.record for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return whole_state(_names_of_head(view), held, nodes)


def unreported_nodes(view: JobView) -> frozenset[str]:
    """The members' nodes that have not reported their copies, if copies may be used."""
    if not may_use_copies(view):
        return frozenset()
    heard = {n for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return frozenset(m.record.node for m in view.mirror.members.values()) - heard


def may_use_copies(view: JobView) -> bool:
    """Whether a new world may start from copies: copies are made, head contains a trained step, and not too many worlds in a row have failed
    to start from copies."""
    return (
        view.spec.train.copies_gb != 0
        and bool(_names_of_head(view))
        and tries_from_copies(view) < MAX_TRIES_FROM_COPIES
    )


def tries_from_copies(view: JobView) -> int:
    """Worlds that started from copies since the newest step."""
    return view.remembered.get("tries from copies", (view.mirror.log,), lambda: _tries_from_copies(view))


def _tries_from_copies(view: JobView) -> int:
    count = 0
    for _, entry in sorted(view.log.items(), reverse=True):
        if entry.kind == "train":
            break
        count += entry.state is not None
    return count


def newest_step(view: JobView) -> LogEntry | None:
    """The log entry of head's step, if head's world trained it."""
    log = view.log
    entry = log.get(view.head.seq)
    while entry is not None and entry.kind == "account":
        entry = None if entry.parent is None else log.get(entry.parent)
    return entry if entry is not None and entry.kind == "train" else None


def _names_of_head(view: JobView) -> tuple[StateName, ...]:
    """The names of the states that ranks reported when they had trained head's step."""
    sources = (view.mirror.head, view.mirror.log)
    return view.remembered.get("names of head", sources, lambda: head_state_names(view.head, view.log))


def placement_snapshot(view: JobView) -> Snapshot:
    """The nodes and slots on which a train world may be placed now."""
    return view.remembered.get("snapshot", (view.nodes, view.share), lambda: _snapshot(view))


def _snapshot(view: JobView) -> Snapshot:
    nodes = [NodeSlots(record.name, record.slots, record.facts) for record in view.nodes.values()]
    if view.share is not None:
        granted = view.share.share.granted
        own = (replace(one, slots=tuple(s for s in one.slots if s in granted.get(one.node, ()))) for one in nodes)
        nodes = [one for one in own if one.slots]
    return trim_to_replicas(Snapshot(tuple(nodes)), sizes_of(view.spec))


def model_configs(mirror: JobMirror) -> ModelConfigs | None:
    """The configurations of the job's models, if they were recorded."""
    return None if mirror.job is None else mirror.job.record.models


def placeable_nodes(view: JobView) -> Snapshot:
    """The nodes that may get a train rank now: not those that still download the model, which would delay all others."""
    joined = {stored.record.node for stored in view.mirror.members.values()}
    fetches = (stored.record for stored in view.mirror.fetches.values())
    fetching = {fetch.node for fetch in fetches if fetch.done < fetch.total} - joined if joined else set()
    return Snapshot(tuple(one for one in placement_snapshot(view).nodes if one.node not in fetching))


def lacking_slots(view: JobView) -> str:
    """Why a train world cannot be placed now, as a sentence for users; empty if it fits.

    Nodes register one by one, also after a restart, so the job waits for slots and does not fail without them.
    """
    there, job = placeable_nodes(view), PlacementRequest.by(view.spec)
    first = view.mirror.plan is None
    lacking = count_lacking_slots(there, job, first=first)
    if not lacking:
        return ""
    apart = job.has_own_slots or (first and job.train is not None)
    wanted = there.slots + lacking if apart else count_ranks(there, job) or 1
    names = ", ".join(sorted(node.node for node in there.nodes)) or "no node"
    if apart:
        what, fix = f"the pools need {wanted} slots", "start a new job with fewer slots in placement"
    else:
        what = "1 train rank needs a slot" if wanted == 1 else f"{wanted} train ranks need as many slots"
        fix = "start a new job with fewer train.ranks"
    widest = sizes_of(view.spec).widest
    counts = f" in whole engines of {widest} slots" * (widest > 1)
    return (
        f"{what}, but only {there.slots}{counts} are available (on {names}); the job continues when {lacking} more "
        f"{'is' if lacking == 1 else 'are'} available. Start the missing controllers, or {fix}"
    )


GAVE_BACK = "slots go to other jobs"
LEFT = "its slots are given back"
HAS_AGAIN = "it has slots again"

OF_SHARES = (GAVE_BACK, LEFT, HAS_AGAIN)
"""Prefixes of the reasons of planned rollbacks. Stored log entries contain them, so they must not change."""

NODE_GRACE_S = 15.0
"""Delay before a world with an absent node is placed on the other nodes."""

LONGEST_PAUSE_S = 30.0
"""Maximum delay between worlds that die one after the other; the delay doubles each time."""

MAX_FRUITLESS_ROLLBACKS = 5
"""A job fails after this many consecutive worlds died without a commit."""


def fail_barren_job(view: JobView) -> Iterator[Intent]:
    """Fail a job whose data gave nothing to train for a whole epoch, because the next epoch would give the same.

    Not while a group of a later epoch is offered or sealed.
    """
    head = view.head
    epoch = barren_epoch(view.rules.shape, head)
    if epoch is None or (view.is_over and head.step > 0):
        return
    if not view.offered.groups and not any(stored.record.groups for stored in view.mirror.seals.values()):
        why = explain_barren_epoch(epoch, view.log.values())
        yield Intent(SetPhase(JobPhase.FAILED, str(why), at_head=True), "barren", view.turn("barren"))


def recover_world(view: JobView) -> Iterator[Intent]:
    """Replace a world that lost a rank, in a new lineage: from copies of head's state, or from a checkpoint."""
    if is_complete(view):
        return
    head = view.head
    lost = world_loss(view)
    fruitless = fruitless_rollbacks(view)
    if view.failed_start or (lost is not None and fruitless >= MAX_FRUITLESS_ROLLBACKS):
        last = lost.why + _log_of(lost, view) if lost is not None else ""
        why = view.failed_start or f"{fruitless} train worlds in a row died without completing a step; the last: {last}"
        yield Intent(SetPhase(JobPhase.FAILED, why), "fail", view.turn("fail"))
    elif lost is not None:
        away = {place.node for place in view.plan.ranks} - view.nodes.keys()
        after = max(NODE_GRACE_S if away else 0.0, min(SETTLE_S * 2**fruitless, LONGEST_PAUSE_S))
        if unreported_nodes(view):
            after = max(after, SETTLE_S + STOCK_PATIENCE_S)
        if newest_checkpoint_away(view) and state_at_hand(view, frozenset(view.nodes)) is None:
            after = max(after, HOLDERS_GRACE_S)
        topic = f"world {head.world}"
        action = Rollback(lost.why, slots_as_seen=lost.by_the_slots)
        yield Intent(action, f"{topic} {sorted(away)}", view.turn(topic), after=after)


def _log_of(lost: WorldLoss, view: JobView) -> str:
    """The log of the worker that caused the loss, as a remark."""
    if not lost.instance or view.mirror.job is None:
        return ""
    return f" (its log: {view.mirror.job.record.run_dir}/logs/{lost.instance}.log)"


def fruitless_rollbacks(view: JobView) -> int:
    """Rollbacks since the last commit."""
    count = 0
    for _, entry in sorted(view.log.items(), reverse=True):
        if entry.kind == "train":
            break
        if entry.raised is not None:  # earlier entries belong to the job before its extension
            break
        count += entry.kind == "rollback" and not entry.reason.startswith(OF_SHARES)
    return count


def finish_job(view: JobView) -> Iterator[Intent]:
    """Mark the job as succeeded: all steps are committed, the last checkpoint is registered and the last evaluation is done."""
    if is_complete(view):
        done = SetPhase(JobPhase.SUCCEEDED, _how_it_ended(view), at_head=True)
        yield Intent(done, "finish", view.turn("finish"))


def is_complete(view: JobView) -> bool:
    """Whether nothing is left to do."""
    head = view.head
    return (
        view.is_over
        and head.step > 0
        and any(c.step == head.step for c in resumable_checkpoints(head, view.checkpoints))
        and (not view.is_evaluated_after(head.step, last=True) or str(head.version) in view.mirror.evaluations)
    )


def _how_it_ended(view: JobView) -> str:
    epochs, steps = view.rules.epochs, view.head.step
    failed = sum(one.failed for one in view.head.tally.sources.values())
    said = f"; {failed} prompt{'s' * (failed > 1)} failed (see the job's events for the reasons)" if failed else ""
    said += emulation_remark(place.slot for place in view.plan.engines)
    if epochs is None:
        return f"all {steps} steps were trained{said}"
    through = "the data epoch" if epochs == 1 else f"all {epochs} data epochs"
    return f"every prompt of {through} was processed, in {steps} steps{said}"
