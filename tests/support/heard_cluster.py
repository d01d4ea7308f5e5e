"""A daemon's view of the cluster, without the daemon."""

from __future__ import annotations

import asyncio

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from gcore.store.types import Store


async def heard(store: Store) -> ClusterMirror:
    """Kept current for as long as the event loop runs."""
    changes = ChangeSignal()
    mirror = ClusterMirror(store, changes)
    mirror.watching = [asyncio.create_task(watch()) for watch in mirror.watches.values()]  # type: ignore[attr-defined]
    await changes.until(lambda: mirror.is_complete)
    return mirror
