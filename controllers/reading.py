"""What a controller keeps of a job for people to read, in one place: its numbers, its samples, its trackers.

All of it runs beside the job and never in its way: what fails here (a full disk, a tracker that is down) is told and tried
again, and a defect in one of these tasks is logged when the task ends, and ends only this, not the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from controllers.changes import Changes
from controllers.holdings import Holdings
from controllers.identity import Identity
from controllers.keeping import SampleKeeper
from controllers.recording import Recorder
from controllers.trackers import Patience, TrackerKeeper
from controllers.turns import turn
from gcore.clock import Clock
from gcore.config.reading import TrackerSpec
from gcore.errors import StoreUnavailable
from gcore.ledger import store_copy
from gcore.ledger.job import Trouble
from gcore.ledger.mirror import JobMirror
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store

log = logging.getLogger(__name__)

COPY_TURN_S = 0.5
"""How long the next in turn waits for the one before to leave the copy of the records."""
STOP_S = 10.0
"""For tracker processes to end, once they were let go of."""


class Reading:
    """One controller's, of one job. `look`: the mirror now."""

    def __init__(
        self,
        identity: Identity,
        home: Path,
        store: Store,
        keys: JobKeys,
        look: Callable[[], JobMirror],
        changes: Changes,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._home = home
        self._store = store
        self._keys = keys
        self._look = look
        self._clock = clock
        self._recorder = Recorder(identity.incarnation, look, changes, self._warn, clock)
        self.samples = SampleKeeper(identity.incarnation, self._warn)
        self._writing: list[asyncio.Task[None]] = []
        self._trackers: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Run beside the caller, until `finish` or `cancel`. The job is known by now."""
        job = self._look().job
        assert job is not None
        for work in (self._recorder.run(), self.samples.run()):
            self._writing.append(beside(work, "reading"))
        for tree in job.record.spec.get("tracking", []):
            tracker = TrackerSpec.model_validate(tree)
            keeper = TrackerKeeper(
                self._identity.incarnation,
                self._home,
                tracker,
                self._look,
                self._recorder.told,
                self._warn,
                self._clock,
            )
            self._trackers.append(beside(keeper.run(), f"tracker {tracker.name}"))

    def note(self, mirror: JobMirror, holdings: Holdings) -> None:
        """A change, before what is terminal leaves the holdings."""
        self.samples.note(mirror, holdings)

    async def finish(self) -> None:
        """The job has ended: what is missing is written and given to the trackers, for a bounded time."""
        for task in self._writing:
            task.cancel()
        last = {"records": self._recorder.finish(), "samples": self.samples.write(), "copy": self._leave_copy()}
        await asyncio.wait([beside(work, name) for name, work in last.items()])
        if self._trackers:
            await asyncio.wait(self._trackers, timeout=Patience().end_s + STOP_S)

    async def stop(self) -> None:
        """Stop at once; processes that were started are let go of and waited for."""
        tasks = [*self._writing, *self._trackers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave_copy(self) -> None:
        """With the job's records in its folder the run can be audited when its cluster is gone; one copy is enough."""
        mirror = self._look()
        assert mirror.job is not None
        run_dir, me = Path(mirror.job.record.run_dir), self._identity.incarnation
        await self._clock.sleep(COPY_TURN_S * turn(mirror.members, me, "copy"))
        try:
            if await asyncio.to_thread(store_copy.is_left, run_dir, mirror.head.record if mirror.head else None):
                return
            listing = await self._store.list(self._keys.prefix)
            await asyncio.to_thread(store_copy.leave, run_dir, me, mirror.keys.uid, listing)
        except (StoreUnavailable, OSError) as error:  # whoever audits it later leaves one
            log.warning("the run's folder has no copy of the job's records: %s", error)

    async def _warn(self, topic: str, sentence: str) -> None:
        key = self._keys.trouble(topic)
        trouble = Trouble(topic=topic, node=self._identity.node, sentence=sentence, time=self._clock.wall())
        with contextlib.suppress(StoreUnavailable):  # the log has it
            await self._store.transact((), (Put(key, trouble.encode()),))


def beside(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start what people read beside what they read about: its end, also by a defect, is not the caller's."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_defect)
    return task


def _tell_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (defect := task.exception()) is not None:
        log.error("%s: nothing more is kept of the run for people to read", task.get_name(), exc_info=defect)
