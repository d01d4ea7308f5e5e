"""How much the store holds: of each job, as this controller hears of its records; and of all, as etcd's members say themselves.

For people and alerts: nothing is decided by it. A member that does not answer is shown no more; that it does not is told by the calls
that fail.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from gcore.clock import Clock
from gcore.metrics import Metrics
from gcore.store.standing import StoreStanding
from gcore.store.types import WatchBatch

ASK_EVERY_S = 15.0


class JobSize:
    """The keys and bytes of one job. Mutable; as much memory as the job has keys, which are bounded."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self.bytes = 0

    @property
    def keys(self) -> int:
        """That the store holds of it."""
        return len(self._sizes)

    def note(self, batch: WatchBatch) -> None:
        """A change of the job's records."""
        if batch.reset:
            self._sizes, self.bytes = {}, 0
        for event in batch.events:
            self.bytes -= self._sizes.pop(event.kv.key, 0)
            if event.kind == "put":
                size = self._sizes[event.kv.key] = len(event.kv.key.encode()) + len(event.kv.value)
                self.bytes += size

    def show(self, metrics: Metrics, job: str) -> None:
        """Set the job's gauges."""
        metrics.job_keys.labels(job).set(self.keys)
        metrics.job_bytes.labels(job).set(self.bytes)


async def watch_members(
    standing: Callable[[], Awaitable[Mapping[str, StoreStanding]]], metrics: Metrics, clock: Clock
) -> None:
    """Show what the store's members say of themselves, for ever. `standing`: asks them; a member that does not answer is not in it."""
    while True:
        metrics.show_members(await standing())
        await clock.sleep(ASK_EVERY_S)
