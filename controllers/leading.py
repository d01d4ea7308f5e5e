"""Who plans a job's placement, and that its moves are written down: rules of `controllers.decide`. Pure, like all rules.

One controller at a time plans: who holds a key under its lease. Any may take it when nobody does, or when whoever does works on the
job no more. Nothing rests on that there is only one: a plan is written by a transaction that compares the plan that was seen, and the
leadership, so that of two one loses and looks again; and who dies at any moment leaves a plan that is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.actions import Intent, Lead, Place, TellMoves
from controllers.forming import awaits_world
from controllers.view import JobView
from controllers.yielding import is_suspended
from gcore import schema
from gcore.ledger.job import SLEEP_CAME
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Move, MoveKind, Pin
from placement.moves import Accounted, Proposal

TAKE_S = 0.2
"""So long is it left to the one whose turn it is."""


def moves_slots(view: JobView) -> bool:
    """Whether a policy moves this job's slots, and every node knows engines that sleep."""
    return view.spec.placement.is_live and schema.spoken() >= SLEEP_CAME


def leads(view: JobView) -> bool:
    """Whether this controller plans."""
    leader = view.mirror.leader
    if is_suspended(view):
        return False
    return moves_slots(view) and leader is not None and leader.record.incarnation == view.me and not view.leaving


def leading(view: JobView) -> Iterator[Intent]:
    """Take the leadership, if nobody has it who works on the job and stays."""
    if not moves_slots(view) or view.leaving:
        return
    leader = view.mirror.leader
    member = view.mirror.members.get(leader.record.incarnation) if leader is not None else None
    if leader is None or member is None or (member.record.leaving and len(view.mirror.members) > 1):
        name = "nobody" if leader is None else leader.record.incarnation
        topic = f"lead after {name}"
        yield Intent(Lead(), topic, view.turn(topic), after=TAKE_S)


def placing(view: JobView) -> Iterator[Intent]:
    """Write down what was decided, while it is about the plan and the step that are there; else what came of earlier moves."""
    if not leads(view) or view.is_over:
        return
    proposal = view.proposal
    if proposal is not None:
        if is_due(proposal, view):
            move = proposal.move
            yield Intent(Place(proposal), f"place {move.generation} {move.state} {move.step} {move.after}")
    elif view.account is not None and is_news(view.account, view.mirror):
        yield Intent(TellMoves(view.account), f"moves {view.account.moves.total} {view.head.seq}")


def is_due(proposal: Proposal, view: JobView) -> bool:
    """Whether it is about the plan and the step that are there, is not written, a person lets it be, and it is in the way of no train world
    that is wanted."""
    assert view.mirror.plan is not None
    move = proposal.move
    is_written = any((one.generation, one.time) == (move.generation, move.time) for one in view.mirror.moves.moves)
    is_of_now = move.generation == view.mirror.plan.record.generation + 1 and move.step == view.head.step
    is_in_the_way = proposal.plan is not None and awaits_world(view)
    return is_of_now and not is_written and not is_in_the_way and _obeys(move, view.mirror.pin)


def is_news(account: Accounted, mirror: JobMirror) -> bool:
    """Whether it says more than the record, and is about that record; else whoever plans makes another."""
    return account.since == mirror.moves_revision and account.moves != mirror.moves


def _obeys(move: Move, pin: Pin) -> bool:
    """Whether a person lets it be, who may have fixed something since it was decided. What was lent goes back in any case."""
    if move.kind is MoveKind.RETURN or not pin.fixes:
        return True
    return not pin.frozen and not pin.off(move.after)
