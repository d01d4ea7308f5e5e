"""What a controller keeps of a job for people to read, in one place: its numbers, its samples, its trackers.

All of it runs beside the job and never in its way: what fails here is told and tried again, and a defect here is logged and
ends only this, not the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from controllers.changes import Changes
from controllers.holdings import Holdings
from controllers.identity import Identity
from controllers.keeping import SampleKeeper
from controllers.recording import Recorder
from controllers.trackers import Patience, TrackerKeeper
from gcore.clock import Clock
from gcore.config.reading import TrackerSpec
from gcore.errors import StoreUnavailable
from gcore.ledger.job import Trouble
from gcore.ledger.mirror import JobMirror
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store

log = logging.getLogger(__name__)

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
            self._writing.append(asyncio.create_task(_contained(work), name="reading"))
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
            self._trackers.append(asyncio.create_task(_contained(keeper.run()), name=f"tracker {tracker.name}"))

    def note(self, mirror: JobMirror, holdings: Holdings) -> None:
        """A change, before what is terminal leaves the holdings."""
        try:
            self.samples.note(mirror, holdings)
        except Exception:
            log.exception("samples are not kept")

    async def finish(self) -> None:
        """The job has ended: what is missing is written and given to the trackers, for a bounded time."""
        for task in self._writing:
            task.cancel()
        await asyncio.gather(_contained(self._recorder.finish()), _contained(self.samples.write()))
        if self._trackers:
            await asyncio.wait(self._trackers, timeout=Patience().end_s + STOP_S)

    async def stop(self) -> None:
        """Stop at once; processes that were started are let go of and waited for."""
        tasks = [*self._writing, *self._trackers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warn(self, topic: str, sentence: str) -> None:
        key = self._keys.trouble(topic)
        trouble = Trouble(topic=topic, node=self._identity.node, sentence=sentence)
        with contextlib.suppress(StoreUnavailable):  # the log has it
            await self._store.transact((), (Put(key, trouble.encode()),))


async def _contained(work: Awaitable[None]) -> None:
    """What people read must not end what they read about."""
    try:
        await work
    except Exception:
        log.exception("what is kept of the run for people to read goes no further here")
