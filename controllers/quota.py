"""How much of its disk quota a job's run folder takes (`limits.disk_gib`), and what follows.

At nine tenths no more samples are kept here: they are for people, and the run goes on without them. Beyond the quota the job is
paused, at a commit, with a checkpoint, and says why: nothing is lost, whoever makes room (or has the quota raised) resumes it. It
is not failed, for a failed job does not go on; nor are its writes refused, which would end it anywhere. So the quota is no wall: the
checkpoint with which it is paused comes on top.

What lies there is measured by looking at every file, in a thread, the more rarely the more nodes do so: they see the same folder,
or each its own. What is limited is what this node sees. Deletes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from controllers.clearing import bytes_in
from gcore.clock import Clock
from gcore.errors import StoreUnavailable

log = logging.getLogger(__name__)

MEASURE_S, MOST_NODES = 60.0, 10
"""Between two looks of a node that is alone; so many times as long at most."""
NEARLY = 0.9
GIB = 1 << 30
TOPIC = "disk"
"""What trouble with it is called in the store."""


class Level(Enum):
    """How full it is."""

    FREE = "free"
    NEARLY = "nearly"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a run's folder. `sentence`: for people; nothing while there is room."""

    level: Level
    sentence: str = ""


def standing(taken: int, quota_gib: float, run_dir: Path) -> Standing:
    """How a run stands whose folder takes `taken` bytes. Pure."""
    share = taken / (quota_gib * GIB)
    what = f"the run's folder {run_dir} takes {taken / GIB:.2f} of the {quota_gib:g} GiB that a job may take (limits.disk_gib)"
    if share > 1:
        return Standing(
            Level.OVER,
            f"{what}: the job is paused; delete what it does not need (samples, old checkpoints), or have the limit raised, then "
            "`gcore resume` it",
        )
    if share >= NEARLY:
        return Standing(Level.NEARLY, f"{what}: no more samples are kept; beyond it the job is paused")
    return Standing(Level.FREE)


class RunQuota:
    """Of one job, on one node. `members`: how many nodes measure; `show`: told how it stands, whenever that is another level;
    `pause`: has the job stand still at its next commit."""

    def __init__(
        self,
        run_dir: Path,
        quota_gib: float,
        members: Callable[[], int],
        show: Callable[[Standing], None],
        pause: Callable[[], Awaitable[None]],
        clock: Clock,
        measure: Callable[[Path], int] = bytes_in,
    ) -> None:
        self._run_dir = run_dir
        self._quota_gib = quota_gib
        self._members = members
        self._show = show
        self._pause = pause
        self._clock = clock
        self._measure = measure
        self._level = Level.FREE

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.look()
            await self._clock.sleep(self.rest_s)

    @property
    def rest_s(self) -> float:
        """Until the next look."""
        return MEASURE_S * min(max(self._members(), 1), MOST_NODES)

    async def look(self) -> None:
        """Once."""
        found = standing(await asyncio.to_thread(self._measure, self._run_dir), self._quota_gib, self._run_dir)
        if found.level is not self._level:
            self._show(
                found if found.sentence else Standing(found.level, f"the run's folder {self._run_dir} has room again")
            )
            self._level = found.level
        if found.level is Level.OVER:
            try:
                await self._pause()
            except StoreUnavailable as error:  # the next look tries it again
                log.warning("the job is not paused yet: %s", error)
