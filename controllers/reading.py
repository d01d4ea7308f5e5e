"""What a controller keeps of a job for people to read, in one place: its numbers, its samples, its trackers.

All of it runs beside the job and never in its way: what fails here is told and tried again, and a defect here is logged and
ends only this, not the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controllers.changes import Changes
from controllers.holdings import Holdings
from controllers.keeping import SampleKeeper
from controllers.recording import Recorder
from gcore.clock import Clock
from gcore.ledger.mirror import JobMirror

log = logging.getLogger(__name__)


class Reading:
    """One controller's, of one job. `look`: the mirror now."""

    def __init__(self, me: str, look: Callable[[], JobMirror], changes: Changes, clock: Clock) -> None:
        self._recorder = Recorder(me, look, changes, clock)
        self.samples = SampleKeeper(me)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Run beside the caller, until `finish` or `cancel`."""
        self._task = asyncio.create_task(self._run(), name="reading")

    def note(self, mirror: JobMirror, holdings: Holdings) -> None:
        """A change, before what is terminal leaves the holdings."""
        try:
            self.samples.note(mirror, holdings)
        except Exception:
            log.exception("samples are not kept")

    async def finish(self) -> None:
        """The job has ended: what is missing is written, for a bounded time."""
        self.cancel()
        await asyncio.gather(_contained(self._recorder.finish()), _contained(self.samples.write()))

    def cancel(self) -> None:
        """Stop at once."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        await asyncio.gather(_contained(self._recorder.run()), _contained(self.samples.run()))


async def _contained(work: Awaitable[None]) -> None:
    """What people read must not end what they read about."""
    try:
        await work
    except Exception:
        log.exception("what is kept of the run for people to read goes no further here")
