"""A daemon's part in one job: it works on it, leaves it when it cannot read its records, its spec or its data any more, and takes
it up again when it can.

What could not be read may be another by now: whoever wrote it is gone, and it with its lease; it was put right; a plug-in was
installed; a data file was put back (for which whoever takes the job up waits, and says so: `controllers.preparing`). Nobody would tell, and a job that all daemons have left says of itself only how it stood, so each looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from controllers.changes import Changes
from gcore.errors import GcoreError, UsageError
from gcore.schema import UnreadableRecord

log = logging.getLogger(__name__)

AGAIN_S = 10.0
"""From leaving a job to the next look at it."""


class NotHere(GcoreError):
    """This node lacks what the job needs, which can be put right, and the job must not end for it."""


class Runner(Protocol):
    """One try at a job: `controllers.job`'s."""

    uid: str

    async def run(self) -> None:
        """Until the job has ended. Raises UnreadableRecord, UsageError, NotHere."""
        ...

    async def withdraw(self) -> None:
        """Be no member of it."""
        ...


async def work_on(new_runner: Callable[[], Runner], is_active: Callable[[], bool], changes: Changes) -> None:
    """Until the job has ended. While it cannot be worked on here it is left to others; the daemon goes on with the rest."""
    said: set[str] = set()
    while True:
        wrong = await _tried(new_runner())
        if not wrong:
            return
        for sentence in wrong - said:  # each once, and again only if something else was wrong meanwhile
            log.error("%s", sentence)
        said = wrong
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await changes.until(lambda: not is_active())
                return


async def _tried(runner: Runner) -> set[str]:
    """What was wrong; nothing if the job has ended."""
    wrong: set[str] = set()
    try:
        await runner.run()
    except* (UnreadableRecord, UsageError, NotHere) as errors:
        wrong = {f"job {runner.uid} is not worked on here: {error}" for error in _leaves(errors)}
    if wrong:
        await runner.withdraw()
    return wrong


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
