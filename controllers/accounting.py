"""Writing down outcomes without a step, in one transaction.

While head's train world is lost, the store may have been put back to an older state, and a rollback is about to say so
(`controllers.rolling`). What is written before that would take a number under which the run's folder has something else: so it
waits for the rollback. A world that is well has trained what head says, and there is nothing to look for.
"""

from __future__ import annotations

from controllers.actions import Account
from controllers.hands import Applied, Hands, slots, writer
from controllers.lost import lost_world
from controllers.rolling import all_seen
from controllers.view import JobView
from gcore.ledger import chain, transactions
from gcore.ledger.guarded import TxnOutcome


async def account(action: Account, view: JobView, hands: Hands) -> Applied:
    """One entry for `action.outcomes`, unless the run's folder knows of a later one than head."""
    head = slots(view).head.record
    if lost_world(view) is not None and (seen := await all_seen(view, hands.run_dir)).entry > head.seq:
        sentence = f"account: the run's folder has entries up to {seen.entry}, head is entry {head.seq}: a rollback comes first"
        return Applied(TxnOutcome.STALE, sentence)
    advance = chain.accounted(head, action.outcomes, view.rules.shape, writer(view))
    report = await hands.ledger.run(transactions.account(view.mirror.keys, slots(view), advance))
    return Applied(report.outcome, f"account for {len(action.outcomes)} prompts", report.revision)
