"""Rules about a job's share of the cluster's slots: which slots it gives up, when it is suspended and resumed, and
which controller plans its placement.

`placement.shares` decides which job gets which slots. New slots are used like new nodes (`controllers.rules.world`).
Slots that the job must give back are released between two steps: if only engines are on them, by a change of the plan;
if train ranks are, by a new train world that starts from exactly the committed state. If the remaining slots are too
few, the job is suspended: its plan places nothing, its workers end, and nothing is sampled or sealed until it has slots
again. It then continues from a checkpoint of the newest step (head), so that no committed step is lost or trained
twice. When the plan no longer uses a slot and no process of the job runs there, the slot is given back (`ReturnSlots`).

To be suspended, or to form a new world without in-memory copies, the job needs a checkpoint of head. So the next sealed
step gets one (`Seal.checkpoint`), and nothing more is sealed while that checkpoint is written.

Leadership: the controller that holds the leader key under its lease plans the placement. Any controller may take the
key if there is no leader or the leader no longer works on the job. Safety does not depend on it: a transaction that
writes a plan compares the previous plan and the leader.
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.rules.actions import (
    ChangePlan,
    Intent,
    ReportMoves,
    ReturnSlots,
    Rollback,
    SetPhase,
    TakeLead,
    WriteMove,
)
from controllers.rules.view import SETTLE_S, JobView, turn_of
from controllers.rules.world import (
    awaits_world,
    is_between_steps,
    is_state_at_hand,
    placement_snapshot,
    world_loss,
)
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import JobPhase, Move, MoveKind, Pin, Plan
from gcore.ledger.records.restart_reasons import GAVE_BACK, HAS_AGAIN, LEFT, PAUSED, SMALLER, engines_removed
from gcore.ledger.selection import resumable_checkpoints
from placement.moves import MoveProposal, MoveReport
from placement.placer import new_placer

RESUME_AFTER_S = 0.3
"""Delay before a suspended job resumes, so that slots which are granted one after the other are used together."""


def is_suspended(view: JobView) -> bool:
    """Whether the job is suspended: its plan places nothing."""
    plan = view.mirror.plan
    return plan is not None and plan.record.stands_still


def plan_slots(plan: Plan) -> frozenset[Slot]:
    """All slots on which the plan has engines or train ranks."""
    return frozenset((*(slot for place in plan.engines for slot in place.on), *(rank.on for rank in plan.ranks)))


def surplus_slots(view: JobView) -> frozenset[Slot]:
    """The slots that the plan uses although they are no longer granted to the job. Empty for a job that has trained its
    last step with a healthy world: it ends sooner than it could release them."""
    if view.share is None or view.mirror.plan is None or (view.is_over and world_loss(view) is None):
        return frozenset()
    return view.remembered.get("surplus", (view.mirror.plan, view.share), lambda: _surplus(view))


def _surplus(view: JobView) -> frozenset[Slot]:
    assert view.share is not None
    return plan_slots(view.plan) - view.share.granted


def fits_grant(view: JobView) -> bool:
    """Whether the job can run on the slots that are granted and registered."""
    if view.claim.ends:
        return False
    return view.remembered.get(
        "fits", (view.nodes, view.share, view.claim), lambda: new_placer(view.spec).fits(placement_snapshot(view))
    )


def remove_slots(plan: Plan, slots: frozenset[Slot], why: str = SMALLER) -> Plan | None:
    """The plan without the engines on these slots; None if a train rank is on one of them, or a pool would lose its
    last engine. `why`: the stored reason."""
    if any(rank.on in slots for rank in plan.ranks):
        return None
    engines = tuple(one for one in plan.engines if slots.isdisjoint(one.on))
    served = {one.judge for one in engines if not one.asleep or one.judge}
    if served != {one.judge for one in plan.engines if not one.asleep or one.judge}:
        return None
    reason = engines_removed(plan.reason, len(plan.engines) - len(engines), why)
    return plan.model_copy(
        update={"generation": plan.generation + 1, "engines": engines, "lent_from": None, "reason": reason}
    )


def is_checkpointed(view: JobView) -> bool:
    """Whether head's step has a registered checkpoint. The base model needs none."""
    saved = resumable_checkpoints(view.head, view.checkpoints)
    return bool(saved) and saved[0].step == view.head.step


def wants_checkpoint(view: JobView) -> bool:
    """Whether the next step must have a checkpoint, because the job must give back slots and can only do so from a
    checkpoint."""
    given = surplus_slots(view)
    if not given or is_suspended(view):
        return False
    if not fits_grant(view):
        return not is_checkpointed(view)
    return remove_slots(view.plan, given) is None and not is_state_at_hand(view)


def awaits_checkpoint(view: JobView) -> bool:
    """Whether nothing may be sealed now, because the checkpoint with which the job gives back slots is still being
    written."""
    if not wants_checkpoint(view):
        return False
    version = view.head.version
    if version in view.saved:
        return True
    writes = (rank.writing for rank in view.ranks.values() if rank.writing is not None)
    return any(one.version == version and not one.over for one in writes)


