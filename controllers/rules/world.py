"""The train world: whether it is lost, when it is recovered, grown or resized, and how the job ends.

A node that joins gets its engines at once, by a change of the plan that leaves the world alone. The world is formed again only
between steps, when head's state is at hand, so that no training is lost, and only if a larger world saves clearly more time in the
remaining steps than its start takes.
Where a policy moves slots (`placement.is_live`) it decides on the world's size and writes it down; any controller may form it.

Before a world is formed, each node writes down once, for that head, which copies of train states are in its memory.

A job has succeeded when its last step and the checkpoint and evaluation of that step are on head's chain. It has failed when its data
bring nothing to train, when a worker cannot be started, or when world after world dies without a step between them. A world
that lost a rank is otherwise replaced (`controllers.job.rollback`).
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
    """Why a world cannot go on. `by_the_slots`: the open steps tell it, so that who has not heard of one yet may be mistaken. `instance`:
    the worker by which it is lost, if it is one's doing."""

    why: str
    by_the_slots: bool = False
    instance: str = ""


def world_loss(view: JobView) -> WorldLoss | None:
    """Whether and why head's world cannot go on."""
    return view.remembered.get("lost", (view,), lambda: _lost_world(view))  # several rules ask


def _lost_world(view: JobView) -> WorldLoss | None:
    head = view.head
    for place in view.plan.ranks:
        claim = view.mirror.claim(head.world, place.rank)
        if claim is None:
            if place.node not in view.nodes:
                return WorldLoss(f"{place.node}, which was to run rank {place.rank}, is gone")
            if view.has_lost(place.node, (place.slot,)):
                return WorldLoss(f"{place.node} has no slot {place.slot} any more, which was to run rank {place.rank}")
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
    """Whether a rank stands where no record of the store could have brought it: the store was put back to an older state, from
    a backup. It would drop all that it is told from now on as long past.

    A rank that is a step ahead has trained what is not committed yet, if its seal is there. If it is only head, or the seal, that
    this controller has not heard of, the rollback's compares fail.
    """
    head, seal = view.head, view.seal
    back = f"the store was put back to step {head.step}"
    for rank in view.ranks.values():
        applied = rank.applied
        if view.begun(rank) and view.contradicts(rank):
            return f"rank {rank.rank} has begun other parts of step {head.step + 1} than its seal names: {back}"
        if applied is None or applied.lineage != head.lineage or applied.step <= head.step:
            continue
        if view.contradicts(rank):
            return f"rank {rank.rank} has trained another batch as step {applied.step} than its seal names: {back}"
        if applied.step > head.step + 1 or seal is None or seal.collects:
            return f"rank {rank.rank} has trained step {applied.step}, of which the store knows nothing: {back}"
    return ""


JOIN_SETTLE_S = 2.0
"""A node that comes is looked at twice: several often come together."""

AWAY_S = 15.0
"""A node that is away for so long has its judges' engines started elsewhere; one that is merely restarted is back by then."""

GROW_AFTER_S = 1.0
"""Between a commit and the forming of a larger world: the others have said by then what lies in their memory."""

HOLD_S = 5.0
"""A batch waits at most so long for a larger world; then the present one trains it."""

STOCK_PATIENCE_S = 3.0
"""A rollback waits so much longer while some node has not reported which copies it has."""

MAX_TRIES_FROM_COPIES = 2
"""Worlds in a row that may start from copies without a step between them; the next starts from a checkpoint."""


def report_copies(view: JobView) -> Iterator[Intent]:
    """Say which copies lie in this node's memory, when a world is about to be formed anew."""
    if not may_use_copies(view) or not (world_loss(view) or growth_reason(view)):
        return
    known = view.mirror.copies.get(view.node)
    if known is None or known.record.by != view.me or known.record.seq != view.head.seq:
        yield Intent(ReportCopies(view.head.seq), f"stock {view.head.seq}")


def add_engines(view: JobView) -> Iterator[Intent]:
    """Nodes that came after the plan was made get engines; the world stays as it is."""
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
    """Judges of nodes that stay away get engines elsewhere. A lost rank's world is placed anew with all its judges, so only the
    loss of nodes without a rank is met here."""
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
    """Form a world of another size, right after a step, from exactly head's state: a larger one, or the one that a policy wants."""
    why = growth_reason(view)
    if not why or world_loss(view) or not is_between_steps(view) or not is_state_at_hand(view):
        return
    topic, move = f"grow {view.head.seq}", wanted_world(view)
    split = None if move is None else move.after
    yield Intent(
        Rollback(why, between_steps=True, slots_as_seen=True, split=split), topic, view.turn(topic), after=GROW_AFTER_S
    )


