"""Rules about the train world (the set of train ranks): when it is lost, replaced, enlarged or resized. Also how the
job ends.

A node that joins gets engines at once, by a change of the plan that keeps the train world. A larger world is formed
only between steps, when exactly the committed state is available, so that no training is lost, and only if it saves
clearly more time in the remaining steps than its start takes. If a placement policy moves slots (`placement.is_live`),
the policy decides on the size of the world and records it; any controller may then form the world.

Before a world is formed, each node reports which in-memory copies of train states it holds for the newest log entry
(head).

A job has succeeded when its last step is committed, and that step's checkpoint and evaluation are recorded. A job has
failed when its data contains nothing to train, when a worker cannot be started, or when several worlds in a row die
without a step. In all other cases a world that lost a rank is replaced (`controllers.job.rollback`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from controllers.rules.actions import ChangePlan, Intent, ReportCopies, Rollback, SetPhase
from controllers.rules.replication import HOLDERS_GRACE_S, newest_checkpoint_away, why_start_lost
from controllers.rules.view import SETTLE_S, JobView
from gcore.engines.emulated.launch import emulation_remark
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry, SealState, StateName, WorldState, head_state_names, whole_state
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import JobPhase, Move, MoveKind
from gcore.ledger.records.restart_reasons import OF_SHARES, PLACED, RESTORED, node_lost_reason
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.statistics import barren_epoch, explain_barren_epoch
from gcore.worker.records import WorkerRecord
from placement.placer import GrowthMeasurements, new_placer, worth_forming
from placement.request import PlacementRequest, count_lacking_slots, count_ranks
from placement.slots import NodeSlots, Snapshot, sizes_of, trim_to_replicas


@dataclass(frozen=True, slots=True)
class WorldLoss:
    """Why the train world cannot continue. `by_the_slots`: concluded from the records of open steps, so a controller
    that has not seen the newest ones may be wrong. `instance`: the worker whose end is the cause; empty: none."""

    why: str
    by_the_slots: bool = False
    instance: str = ""


def world_loss(view: JobView) -> WorldLoss | None:
    """Why the present train world cannot continue: a rank, its node or its slot is gone, a rank's state contradicts the
    store, or its start checkpoint is missing. None if it can."""
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
            lost = f"rank {place.rank} on {place.node} is gone"
            if place.node not in view.nodes:
                lost = node_lost_reason(place.rank, place.node)
            elif why := view.rank_failures.get(claim.instance):
                lost = f"rank {place.rank} on {place.node} failed: {why}"
            return WorldLoss(lost, instance=claim.instance)
        if worker.state in ("failed", "stopping"):
            why = f"rank {place.rank} on {place.node} failed: {worker.reason or worker.state}"
            return WorldLoss(why, instance=claim.instance)
    if why := _ahead(view):
        return WorldLoss(why, by_the_slots=True)
    why = why_start_lost(view)
    return WorldLoss(why) if why else None


def note_rank_failures(
    known: Mapping[str, str], mirror: JobMirror, workers: Mapping[str, WorkerRecord]
) -> Mapping[str, str]:
    """Why claimed train ranks failed, by instance: `known` and what `workers` report now. A failed worker stays registered only
    for seconds, and the next world may have to wait longer."""
    claimed = {stored.record.instance for stored in mirror.claims.values()}
    found = ((one, workers[one]) for one in claimed & workers.keys())
    failed = {one: worker.reason for one, worker in found if worker.state == "failed" and worker.reason}
    return {one: why for one, why in {**known, **failed}.items() if one in claimed}


def _ahead(view: JobView) -> str:
    """Sentence that says how a rank's state contradicts the store; empty if none does. The cause is an older backup of
    etcd that was restored; the rank would ignore later requests as outdated.

    A rank that is one step ahead of head is normal if that step is sealed: it is not committed yet. If this controller
    has just not seen the newest head or seal, the compares of the rollback fail.
    """
    head, seal = view.head, view.seal
    back = f"{RESTORED} of step {head.step}"
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
"""If a node is absent for this long, its judge engines are started elsewhere. A restarted node is back by then."""

GROW_AFTER_S = 1.0
"""Delay between a commit and the formation of a larger world; by then the nodes have reported their copies."""

HOLD_S = 5.0
"""Maximum time that a batch is held back so that a larger world can be formed; then the present world trains it."""

STOCK_PATIENCE_S = 3.0
"""Additional delay of a rollback while a node has not reported its in-memory copies."""

MAX_TRIES_FROM_COPIES = 2
"""Maximum number of consecutive worlds that start from in-memory copies without a step in between; the next one starts
from a checkpoint."""


def report_copies(view: JobView) -> Iterator[Intent]:
    """Report which in-memory copies of train states this node holds, if a new train world is about to be formed."""
    if not may_use_copies(view) or not (world_loss(view) or growth_reason(view)):
        return
    known = view.mirror.copies.get(view.node)
    if known is None or known.record.by != view.me or known.record.seq != view.head.seq:
        yield Intent(ReportCopies(view.head.seq), f"stock {view.head.seq}")


def add_engines(view: JobView) -> Iterator[Intent]:
    """Add engines on nodes and slots that came after the plan was made. The train world stays."""
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
    """Start engines elsewhere whose nodes are absent. This rule handles the loss of nodes without a train rank; if a
    rank is lost, everything is placed anew with the next train world."""
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
    """Between two steps, replace the train world by a larger one, or by one of the size that a placement policy wants.
    It starts from exactly the committed state."""
    why = growth_reason(view)
    if not why or world_loss(view) or not is_between_steps(view) or not is_state_at_hand(view):
        return
    topic, move = f"grow {view.head.seq}", wanted_world(view)
    split = None if move is None else move.after
    yield Intent(
        Rollback(why, between_steps=True, slots_as_seen=True, split=split), topic, view.turn(topic), after=GROW_AFTER_S
    )


def awaits_world(view: JobView) -> bool:
    """Whether a train world that a placement policy wants may still be formed, so that the plan must not be changed
    otherwise."""
    return wanted_world(view) is not None and growth_delay_s(view) > 0


def growth_delay_s(view: JobView) -> float:
    """Seconds that a batch, or its first part, is held back before it is marked READY, so that a world of another size
    can be formed even if the next batch is complete right after a commit. 0 if none is to be formed."""
    if not growth_reason(view) or world_loss(view) or not is_between_steps(view):
        return 0.0
    return HOLD_S if is_state_at_hand(view) or (may_use_copies(view) and unreported_nodes(view)) else 0.0


def growth_reason(view: JobView) -> str:
    """Why a train world of another size should be formed now; empty if it should not. Never twice without a step in
    between, and not before every registered node works on the job: a rank on a node that still downloads the model
    would delay all others."""
    mirror = view.mirror
    sources = (view.rules, mirror.plan, mirror.log, mirror.head, mirror.members, view.nodes, view.share, mirror.movings)
    return view.remembered.get("growth", sources, lambda: _growth(view))


def wanted_world(view: JobView) -> Move | None:
    """The recorded wish of a placement policy for a train world of another size, if it is based on the present head and
    plan."""
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
        return "" if move is None or view.is_over else f"{PLACED}: {move.reason}"
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
    """Whether no step or part of a step is READY, so that a change of the train world loses no training. A sealed batch
    that is not READY is sealed again for the new world; its groups stay with their holders."""
    seal = view.seal
    return seal is None or (seal.state is not SealState.READY and not seal.ready_parts)


def is_state_at_hand(view: JobView) -> bool:
    """Whether a new train world can start from exactly the committed state: from a checkpoint of head's step, or from
    in-memory copies."""
    saved = resumable_checkpoints(view.head, view.checkpoints)
    return (bool(saved) and saved[0].step == view.head.step) or state_at_hand(view, frozenset(view.nodes)) is not None


def state_at_hand(view: JobView, nodes: frozenset[str]) -> WorldState | None:
    """Where the complete train state of head's step is in the memory of `nodes`, according to their reports; None if it
    is incomplete."""
    if not may_use_copies(view):
        return None
    held = {n: stored.record for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return whole_state(_names_of_head(view), held, nodes)


def unreported_nodes(view: JobView) -> frozenset[str]:
    """The nodes of members that have not reported their in-memory copies for this head; empty if copies may not be
    used."""
    if not may_use_copies(view):
        return frozenset()
    reported = {n for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return frozenset(m.record.node for m in view.mirror.members.values()) - reported


def may_use_copies(view: JobView) -> bool:
    """Whether a new train world may start from in-memory copies: the spec enables them, head contains a trained step,
    and not too many worlds in a row have died after they started from copies."""
    return (
        view.spec.train.copies_gb != 0
        and bool(_names_of_head(view))
        and tries_from_copies(view) < MAX_TRIES_FROM_COPIES
    )


def tries_from_copies(view: JobView) -> int:
    """The number of train worlds that started from in-memory copies since the newest trained step."""
    return view.remembered.get("tries from copies", (view.mirror.log,), lambda: _tries_from_copies(view))


def _tries_from_copies(view: JobView) -> int:
    count = 0
    for _, entry in sorted(view.log.items(), reverse=True):
        if entry.kind == "train":
            break
        count += entry.state is not None
    return count


def newest_step(view: JobView) -> LogEntry | None:
    """The log entry of the newest trained step; None if a rollback came after it."""
    log = view.log
    entry = log.get(view.head.seq)
    while entry is not None and entry.kind == "account":
        entry = None if entry.parent is None else log.get(entry.parent)
    return entry if entry is not None and entry.kind == "train" else None


def _names_of_head(view: JobView) -> tuple[StateName, ...]:
    """The names under which ranks may hold the train state of head's step, the most reliable first; empty if it is the
    base model."""
    sources = (view.mirror.head, view.mirror.log)
    return view.remembered.get("names of head", sources, lambda: head_state_names(view.head, view.log))


def placement_snapshot(view: JobView) -> Snapshot:
    """The registered nodes with the slots that are granted to the job, in whole replicas."""
    return view.remembered.get("snapshot", (view.nodes, view.share), lambda: _snapshot(view))


def _snapshot(view: JobView) -> Snapshot:
    nodes = [NodeSlots(record.name, record.slots, record.facts) for record in view.nodes.values()]
    if view.share is not None:
        granted = view.share.share.granted
        own = (replace(one, slots=tuple(s for s in one.slots if s in granted.get(one.node, ()))) for one in nodes)
        nodes = [one for one in own if one.slots]
    return trim_to_replicas(Snapshot(tuple(nodes)), sizes_of(view.spec))


def model_configs(mirror: JobMirror) -> ModelConfigs | None:
    """The config.json contents of the job's models as the job's record has them; None if they were not recorded."""
    return None if mirror.job is None else mirror.job.record.models


def placeable_nodes(view: JobView) -> Snapshot:
    """`placement_snapshot` without the nodes that still download the model; a train rank there would delay all
    others."""
    joined = {stored.record.node for stored in view.mirror.members.values()}
    fetches = (stored.record for stored in view.mirror.fetches.values())
    fetching = {fetch.node for fetch in fetches if fetch.done < fetch.total} - joined if joined else set()
    return Snapshot(tuple(one for one in placement_snapshot(view).nodes if one.node not in fetching))


def lacking_slots(view: JobView) -> str:
    """Why the job cannot be placed on the present slots, as a sentence for users; empty if it can.

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


