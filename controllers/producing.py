"""Running a job's flow, again and again, and what ends the job when it, or another plug-in, raises.

What a plug-in raised is noted with its own traceback before the job ends, so that the event is there first. The flow is begun
anew when there are steps to make again: after a rollback from behind the last step. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import Protocol

from controllers.changes import Changes
from controllers.deeds import LOOK_AGAIN_S
from controllers.faults import FaultBook
from controllers.retaking import NotHere
from gcore.clock import Clock
from gcore.errors import GcoreError
from gcore.flows.api import Flow, Peer
from gcore.plugins import RAISED, trace_of
from gcore.prompts.dataset import DataChanged

log = logging.getLogger(__name__)

LONGEST_REASON = 2000
"""Characters. Foreign code may say whatever it likes, and the store takes 1.5 MiB."""


class Job(Protocol):
    """What is needed of the job whose flow it is."""

    uid: str
    changes: Changes

    def has_more(self) -> bool:
        """Whether there are steps to make."""
        ...

    async def fail(self, reason: str) -> None:
        """End it."""
        ...


class Producing:
    """Of one job, on one controller."""

    def __init__(self, job: Job, faults: FaultBook, clock: Clock) -> None:
        self._job = job
        self._faults = faults
        self._clock = clock

    async def run(self, flow: Flow, peer: Peer) -> None:
        """Until cancelled: the flow to its end, and again when there is more to do. Raises NotHere."""
        me = asyncio.current_task()
        assert me is not None
        while True:
            try:
                await flow(peer)
            except DataChanged as error:  # all that is trained would be lost for a file that can be put back
                raise NotHere(error.what, where=error.where, fix=error.fix) from error
            except GcoreError as error:
                await self.fail_with(error)
            except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
                if me.cancelling():
                    raise
                # A cancellation that was not meant for it is of a task of the flow's own.
                log.error("the flow of job %s raised a %s", self._job.uid, type(error).__name__)  # the rest is a fault
                last = traceback.extract_tb(error.__traceback__)[-1]
                await self.fail_with(error, f"the flow raised {error!r} at {last.filename}:{last.lineno}")
            if me.cancelling():  # which the flow has kept to itself
                return
            await self._job.changes.until(self._job.has_more)
            # A flow that always ends at once must not keep everything else from running.
            await self._clock.sleep(LOOK_AGAIN_S)

    async def fail_with(self, error: BaseException, reason: str = "") -> None:
        """End the job because of `error`; first the traceback of a plug-in that raised it."""
        reason = reason or str(error)
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[: LONGEST_REASON - 1]}…"
        if trace := trace_of(error):
            self._faults.note(reason, trace)
            await self._faults.finish()
        await self._job.fail(reason)