def give_up_slots(view: JobView) -> Iterator[Intent]:
    """Between two steps, stop using the slots that are no longer granted to the job: remove engines, form a smaller
    train world, or suspend the job."""
    given = surplus_slots(view)
    if not given or is_suspended(view):
        return
    plan, why = view.plan, _why(view)
    if not fits_grant(view) and world_loss(view) is not None:
        # The lost world trains nothing more here. The job recovers as after any loss when it has slots.
        topic = f"suspend {plan.generation} {view.head.world}"
        yield Intent(Rollback(why, slots_as_seen=True, stands_still=True), topic, view.turn(topic), after=SETTLE_S)
    if not is_between_steps(view):
        return
    if not fits_grant(view):
        if is_checkpointed(view):
            topic = f"suspend {plan.generation}"
            action = Rollback(why, between_steps=True, slots_as_seen=True, stands_still=True)
            yield Intent(action, topic, view.turn(topic))
        return
    topic = f"yield {plan.generation} {view.head.seq}"
    smaller = remove_slots(plan, given, why)
    if smaller is not None:
        yield Intent(ChangePlan(smaller), topic, view.turn(topic))
    elif is_state_at_hand(view) and world_loss(view) is None:
        yield Intent(Rollback(why, between_steps=True, slots_as_seen=True), topic, view.turn(topic))


def _why(view: JobView) -> str:
    """Why the job gives back slots, as the stored reason of the rollback or the plan."""
    if view.claim.ends:
        return f"{LEFT}: {view.claim.ends}"
    if view.claim.paused:
        return PAUSED
    reason = SMALLER if view.queued is None else f"{GAVE_BACK}: {view.queued.reason}"
    return "; ".join([reason, *view.surplus_reasons])


def resume(view: JobView) -> Iterator[Intent]:
    """Resume a suspended job from head's own checkpoint once it has slots."""
    if is_suspended(view) and fits_grant(view):
        assert view.share is not None
        topic = f"resume {view.plan.generation} {view.share.revision}"
        yield Intent(Rollback(HAS_AGAIN, slots_as_seen=True), topic, view.turn(topic), after=RESUME_AFTER_S)


def end_suspended_job(view: JobView) -> Iterator[Intent]:
    """End a suspended job that was asked to end."""
    if view.claim.ends and is_suspended(view):
        done = SetPhase(JobPhase.CANCELLED, view.claim.ends, at_head=True)
        yield Intent(done, "end", view.turn("end"))


def release_slots(view: JobView) -> Iterator[Intent]:
    """Give back the slots that are no longer granted, which the plan does not use and on which no process of the job
    runs."""
    if view.share is None:
        return
    left = view.remembered.get("free", (view.share, view.mirror.plan, view.workers), lambda: _free(view))
    if left:
        topic = f"give back {view.share.revision} {len(left)}"
        yield Intent(
            ReturnSlots(left),
            topic,
            turn_of(view.mirror.members or view.nodes, view.me if view.mirror.members else view.node, topic),
        )


def _free(view: JobView) -> frozenset[Slot]:
    assert view.share is not None
    left = view.share.share.surplus
    if not left:
        return left
    if view.mirror.plan is not None:
        left -= plan_slots(view.mirror.plan.record)
    uid = view.mirror.keys.uid
    return left - {
        Slot(worker.node, slot) for worker in view.workers.values() if worker.job_uid == uid for slot in worker.slots
    }


TAKE_S = 0.2
"""Delay between the attempts of two peers to take the leadership."""


def is_leader(view: JobView) -> bool:
    """Whether this controller plans the job's placement now."""
    leader = view.mirror.leader
    if is_suspended(view):
        return False
    return (
        view.spec.placement.is_live and leader is not None and leader.record.incarnation == view.me and not view.leaving
    )


def take_lead(view: JobView) -> Iterator[Intent]:
    """Take the leadership if no active member of the job has it."""
    if not view.spec.placement.is_live or view.leaving:
        return
    leader = view.mirror.leader
    member = view.mirror.members.get(leader.record.incarnation) if leader is not None else None
    if leader is None or member is None or (member.record.leaving and len(view.mirror.members) > 1):
        name = "nobody" if leader is None else leader.record.incarnation
        topic = f"lead after {name}"
        yield Intent(TakeLead(), topic, view.turn(topic), after=TAKE_S)


def write_moves(view: JobView) -> Iterator[Intent]:
    """Write the placement change that the policy has decided, if it fits the present plan and step. Without one, write
    the results of earlier changes."""
    if not is_leader(view) or view.is_over:
        return
    proposal = view.proposal
    if proposal is not None:
        if is_proposal_due(proposal, view):
            move = proposal.move
            yield Intent(WriteMove(proposal), f"place {move.generation} {move.state} {move.step} {move.after}")
    elif view.move_report is not None and is_report_new(view.move_report, view.mirror):
        yield Intent(ReportMoves(view.move_report), f"moves {view.move_report.moves.total} {view.head.seq}")


def is_proposal_due(proposal: MoveProposal, view: JobView) -> bool:
    """Whether a proposed placement change should be written now: it fits the present plan and step, is not written yet,
    is allowed by the pin (a placement that a person fixed), and does not interfere with a train world that is about to
    be formed."""
    move = proposal.move
    is_written = any((one.generation, one.time) == (move.generation, move.time) for one in view.mirror.moves.moves)
    is_of_now = move.generation == view.plan.generation + 1 and move.step == view.head.step
    is_in_the_way = proposal.plan is not None and awaits_world(view)
    return is_of_now and not is_written and not is_in_the_way and _obeys(move, view.mirror.pin)


def is_report_new(report: MoveReport, mirror: JobMirror) -> bool:
    """Whether the report differs from the record of moves, and is based on its newest revision. If not, the leader
    makes another report."""
    return report.since == mirror.moves_revision and report.moves != mirror.moves


def _obeys(move: Move, pin: Pin) -> bool:
    """Whether the pin, which may be newer than the decision, allows the change. The return of lent slots is always
    allowed."""
    if move.kind is MoveKind.RETURN or not pin.fixes:
        return True
    return not pin.frozen and not pin.off(move.after)
