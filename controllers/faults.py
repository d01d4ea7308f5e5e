"""What plug-ins raised, kept for the job's events with their own tracebacks.

The same error of the same code is written once for a job, whoever meets it; a controller writes a bounded number. An event
tells it; what becomes of the prompt or of the job is decided elsewhere. When the store is away the traceback stands in the
controller's log, and is written when the error is met again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from gcore.errors import StoreUnavailable
from gcore.ledger.job import Fault
from gcore.plugins import sentence_of, trace_of
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put, Store

log = logging.getLogger(__name__)

MOST_FAULTS = 16
"""Of one job, by one controller: a plug-in whose every error is another one must not fill the store."""


class Faults:
    """Of one job, on one controller."""

    def __init__(self, store: Store, keys: JobKeys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._known: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def note(self, error: BaseException) -> None:
        """Write down, beside what goes on, what a plug-in raised; an error that has no traceback of a plug-in's is none."""
        trace = trace_of(error)
        if trace:
            self.tell(str(error) or sentence_of(error), trace)

    def tell(self, what: str, trace: str) -> None:
        """Write down, beside what goes on, what was wrong with a plug-in."""
        name = hashlib.blake2b((trace or what).encode(errors="replace"), digest_size=8).hexdigest()
        if name in self._known or len(self._known) >= MOST_FAULTS:
            return
        self._known.add(name)
        log.warning("%s\n%s", what, trace)
        task = asyncio.create_task(self._write(name, Fault(node=self._node, what=what, trace=trace)), name="fault")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Until all that was noted is written, or could not be."""
        await asyncio.gather(*self._tasks)

    async def _write(self, name: str, fault: Fault) -> None:
        key = self._keys.fault(name)
        try:
            await self._store.transact((Compare(key, 0),), (Put(key, fault.encode()),))
        except StoreUnavailable:
            self._known.discard(name)
