"""Which weights lie staged in a job's folder: looked for beside the event loop, only while those of head are missed.

The folder may be on a mount that hangs, or that fails for a while. A call into the first does not come back, so it is made in
a thread that nobody waits for: neither the lease's renewal, nor the threads that others share, nor the daemon's end. One
look is under way at a time; one that takes too long is told, and so is an error. Both are over when the folder answers.

Decides nothing; what is known stays what was seen last.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from controllers.changes import Changes
from controllers.tidying import FIRST, versions_in
from gcore.clock import Clock
from gcore.types import Version
from gcore.weights.layout import weights_folder

LOOK_AGAIN_S = 0.2
"""While weights are missed, until the folder is looked at again."""
ANSWER_S = 10.0
"""So long may a look take before it is told."""
TOPIC = "storage"
NOTHING_STAGED = frozenset({FIRST})
"""What engines can have before a rank has staged anything: the model they start with."""
HOW = "see whether its disk or mount is well on this node"

Tell = Callable[[str, str], None]
Look = Callable[[Path], frozenset[Version]]


def staged_versions(run_dir: Path) -> frozenset[Version]:
    """The versions whose weights lie whole in the run's folder, and the first, which engines start with. Raises OSError."""
    return versions_in(weights_folder(run_dir, FIRST).parent) | {FIRST}


class StagedWeights:
    """Of one job, on one node. `wanted`: head's version; `tell`: of a trouble by topic, an empty sentence when it is over;
    `found`: called when other versions are there."""

    def __init__(
        self,
        folder: Path,
        node: str,
        wanted: Callable[[], Version | None],
        changes: Changes,
        tell: Tell,
        found: Callable[[], None],
        clock: Clock,
        look: Look = staged_versions,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._folder = folder
        self._node = node
        self._wanted = wanted
        self._changes = changes
        self._tell = tell
        self._found = found
        self._clock = clock
        self._look = look
        self._answer_s = answer_s
        self.versions: frozenset[Version] = NOTHING_STAGED

    async def run(self) -> None:
        """For ever: look while head's weights are missed."""
        while True:
            await self._changes.until(self._misses)
            await self._see()
            if self._misses():
                await self._clock.sleep(LOOK_AGAIN_S)

    def _misses(self) -> bool:
        wanted = self._wanted()
        return wanted is not None and wanted not in self.versions

    async def _see(self) -> None:
        """Look once, however long it takes."""
        look = _in_a_thread(lambda: self._look(self._folder))
        if not (await asyncio.wait({look}, timeout=self._answer_s))[0]:
            self._tell(TOPIC, self._sentence(f"does not answer for {self._answer_s:.0f} s"))
            await asyncio.wait({look})
        try:
            versions = look.result()
        except OSError as error:
            self._tell(TOPIC, self._sentence(f"cannot be read ({error.strerror or error})"))
            return
        self._tell(TOPIC, "")
        if versions != self.versions:
            self.versions = versions
            self._found()

    def _sentence(self, what: str) -> str:
        return f"{self._node}: the run's folder {self._folder} {what}; engines here get no new weights until it does: {HOW}"


def _in_a_thread(look: Callable[[], frozenset[Version]]) -> asyncio.Future[frozenset[Version]]:
    """As `asyncio.to_thread`, in a thread that is nobody else's, and that the process does not wait for at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[frozenset[Version]] = loop.create_future()

    def settle(found: frozenset[Version] | OSError) -> None:
        if future.cancelled():
            return
        if isinstance(found, OSError):
            future.set_exception(found)
        else:
            future.set_result(found)

    def work() -> None:
        found: frozenset[Version] | OSError
        try:
            found = look()
        except OSError as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=work, name="staged weights", daemon=True).start()
    return future
