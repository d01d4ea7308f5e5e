"""What is said to the store by a controller that cannot work on a job: that it is no member, and, where nobody is left, the end.

Goes by the store alone, for nothing is heard of the job here by then. When that is so is `controllers.retaking`'s to say.
"""

from __future__ import annotations

import contextlib

from controllers.deeds import LOOK_AGAIN_S
from controllers.identity import Identity
from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.ledger import transactions
from gcore.ledger.guarded import Ledger, Stored, TxnOutcome
from gcore.ledger.job import JobPhase, JobStatus
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import Store


async def withdraw(store: Store, keys: JobKeys, identity: Identity, clock: Clock) -> None:
    """Be no member of a job, so that the others do not count on this controller; however long the store is away."""
    ledger, leaves = Ledger(store, keys), transactions.withdraw(keys, identity.incarnation, identity.node)
    while (await ledger.run(leaves)).outcome is TxnOutcome.UNKNOWN:
        await clock.sleep(LOOK_AGAIN_S)


async def end_left(store: Store, keys: JobKeys, clock: Clock, reason: str) -> None:
    """End a job as failed, if nobody works on it any more and the store is there."""
    with contextlib.suppress(StoreUnavailable, UnreadableRecord):
        kv = await store.get(keys.state)
        if kv is None or (await store.list(keys.member_prefix)).kvs:
            return
        old = Stored(JobStatus.decode(kv.value, kv.key), kv.mod_revision)
        if not old.record.phase.ended:
            new = JobStatus(phase=JobPhase.FAILED, reason=reason, changed=clock.wall())
            await Ledger(store, keys).run(transactions.set_status(keys, old, new, None))