NODE_GRACE_S = 15.0
"""Delay before a world with an absent node is placed on the other nodes."""

LONGEST_PAUSE_S = 30.0
"""Maximum delay between worlds that die one after the other; the delay doubles each time."""

MAX_FRUITLESS_ROLLBACKS = 5
"""A job fails after this many consecutive worlds died without a commit."""


def fail_barren_job(view: JobView) -> Iterator[Intent]:
    """Fail a job whose data contained nothing to train for a whole epoch, because the next epoch would be the same.

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
    """Replace a train world that cannot continue, after a delay. Fail the job instead if a worker cannot be started, or
    too many worlds in a row have died."""
    if is_complete(view):
        return
    head = view.head
    lost = world_loss(view)
    fruitless = fruitless_rollbacks(view)
    if view.failed_start or (lost is not None and fruitless >= MAX_FRUITLESS_ROLLBACKS):
        last = lost.why + _log_of(lost, view) if lost is not None else ""
        why = view.failed_start or f"{fruitless} train worlds in a row died without completing a step; the last: {last}"
        settled = 0.0 if view.failed_start else SETTLE_S
        yield Intent(SetPhase(JobPhase.FAILED, why), f"fail {head.world}", view.turn("fail"), after=settled)
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
    """The path of the log of the worker that caused the loss, as a remark in brackets; empty if there is none."""
    if not lost.instance or view.mirror.job is None:
        return ""
    return f" (its log: {view.mirror.job.record.run_dir}/logs/{lost.instance}.log)"


def fruitless_rollbacks(view: JobView) -> int:
    """The number of unplanned rollbacks since the newest trained step."""
    count = 0
    for _, entry in sorted(view.log.items(), reverse=True):
        if entry.kind == "train":
            break
        if entry.raised is not None:  # earlier entries belong to the job before its extension
            break
        count += entry.kind == "rollback" and not entry.reason.startswith(OF_SHARES)
    return count


def finish_job(view: JobView) -> Iterator[Intent]:
    """Mark the job as succeeded when it is complete (`is_complete`)."""
    if is_complete(view):
        done = SetPhase(JobPhase.SUCCEEDED, _how_it_ended(view), at_head=True)
        yield Intent(done, "finish", view.turn("finish"))


def is_complete(view: JobView) -> bool:
    """Whether nothing is left to do: all steps are committed, the last checkpoint is registered, and the last
    evaluation is recorded."""
    head = view.head
    return (
        view.is_over
        and head.step > 0
        and any(c.step == head.step for c in resumable_checkpoints(head, view.checkpoints))
        and (not view.is_evaluated_after(head.step, last=True) or str(head.version) in view.mirror.evaluations)
    )


def _how_it_ended(view: JobView) -> str:
    """Sentence that says what a successful job did."""
    epochs, steps = view.rules.epochs, view.head.step
    failed = sum(one.failed for one in view.head.tally.sources.values())
    said = f"; {failed} prompt{'s' * (failed > 1)} failed (see the job's events for the reasons)" if failed else ""
    said += emulation_remark(place.slot for place in view.plan.engines)
    if epochs is None:
        return f"all {steps} steps were trained{said}"
    through = "the data epoch" if epochs == 1 else f"all {epochs} data epochs"
    return f"every prompt of {through} was processed, in {steps} steps{said}"
