"""Shares the cluster's slots out between its jobs: when anything changes that `placement.shares` goes by, one of the daemons writes who
has what now, by a transaction that compares what it went by; if it does not, another does so a moment later.

That anybody may do it, and that any may be late, does no harm: what is granted is within what nobody else holds, in one record.

A node that leaves is waited for as long as a train world waits for it (`NODE_GRACE_S`): until then its jobs get no other slots in place of
those that they have there, which they would keep when the node is back, so that a daemon that is only restarted moves nothing.

`change_claim` is how people change what a job wants: its priority, its bounds, whether it is paused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.rules.view import Memo, Timers, turn_of
from controllers.rules.world import NODE_GRACE_S
from gcore.errors import StoreUnavailable
from gcore.ledger import transactions as share_transactions
from gcore.ledger.records.cluster import Claim, Shares
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Store
from gcore.system.clock import Clock
from placement.shares import divide_slots

log = logging.getLogger(__name__)
LOOK_AGAIN_S = 1.0


class ShareWriter:
    """On one daemon."""

    def __init__(self, node: str, store: Store, cluster: ClusterMirror, changes: ChangeSignal, clock: Clock) -> None:
        self._node = node
        self._store = store
        self._cluster = cluster
        self._changes = changes
        self._clock = clock
        self._remembered = Memo()
        self._waits = Timers({})
        self._missed: dict[str, float] = {}
        """The nodes on which jobs have slots and which are not there, and since when."""
        self._absent: frozenset[str] = frozenset()
        """Those that are waited for."""

    async def run(self) -> None:
        """For ever."""
        while True:
            wanted = self._wanted()
            if wanted is None:
                since = min((self._missed[node] for node in self._absent), default=None)
                left = None if since is None else max(0.01, since + NODE_GRACE_S - self._clock.monotonic())
                await self._changes.wait(left)
                continue
            known, shares = wanted
            now = self._clock.monotonic()
            topic = f"shares {known.revision}"
            self._waits = self._waits.note([topic], now)
            mine = turn_of(self._cluster.nodes, self._node, topic)
            if not self._waits.ripe(topic, mine, now):
                await self._changes.wait(max(self._waits.since[topic] + Timers.wait(mine, 0.0) - now, 0.01))
                continue
            with contextlib.suppress(StoreUnavailable):
                # No job's: what it writes concerns all of them.
                nobodys = JobKeys("")
                txn = share_transactions.share_out(nobodys, known, shares)
                report = await TransactionExecutor(self._store, nobodys).run(txn)
                log.info("shares of the slots are written: %s", report.outcome)
                if report.outcome is TxnOutcome.WON:
                    await self._heard(known)
                    continue
            await self._changes.wait(LOOK_AGAIN_S)

    async def _heard(self, before: Versioned[Shares]) -> None:
        """Until what was written is heard of: who decided again before would lose the compare."""
        end = self._clock.monotonic() + LOOK_AGAIN_S
        while self._cluster.shares is before and self._clock.monotonic() < end:
            await self._changes.wait(LOOK_AGAIN_S)

    def _wanted(self) -> tuple[Versioned[Shares], Shares] | None:
        """What stands and what is to stand, if that is something else."""
        cluster = self._cluster
        if not cluster.is_complete or cluster.shares is None:
            return None
        there, claims, shares = cluster.there, cluster.claims, cluster.shares
        absent = self._absent_nodes(there.nodes, shares.record)
        found = self._remembered.get(
            "wanted",
            (there, claims, shares, absent),
            lambda: divide_slots(replace(there, absent=absent), claims, shares.record),
        )
        return None if found is cluster.shares.record else (cluster.shares, found)

    def _absent_nodes(self, there: Collection[str], shares: Shares) -> frozenset[str]:
        """The nodes that are waited for: on which jobs have slots, and which this daemon has missed for less than `NODE_GRACE_S`. The same object
        while they are the same."""
        now = self._clock.monotonic()
        used = {node for share in shares.jobs.values() for node in share.granted}
        missed = used - set(there) - self._cluster.drained
        self._missed = {node: self._missed.get(node, now) for node in missed}
        absent = frozenset(node for node, since in self._missed.items() if now - since < NODE_GRACE_S)
        self._absent = self._absent if self._absent == absent else absent
        return self._absent


async def change_claim(store: Store, uid: str, change: Callable[[Claim], Claim]) -> Claim | None:
    """Change what a job claims, however often somebody else does so meanwhile; what it claims then. None: it has ended, or there
    is none.

    Raises StoreUnavailable, also if it is not known whether it was written; and what `change` raises.
    """
    keys = JobKeys(uid)
    while True:
        known = await store.get(keys.active)
        if known is None:
            return None
        claim = Claim.decode(known.value, known.key)
        new = change(claim)
        if new == claim:
            return claim
        txn = share_transactions.set_claim(keys, Versioned(claim, known.mod_revision), new)
        report = await TransactionExecutor(store, keys).run(txn)
        if report.outcome is TxnOutcome.WON:
            return new
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"whether the job's claim was changed is not known ({report.why})", fix="Ask again")
