"""What plug-ins raised, with their own tracebacks, and why prompts failed, kept for the job's events.

The same error of the same code is written once for a job, whoever meets it; a controller writes a bounded number. An event
tells it; what becomes of the prompt or of the job is decided elsewhere. What the store did not take stands in the controller's log,
and is written when it is met again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from gcore.errors import StoreUnavailable
from gcore.ledger.job import FaultRecord
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put, Store

log = logging.getLogger(__name__)

MOST_FAULTS = 16
"""Of one job, by one controller: a plug-in whose every error is another one must not fill the store."""
MOST_OF_JOB = 64
"""Of one job, by all controllers that it ever had; each may write one more."""


class FaultBook:
    """Of one job, on one controller."""

    def __init__(self, store: Store, keys: JobKeys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._known: set[str] = set()
        self._to_write: asyncio.Queue[tuple[str, FaultRecord]] = asyncio.Queue()

    def note(self, what: str, trace: str = "") -> None:
        """To be written down, unless it is known."""
        name = hashlib.blake2b((trace or what).encode(errors="replace"), digest_size=8).hexdigest()
        if name in self._known or len(self._known) >= MOST_FAULTS:
            return
        self._known.add(name)
        told = f"{what}\n{trace}" if trace else what
        log.warning("%s", told.encode(errors="backslashreplace").decode())  # a log takes no half surrogate pair
        self._to_write.put_nowait((name, FaultRecord(node=self._node, what=what, trace=trace)))

    async def run(self) -> None:
        """For ever: write down what was noted."""
        while True:
            await self._write(*await self._to_write.get())

    async def finish(self) -> None:
        """Write down what is left."""
        while not self._to_write.empty():
            await self._write(*self._to_write.get_nowait())

    async def _write(self, name: str, record: FaultRecord) -> None:
        key = self._keys.fault(name)
        try:
            if len((await self._store.list(self._keys.fault_prefix)).kvs) >= MOST_OF_JOB:
                return
            await self._store.transact((Compare(key, 0),), (Put(key, record.encode()),))
        except StoreUnavailable:
            self._known.discard(name)  # it is told when it is met again
