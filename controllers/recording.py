"""Keeps `metrics.jsonl` of a job's run up with its chain, beside everything else and never in its way.

Every controller could write it and one does: the first in the order of turns, or whoever finds it behind for longer than
its turn; what is missing is decided by the file's own content (`gcore.tracking.file`), under a lock, in a thread. When the
job has ended each of them looks once more, so that the last lines are there even if others died. A folder that takes nothing
is tried again for ever and told once; it never ends a run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from controllers.changes import Changes
from controllers.turns import TURN_SECONDS, turn
from gcore.clock import Clock
from gcore.ledger import archive
from gcore.ledger.mirror import JobMirror
from gcore.tracking.file import Busy, MetricsFile
from gcore.tracking.lines import Source, lacks

log = logging.getLogger(__name__)

RETRY_S = 2.0
GAP_PATIENCE = 15
"""Tries before entries that are found nowhere are passed over."""
Warn = Callable[[str, str], Awaitable[None]]
"""Tells people: what has trouble, and a sentence."""
END_PATIENCE_S = 10.0
"""For the last lines of a job that has ended."""


class Recorder:
    """One controller's part in one job's file. `look`: the mirror now."""

    def __init__(self, me: str, look: Callable[[], JobMirror], changes: Changes, warn: Warn, clock: Clock) -> None:
        self._me = me
        self._warn = warn
        self._look = look
        self._changes = changes
        self._clock = clock
        self._file: MetricsFile | None = None
        self._gaps = 0
        self._settled: JobMirror | None = None
        """Of which nothing is missing in the file: most changes are none of the chain."""
        self._trouble = ""
        self.told = Changes()
        """Notified when there are new lines here."""

    async def run(self) -> None:
        """For ever."""
        behind: float | None = None
        while True:
            if not self._lacks():
                behind = None
                await self._changes.wait()
                continue
            now = self._clock.monotonic()
            behind = now if behind is None else behind
            wait = behind + TURN_SECONDS * turn(self._look().members, self._me, "metrics") - now
            if wait > 0:
                await self._changes.wait(timeout=wait)
            elif not await self._bring():
                await self._clock.sleep(RETRY_S)

    async def finish(self) -> None:
        """The last lines of a job that has ended; gives up when the folder does not take them in time."""
        end = self._clock.monotonic() + END_PATIENCE_S
        while self._lacks() and self._clock.monotonic() < end:
            if not await self._bring():
                await self._clock.sleep(TURN_SECONDS / 4)

    def _lacks(self) -> bool:
        mirror = self._look()
        if mirror is self._settled:
            return False
        source = _source(mirror)
        missing = source is not None and (self._file is None or lacks(self._file.written, source))
        self._settled = None if missing else mirror
        return missing

    async def _bring(self) -> bool:
        source = _source(self._look())
        assert source is not None
        run_dir = Path(source.job.run_dir)
        file = self._file = self._file or MetricsFile(run_dir)
        whole, wall = self._gaps < GAP_PATIENCE, self._clock.wall()
        try:
            new = await asyncio.to_thread(file.bring, source, wall, lambda: archive.read(run_dir), whole=whole)
        except Busy:
            return False
        except (OSError, ValueError) as error:
            self._gaps += isinstance(error, ValueError)
            if (trouble := f"{file.path} is not written: {error}") != self._trouble:
                self._trouble = trouble
                log.warning("%s", trouble)
                await self._warn("metrics", trouble)
            return False
        self._gaps, self._trouble = 0, ""
        if new:
            self.told.notify()
        return True


def _source(mirror: JobMirror) -> Source | None:
    if mirror.job is None:
        return None
    return Source(
        mirror.job.record,
        mirror.status.record if mirror.status else None,
        {seq: stored.record for seq, stored in mirror.log.items()},
        {id_: stored.record for id_, stored in mirror.evaluations.items()},
    )
