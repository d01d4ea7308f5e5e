"""A job begins: base entry, base checkpoint and first plan in one transaction, and, of a job whose slots move, why it is that plan.

What it begins with is `placement.beginning`'s to say. What is wrong with it by what is estimated is told to people, and holds nothing up.
"""

from __future__ import annotations

import asyncio

from controllers.forming import models_of, placeable
from controllers.hands import Applied, Hands, new_world, writer
from controllers.view import JobView
from gcore.emulated.launch import remark
from gcore.ledger import chain, transactions
from gcore.ledger.guarded import TxnOutcome
from gcore.ledger.job import JobPhase, JobStatus
from gcore.ledger.placing import Moves
from gcore.ledger.share_transactions import keeping_to
from placement.beginning import begun
from placement.moves import Deciding, beginning_move

TOPIC = "beginning"
"""What a warning of what a job begins with is called in the store."""


async def start_job(view: JobView, hands: Hands) -> Applied:
    """Begin it. Raises SpecError while there are too few slots."""
    mirror, spec = view.mirror, view.spec
    assert mirror.status is not None
    advance = chain.base(len(view.rules.shape.lengths), new_world(), writer(view))
    there, models, pin, world = placeable(view), models_of(mirror), mirror.pin, advance.head.world
    moves, warning = None, ""
    if spec.placement.is_live:
        found = await asyncio.to_thread(begun, there, spec, models, world=world, pin=pin)
        warning, now = found.beginning.warning, hands.clock.wall()
        at = Deciding(step=0, seq=0, by=view.node, time=now)
        moves = Moves().plus(beginning_move(found.plan, found.beginning.reason, found.beginning.expected_s, at))
    else:
        found = begun(there, spec, models, world=world)
    reason = "training" + remark(one.slot for one in found.plan.engines)
    running = JobStatus(phase=JobPhase.RUNNING, reason=reason, changed=hands.clock.wall())
    txn = transactions.start(mirror.keys, mirror.status, advance, found.plan, running, moves)
    report = await hands.ledger.run(keeping_to(view.share, txn))
    if warning and report.outcome is not TxnOutcome.STALE:
        hands.tell(TOPIC, warning)
    return Applied(report.outcome, f"{txn.kind}", report.revision)
