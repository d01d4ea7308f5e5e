"""Keeps an eye on this node's slots: asks the machine now and then, and looks at what becomes of workers at each change.

Which slots are sick follows from the two (`controllers.device_check`, `controllers.ailing`); a daemon's next life goes on with what
this one knew. Emulated slots are never sick. Does not write anything: the store is told by the life that holds the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from controllers.ailing import Health, look, next_look
from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.device_check import Driver, asked, missing, usable_cores
from gcore.clock import Clock
from gcore.emulated.launch import is_emulated
from gcore.slots import bound_cores, is_cuda
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Between two questions to the machine."""


class SlotHealth:
    """Of one daemon. `ask` and `cores` are asked of the machine."""

    def __init__(
        self,
        node: str,
        slots: Sequence[str],
        clock: Clock,
        ask: Callable[[Driver], Awaitable[Driver]] = asked,
        cores: Callable[[], frozenset[int] | None] = usable_cores,
    ) -> None:
        self._slots = tuple(slot for slot in slots if not is_emulated(slot))
        self._clock = clock
        self._ask = ask
        self._cores = cores
        self._driver = Driver()
        self._health = Health(node)
        self._missing: Mapping[str, str] = {}
        self._checked: float | None = None
        self._seen: tuple[object, object] = (None, None)
        self.sick: Mapping[str, str] = {}
        """The slots that are not to be used, and why; replaced, never changed."""

    async def check(self) -> None:
        """Ask the machine which devices are there."""
        self._checked = self._clock.monotonic()
        if any(map(is_cuda, self._slots)):
            self._driver = await self._ask(self._driver)
        bound = any(map(bound_cores, self._slots))
        self._missing = missing(self._slots, self._driver, self._cores() if bound else None)
        self._conclude()

    def look(self, workers: Mapping[str, WorkerRecord], active: frozenset[str]) -> None:
        """See what has become of workers."""
        now, due = self._clock.monotonic(), next_look(self._health)
        fresh = self._seen[0] is not workers or self._seen[1] is not active
        if self._slots and (fresh or (due is not None and now >= due)):
            self._seen = (workers, active)
            self._health = look(self._health, workers, active, now)
            self._conclude()

    async def run(self, cluster: ClusterMirror, changes: Changes) -> None:
        """For ever, in a life; `changes` are notified when other slots are sick than before."""
        if not self._slots:
            await asyncio.Event().wait()
        while True:
            before = self.sick
            if self._checked is None or self._clock.monotonic() - self._checked >= CHECK_S:
                await self.check()
            self.look(cluster.workers, cluster.active)
            if self.sick != before:
                changes.notify()
            await changes.wait(self._pause())

    def _pause(self) -> float:
        now, due = self._clock.monotonic(), next_look(self._health)
        checked = now if self._checked is None else self._checked
        return max(0.05, min(checked + CHECK_S, due if due is not None else checked + CHECK_S) - now)

    def _conclude(self) -> None:
        sick = {**self._health.sick, **self._missing}
        for slot in sorted(sick.keys() - self.sick.keys()):
            log.warning("slot %s is sick and is not used: %s", slot, sick[slot])
        for slot in sorted(self.sick.keys() - sick.keys()):
            log.info("slot %s may be used again", slot)
        if sick != self.sick:
            self.sick = sick