def awaits_world(view: JobView) -> bool:
    """Whether a train world that a policy wants may still be formed: every change of the plan before that would be in its way."""
    return wanted_world(view) is not None and growth_delay_s(view) > 0


def growth_delay_s(view: JobView) -> float:
    """Seconds that a batch, or its first part, waits before it is READY, so that a larger world gets its moment where batches come at once."""
    if not growth_reason(view) or world_loss(view) or not is_between_steps(view):
        return 0.0
    return HOLD_S if is_state_at_hand(view) or (may_use_copies(view) and unreported_nodes(view)) else 0.0


def growth_reason(view: JobView) -> str:
    """Why a larger world is worth its start, or nothing. Never twice without a step between, and not before every node that
    is there works on the job: a rank on one that still fetches the model would hold all the others up."""
    mirror = view.mirror
    sources = (view.rules, mirror.plan, mirror.log, mirror.head, mirror.members, view.nodes, view.share, mirror.movings)
    return view.remembered.get("growth", sources, lambda: _growth(view))


def wanted_world(view: JobView) -> Move | None:
    """The move by which a policy wants a train world of another size, if it is for this very head and plan."""
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
    """Whether no step is being trained, nor a part of one: its groups stay with their holders, and are sealed again for the new
    world."""
    seal = view.seal
    return seal is None or (seal.state is not SealState.READY and not seal.ready_parts)


def is_state_at_hand(view: JobView) -> bool:
    """Whether a new world can start from exactly head's state."""
    saved = resumable_checkpoints(view.head, view.checkpoints)
    return (bool(saved) and saved[0].step == view.head.step) or state_at_hand(view, frozenset(view.nodes)) is not None


