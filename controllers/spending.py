"""What a job spends on judges that others serve, as one controller sees and writes it (`gcore.ledger.spending`).

Each controller adds what it has asked to its node's record: the first answer at once, further ones every `WRITE_S`, and what is left
when the job or the controller ends. All controllers see all records, so each knows what the whole job has spent, but for what the
others have not written yet. Nothing more is asked for once that has reached `most_cost`.

So it may be exceeded by what is under way when that is seen: the requests of all controllers that are in flight (`in_flight` of
each), and what the others had answered in the last `WRITE_S` seconds, or since the store was away from them. The same is what may
be forgotten, once, of each controller that is killed. No request is counted before its answer has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection

from gcore.clock import Clock
from gcore.config.judges import JudgeSpec
from gcore.errors import StoreUnavailable
from gcore.ledger.guarded import Ledger, Stored, TxnOutcome
from gcore.ledger.mirror import JobMirror
from gcore.ledger.spending import NOTHING, JudgeUse, NodeSpent, added, cost_of, spend, taken_off, to_add_up
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Store

WRITE_S = 2.0
"""Between two writes of one controller."""
LAST_WRITE_S = 5.0
"""What is left when it ends is tried to be written for so long."""


class Spending:
    """Of one job, on one controller. Implements `gcore.reward.generative.gate.Purse`. Mutable; one event loop."""

    def __init__(
        self,
        judges: Collection[JudgeSpec],
        store: Store,
        keys: JobKeys,
        node: str,
        me: str,
        clock: Clock,
        mirror: Callable[[], JobMirror],
        nodes: Callable[[], Collection[str]],
        paid: Callable[[str, float], None] = lambda judge, cost: None,
    ) -> None:
        """`me`: the incarnation. `nodes`: those that are there. `paid`: told what each answer costs."""
        self._judges = {judge.name: judge.external for judge in judges if judge.external is not None}
        self._store = store
        self._keys = keys
        self._node = node
        self._me = f"{me}.{uuid.uuid4().hex[:8]}"
        """A life begins whenever the job is taken up, which one incarnation may do again: it then knows nothing of what it asked before."""
        self._clock = clock
        self._mirror = mirror
        self._nodes = nodes
        self._paid = paid
        self._mine: dict[str, JudgeUse] = {}
        """What was asked here in this life."""
        self._landed: dict[str, JudgeUse] = {}
        """Of that, what stands in some record."""
        self._elsewhere: dict[str, JudgeUse] = {}
        """Of that, what stands in a record that is not this life's."""
        self._known: Stored[NodeSpent] | None = None
        """The node's record as it was last written or read here."""
        self._news = asyncio.Event()

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        """A request was answered."""
        use = JudgeUse(requests=1, tokens_in=tokens_in, tokens_out=tokens_out)
        self._mine = added((self._mine, {judge: use}))
        self._paid(judge, cost_of(use, self._judges[judge]))
        self._news.set()

    def cost(self, judge: str) -> float:
        """What the whole job has spent on a judge, as far as it is known here."""
        mirror = self._mirror()
        seen, own = mirror.spent, mirror.spent.get(self._node)
        if self._known is not None and mirror.revision < self._known.revision:
            own = self._known  # which will be heard of
        others = (stored.record.uses for node, stored in seen.items() if node != self._node)
        total = added((*others, self._next(own.record if own is not None else None).uses))
        return cost_of(total.get(judge, NOTHING), self._judges[judge])

    def overdrawn(self, judge: str) -> str:
        """That all is spent which the job may spend on a judge; nothing while it is not."""
        most = self._judges[judge].most_cost
        if most is None or (cost := self.cost(judge)) < most:
            return ""
        return (
            f"judge {judge!r} has spent {cost:.{'2f' if cost >= 1 else '4g'}} of the {most:g} that its external.most_cost allows, so nothing more is asked; a "
            "job's spec stays as it is: cancel the job, export its model, and start one from that with more to spend"
        )

    async def run(self) -> None:
        """For ever: write down what was spent."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not await self._write():
                self._news.set()
            await self._clock.sleep(WRITE_S)

    async def finish(self) -> None:
        """Write down what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITE_S):
                while self._mine != self._landed and not await self._write():
                    await self._clock.sleep(WRITE_S / 10)

    async def _write(self) -> bool:
        """Whether the store has taken what was there when this began."""
        try:
            kv = await self._store.get(self._keys.spent(self._node))
            there = _read(kv)
            if there is not None and there.by == self._me:  # a write whose answer never came may have been made
                self._landed = added((there.life, self._elsewhere))
                self._known = Stored(there, kv.mod_revision) if kv is not None else None
            else:
                self._elsewhere = self._landed
            mine, new = self._mine, self._next(there)
            gone = to_add_up(self._mirror().spent, self._node, self._nodes())
            old = None if kv is None else Stored(new, kv.mod_revision)  # compared by its revision alone
            txn = spend(self._keys, old, new, gone)
            report = await Ledger(self._store, self._keys).run(txn)
        except StoreUnavailable:
            return False
        if report.outcome is not TxnOutcome.WON:
            return False
        self._landed = mine
        before = added((new.before, *(stored.record.uses for stored in gone.values())))
        self._known = Stored(new.model_copy(update={"before": before}), report.revision)
        return True

    def _next(self, there: NodeSpent | None) -> NodeSpent:
        """The node's record with all that was asked here, after the one that is there."""
        if there is not None and there.by == self._me:
            return there.model_copy(update={"life": taken_off(self._mine, self._elsewhere)})
        before = {} if there is None else there.uses
        return NodeSpent(node=self._node, by=self._me, before=before, life=taken_off(self._mine, self._landed))


def _read(kv: KeyValue | None) -> NodeSpent | None:
    """What stands there; nothing if it is damaged, and is written anew."""
    try:
        return None if kv is None else NodeSpent.decode(kv.value, kv.key)
    except UnreadableRecord:
        return None
