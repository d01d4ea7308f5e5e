"""From one schema version to the next: a daemon writes what everybody reads, and the store says so before.

Whoever begins anew could otherwise not know it. It may hear of an older node that came back, and would write as that one reads,
beside peers who have long written the next version; what has no words in the older one, such as the parts that a step came in,
would be gone from what it writes.
"""

from __future__ import annotations

import contextlib
import logging

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.versions import BEFORE_IT_WAS_TOLD, version_for, version_told
from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.schema import NEWEST_VERSION, speak
from gcore.store import keys
from gcore.store.types import Compare, Put, Store

log = logging.getLogger(__name__)

RETRY_S = 0.5


async def speak_newer(
    spoken: int, node: str, cluster: ClusterMirror, store: Store, changes: Changes, clock: Clock
) -> int:
    """Wait until a newer version than `spoken` is due (0: any), speak it, and say which it is. `node` is this daemon's own."""

    def due() -> int:
        return version_for(cluster.nodes.keys() - {node}, cluster.reads, cluster.written)

    while True:
        await changes.until(lambda: cluster.is_complete and due() > spoken)
        version = due()
        with contextlib.suppress(StoreUnavailable):
            if await _tell(store, version):
                speak(version)
                log.info("writes schema version %d of %d from now on", version, NEWEST_VERSION)
                return version
        await clock.sleep(RETRY_S)


async def _tell(store: Store, version: int) -> bool:
    """Whether the store says that `version`, or a newer one, is written in it."""
    told = await store.get(keys.WRITTEN)
    said = version_told(told.value) if told is not None else None
    if (said or BEFORE_IT_WAS_TOLD) >= version:
        return True
    compare = Compare(keys.WRITTEN, told.mod_revision if told is not None else 0)
    return (await store.transact((compare,), (Put(keys.WRITTEN, str(version).encode()),))).won
