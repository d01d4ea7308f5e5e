"""How a job ends, or goes back: rules of `controllers.decide`. Pure, like all rules.

It has succeeded when its last step, the checkpoint and the evaluation of that are on head's chain; it has failed when its data
bring nothing to train, when a worker cannot be started, or when world after world dies without a step between them. A world
that lost a rank is otherwise begun anew (`controllers.rolling` says from where).
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.actions import Intent, Rollback, SetPhase
from controllers.forming import STOCK_PATIENCE_S, state_at_hand, unheard
from controllers.lost import Lost, lost_world
from controllers.spreading import HOLDERS_GRACE_S, newest_is_away
from controllers.turns import SETTLE_S
from controllers.view import JobView
from controllers.yielding import OF_SHARES
from gcore.emulated.launch import remark
from gcore.ledger.ancestry import resumable
from gcore.ledger.job import JobPhase
from gcore.ledger.tally import barren_epoch, why_barren

NODE_GRACE_S = 15.0
"""A world whose node is away waits so long for the node before it is placed on the others."""
LONGEST_PAUSE_S = 30.0
"""Worlds that die one after the other follow each other more and more slowly, and so slowly at most; a job that is not given up
before, as in simulation, comes to it."""
MAX_FRUITLESS_ROLLBACKS = 5
"""Worlds that died one after the other without a commit between them; then the job has failed."""


def despairing(view: JobView) -> Iterator[Intent]:
    """A job whose data brought nothing to train for a whole epoch fails: the next epoch would bring the same, for ever.

    Not while a group of a later epoch is offered or sealed: then it did bring something.
    """
    head = view.head
    epoch = barren_epoch(view.rules.shape, head)
    if epoch is None or (view.is_over and head.step > 0):
        return
    if not view.offered.groups and not any(stored.record.groups for stored in view.mirror.seals.values()):
        why = why_barren(epoch, view.log.values())
        yield Intent(SetPhase(JobPhase.FAILED, str(why), at_head=True), "barren", view.turn("barren"))


def recovering(view: JobView) -> Iterator[Intent]:
    """A world of which a rank is lost starts again, in a new lineage: from copies of head's state, or from a checkpoint."""
    if is_complete(view):
        return
    head = view.head
    lost = lost_world(view)
    fruitless = fruitless_rollbacks(view)
    if view.hopeless or (lost is not None and fruitless >= MAX_FRUITLESS_ROLLBACKS):
        last = lost.why + _log_of(lost, view) if lost is not None else ""
        why = view.hopeless or f"{fruitless} train worlds died without a step between them; the last: {last}"
        yield Intent(SetPhase(JobPhase.FAILED, why), "fail", view.turn("fail"))
    elif lost is not None:
        assert view.mirror.plan is not None
        away = {place.node for place in view.mirror.plan.record.ranks} - view.nodes.keys()
        after = max(NODE_GRACE_S if away else 0.0, min(SETTLE_S * 2**fruitless, LONGEST_PAUSE_S))
        if unheard(view):
            after = max(after, SETTLE_S + STOCK_PATIENCE_S)
        if newest_is_away(view) and state_at_hand(view, frozenset(view.nodes)) is None:
            after = max(after, HOLDERS_GRACE_S)
        topic = f"world {head.world}"
        action = Rollback(lost.why, slots_as_seen=lost.by_the_slots)
        yield Intent(action, f"{topic} {sorted(away)}", view.turn(topic), after=after)


def _log_of(lost: Lost, view: JobView) -> str:
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
        count += entry.kind == "rollback" and not entry.reason.startswith(OF_SHARES)
    return count


def finishing(view: JobView) -> Iterator[Intent]:
    """All steps are committed, the last checkpoint is registered and the last evaluation made."""
    if is_complete(view):
        done = SetPhase(JobPhase.SUCCEEDED, _how_it_ended(view), at_head=True)
        yield Intent(done, "finish", view.turn("finish"))


def is_complete(view: JobView) -> bool:
    """Whether nothing is left to do."""
    head = view.head
    assert view.mirror.checkpoints is not None
    return (
        view.is_over
        and head.step > 0
        and any(c.step == head.step for c in resumable(head, view.mirror.checkpoints.record.entries))
        and (not view.is_evaluated_after(head.step, last=True) or str(head.version) in view.mirror.evaluations)
    )


def _how_it_ended(view: JobView) -> str:
    epochs, steps = view.rules.epochs, view.head.step
    assert view.mirror.plan is not None
    failed = sum(one.failed for one in view.head.tally.sources.values())
    said = f"; {failed} prompt{'s' * (failed > 1)} failed, the job's events say why" if failed else ""
    said += remark(place.slot for place in view.mirror.plan.record.engines)
    if epochs is None:
        return f"all {steps} steps are trained{said}"
    through = "the data epoch" if epochs == 1 else f"all {epochs} data epochs"
    return f"every prompt of {through} has its outcome, after {steps} steps{said}"
