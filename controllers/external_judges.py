"""The judges of a job that others serve, on one controller: what asks each, and what is told of all of them.

Every controller asks for itself. The pace is for the whole cluster, so each takes its share: the rate, divided by how many controllers
work on the job as its records say. While one comes or goes they may see that at different moments, and for so long the shares of
all may add up to a little more or less than the whole. What may be spent is for the whole job too (`controllers.spending`).

That a judge may cost no more is told once for all, by the first of the members; that its key is not taken, by each node for
itself. What to ask, and what becomes of it, is others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from controllers.judge_counts import JudgeCounts
from controllers.spending import Spending
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.config.spec import JudgeSpec
from gcore.ledger.mirror import JobMirror
from gcore.reward.generative.external import ExternalAsk, key_of
from gcore.reward.generative.gate import Gate
from gcore.store.keys import JobKeys
from gcore.store.types import Store

LOOK_S = 1.0
"""It is looked so often whether all is spent."""


class ExternalJudges:
    """Of one job, on one controller."""

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        keys: JobKeys,
        node: str,
        me: str,
        clock: Clock,
        counts: JudgeCounts,
        mirror: Callable[[], JobMirror],
        nodes: Callable[[], Collection[str]],
        tell: Callable[[str, str], None],
        environ: Mapping[str, str],
    ) -> None:
        """`nodes`: those that are there. `tell`: notes an event, by topic. `environ`: where the keys are."""
        self._judges = [judge for judge in spec.judges if judge.external is not None]
        self._me = me
        self._clock = clock
        self._counts = counts
        self._mirror = mirror
        self._tell = tell
        self._environ = environ
        self.spending = Spending(self._judges, store, keys, node, me, clock, mirror, nodes, counts.paid)
        self._asks: dict[str, ExternalAsk] = {}
        self._told: set[str] = set()
        """Judges of which it was told here that all is spent."""

    def asker(self, number: int, judge: JudgeSpec) -> ExternalAsk:
        """What puts questions to judge `number`: one, however often a preparation is tried. Raises DataError without its key."""
        assert judge.external is not None
        if (known := self._asks.get(judge.name)) is not None:
            return known
        key = key_of(judge, self._environ, f"judges.{number}")
        gate = Gate(judge.name, judge.external, self.spending, self._counts, self._clock, self._peers)
        ask = ExternalAsk(judge, key, gate, self.spending, self._counts, self._clock)
        self._asks[judge.name] = ask
        return ask

    async def run(self) -> None:
        """For ever: write down what is spent, and tell when it is all that may be."""
        if not self._judges:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self.spending.run(), name="spending")
            group.create_task(self._watch(), name="most cost")

    async def close(self) -> None:
        """Write down what is left, and close all connections."""
        await self.spending.finish()
        for ask in self._asks.values():
            await ask.close()

    def _peers(self) -> int:
        return len(self._mirror().members)

    async def _watch(self) -> None:
        while True:
            for judge in self._judges:
                self._tell_spent(judge)
            await self._clock.sleep(LOOK_S)

    def _tell_spent(self, judge: JudgeSpec) -> None:
        assert judge.external is not None
        mirror, topic = self._mirror(), f"judge-cost-{judge.name}"
        if judge.name in self._told or topic in mirror.troubles or self._me != min(mirror.members, default=None):
            return
        if self.spending.overdrawn(judge.name):
            self._told.add(judge.name)
            most = f"{judge.external.most_cost:g}"
            self._tell(
                topic, f"judge {judge.name!r} has spent the {most} that the job may spend on it, and the job waits"
            )