def state_at_hand(view: JobView, nodes: frozenset[str]) -> WorldState | None:
    """Head's state, if it lies whole in the memory of `nodes`, as they said after head came to be what it is."""
    if not may_use_copies(view):
        return None
    held = {n: stored.record for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return whole_state(_names_of_head(view), held, nodes)


def unreported_nodes(view: JobView) -> frozenset[str]:
    """The members' nodes which have not said which copies lie in their memory, if that matters."""
    if not may_use_copies(view):
        return frozenset()
    heard = {n for n, stored in view.mirror.copies.items() if stored.record.seq == view.head.seq}
    return frozenset(m.record.node for m in view.mirror.members.values()) - heard


def may_use_copies(view: JobView) -> bool:
    """Whether a new world may start from copies: they are made, there is something in head that was trained, and not one world after
    the other has tried in vain."""
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
    """The entry of head's step, if head's world trained it."""
    log = view.log
    entry = log.get(view.head.seq)
    while entry is not None and entry.kind == "account":
        entry = None if entry.parent is None else log.get(entry.parent)
    return entry if entry is not None and entry.kind == "train" else None


def _names_of_head(view: JobView) -> tuple[StateName, ...]:
    """Of the states that ranks named when they had trained head's step."""
    sources = (view.mirror.head, view.mirror.log)
    return view.remembered.get("names of head", sources, lambda: head_state_names(view.head, view.log))


def placement_snapshot(view: JobView) -> Snapshot:
    """The nodes on which a train world may be placed now."""
    return view.remembered.get("snapshot", (view.nodes, view.share), lambda: _snapshot(view))


def _snapshot(view: JobView) -> Snapshot:
    nodes = [NodeSlots(record.name, record.slots, record.facts) for record in view.nodes.values()]
    if view.share is not None:
        granted = view.share.share.granted
        own = (replace(one, slots=tuple(s for s in one.slots if s in granted.get(one.node, ()))) for one in nodes)
        nodes = [one for one in own if one.slots]
    return trim_to_replicas(Snapshot(tuple(nodes)), sizes_of(view.spec))


def model_configs(mirror: JobMirror) -> ModelConfigs | None:
    """The configurations of the job's models, if they were kept."""
    return None if mirror.job is None else mirror.job.record.models


def placeable_nodes(view: JobView) -> Snapshot:
    """The nodes that may take a train world now: not those that still fetch the model, which would hold all others up."""
    joined = {stored.record.node for stored in view.mirror.members.values()}
    fetches = (stored.record for stored in view.mirror.fetches.values())
    fetching = {fetch.node for fetch in fetches if fetch.done < fetch.total} - joined if joined else set()
    return Snapshot(tuple(one for one in placement_snapshot(view).nodes if one.node not in fetching))


def lacking_slots(view: JobView) -> str:
    """Why a train world cannot be placed now, for people; empty if it fits.

    Nodes come one by one, after a restart too, so a job waits for them and does not fail for want of them.
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
        what, fix = f"the pools need {wanted} slots", "begin the job anew with less in placement"
    else:
        what = "1 train rank needs a slot" if wanted == 1 else f"{wanted} train ranks need as many slots"
        fix = "begin the job anew with fewer train.ranks"
    widest = sizes_of(view.spec).widest
    counts = f" in whole engines of {widest} slots" * (widest > 1)
    return (
        f"{what}, and there are {there.slots}{counts} (of {names}); it goes on when {lacking} more {'is' if lacking == 1 else 'are'} "
        f"there. Start the controllers that are missing, or {fix}"
    )


GAVE_BACK = "slots go to other jobs"
LEFT = "its slots are given back"
HAS_AGAIN = "it has slots again"

OF_SHARES = (GAVE_BACK, LEFT, HAS_AGAIN)
"""Prefixes of the reasons of planned rollbacks."""

NODE_GRACE_S = 15.0
"""A world whose node is away waits so long for the node before it is placed on the others."""

LONGEST_PAUSE_S = 30.0
"""Worlds that die one after the other follow each other more and more slowly, and so slowly at most; a job that is not given up
before, as in simulation, comes to it."""

MAX_FRUITLESS_ROLLBACKS = 5
"""Worlds that died one after the other without a commit between them; then the job has failed."""


def fail_barren_job(view: JobView) -> Iterator[Intent]:
    """A job whose data brought nothing to train for a whole epoch fails: the next epoch would bring the same, for ever.

    Not while a group of a later epoch is offered or sealed: then it did bring something.
    """
    head = view.head
    epoch = barren_epoch(view.rules.shape, head)
    if epoch is None or (view.is_over and head.step > 0):
        return
    if not view.offered.groups and not any(stored.record.groups for stored in view.mirror.seals.values()):
        why = explain_barren_epoch(epoch, view.log.values())
        yield Intent(SetPhase(JobPhase.FAILED, str(why), at_head=True), "barren", view.turn("barren"))


def recover_world(view: JobView) -> Iterator[Intent]:
    """A world of which a rank is lost starts again, in a new lineage: from copies of head's state, or from a checkpoint."""
    if is_complete(view):
        return
    head = view.head
    lost = world_loss(view)
    fruitless = fruitless_rollbacks(view)
    if view.failed_start or (lost is not None and fruitless >= MAX_FRUITLESS_ROLLBACKS):
        last = lost.why + _log_of(lost, view) if lost is not None else ""
        why = view.failed_start or f"{fruitless} train worlds died without a step between them; the last: {last}"
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
    """Where to read what the worker said by which it is lost, on its node."""
    if not lost.instance or view.mirror.job is None:
        return ""
    return f" (its log: {view.mirror.job.record.run_dir}/logs/{lost.instance}.log)"


def fruitless_rollbacks(view: JobView) -> int:
    """Rollbacks since the last commit."""
    count = 0
    for _, entry in sorted(view.log.items(), reverse=True):
        if entry.kind == "train":
            break
        if entry.raised is not None:  # what comes before is of the job as it had ended
            break
        count += entry.kind == "rollback" and not entry.reason.startswith(OF_SHARES)
    return count


def finish_job(view: JobView) -> Iterator[Intent]:
    """All steps are committed, the last checkpoint is registered and the last evaluation made."""
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
    said = f"; {failed} prompt{'s' * (failed > 1)} failed, the job's events say why" if failed else ""
    said += emulation_remark(place.slot for place in view.plan.engines)
    if epochs is None:
        return f"all {steps} steps are trained{said}"
    through = "the data epoch" if epochs == 1 else f"all {epochs} data epochs"
    return f"every prompt of {through} has its outcome, after {steps} steps{said}"
