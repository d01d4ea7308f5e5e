"""One life of a daemon, which is one incarnation: from a granted lease to its loss.

It registers its node (`controllers.registering`), listens to who else is there and which jobs have not ended, and has a runner for each of these. What only
jobs need (data, tokens, engines' clients) is imported with the first job, in a thread, so that a daemon without one is small
and quickly there, and its lease is renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.belongings import Addresses, Belongings
from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.footprint import give_back
from controllers.identity import Identity, new_incarnation
from controllers.importing import imported
from controllers.job_gauges import jobs_shown
from controllers.registering import Registration
from controllers.retaking import work_on
from controllers.sharing import Sharing
from controllers.speaking import speak_newer
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.session import Session
from gcore.store.types import Store
from gcore.weights.copies import sweep_memory
from gcore.worker.process import send_signal

if TYPE_CHECKING:
    from controllers.job import JobRunner

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Life:
    """Of one daemon. `addresses` are told to everybody. `ready` is told whether the daemon can work, with a
    sentence, whenever that changes: it can while its lease surely lives and its node is registered."""

    def __init__(
        self,
        own: Belongings,
        store: Store,
        addresses: Addresses,
        ready: Callable[[bool, str], Awaitable[None]],
    ) -> None:
        self._own = own
        self._config = own.config
        self._clock = own.clock
        self._store = store
        self._addresses = addresses
        self._ready = ready
        self._changes = Changes()
        self._cluster = own.cluster = ClusterMirror(store, self._changes)
        self._shown: tuple[object, object] = (None, None)
        """Of which claims and shares the metrics are."""

    async def run(self) -> None:
        """Until the lease is lost, or could not be had."""
        try:
            lease = self._config.lease_times
            session = await Session.open(self._store, ttl=lease.ttl_s, interval_s=lease.tick_s, clock=self._clock)
        except StoreUnavailable as error:
            log.warning("%s", error)
            await self._ready(False, f"waits for the store: {error}")
            await self._clock.sleep(RETRY_S)
            return
        node, at = self._config.node, self._addresses
        identity = Identity(node, new_incarnation(node), at.people, session.lease, at.peers)
        log.info("%s begins", identity.incarnation)
        own, cluster = self._own, self._cluster
        own.metrics.lives.inc()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.run(), name="lease")
                for prefix, watch in cluster.watches.items():
                    group.create_task(watch(), name=f"watch {prefix}")
                group.create_task(self._speak(), name="schema version")
                sharing = Sharing(self._config.node, self._store, cluster, self._changes, self._clock)
                group.create_task(sharing.run(), name="shares")
                registration = Registration(own, self._store, identity, at.metrics, self._changes, session, self._ready)
                group.create_task(registration.run(), name="register")
                group.create_task(registration.watch_readiness(), name="readiness")
                group.create_task(own.health.run(cluster, self._changes), name="slots")
                group.create_task(self._run_jobs(identity), name="jobs")
        except* LeaseLost:
            log.warning("%s lost its lease; a new incarnation begins", identity.incarnation)
        finally:
            self._own.runners.clear()
            await self._ready(False, "has no lease")
            # On a clean end peers need not wait for the lease to run out.
            with contextlib.suppress(StoreUnavailable):
                await session.close()

    async def _speak(self) -> None:
        """Write what every node of the cluster reads, and never an older version again."""
        own, cluster, store, changes = self._own, self._cluster, self._store, self._changes
        while True:
            own.spoken = await speak_newer(own.spoken, self._config.node, cluster, store, changes, self._clock)
            changes.notify()

    async def _run_jobs(self, identity: Identity) -> None:
        """A runner for every job that has not ended; workers of jobs that have are stopped."""
        cluster = self._cluster
        # A job looked at before the workers were heard of would seem to have lost all of them.
        await self._changes.until(lambda: cluster.is_complete and self._own.spoken > 0)
        running: dict[str, asyncio.Task[None]] = {}
        asked: set[str] = set()
        swept: frozenset[str] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                seen = self._changes.count
                self._forget_ended(running)
                self._show()
                due = cluster.working - running.keys()
                if due:
                    await imported("controllers.job")
                for uid in due:
                    begin = functools.partial(self._begin, uid, identity)
                    is_active = functools.partial(self._is_active, uid)
                    running[uid] = group.create_task(work_on(begin, is_active, self._changes), name=f"job {uid}")
                    running[uid].add_done_callback(lambda _: self._changes.notify())
                for runner in self._own.runners.values():
                    runner.changes.notify()
                self._sweep(asked)
                if swept != cluster.active:
                    swept = cluster.active
                    memory = Path(self._config.memory_dir)
                    await asyncio.to_thread(sweep_memory, memory, self._config.home, self._config.node, swept)
                    await asyncio.to_thread(self._own.groups.sweep, swept)
                if self._changes.count == seen:  # or something has changed while threads were waited for
                    await self._changes.wait()

    # Small methods on purpose: a variable of the loop above would keep the last job's memory.

    def _begin(self, uid: str, identity: Identity) -> JobRunner:
        new = self._own.runners[uid] = self._new_runner(uid, identity)
        return new

    def _new_runner(self, uid: str, identity: Identity) -> JobRunner:
        from controllers.job import JobRunner

        own = self._own
        return JobRunner(
            uid,
            identity,
            self._store,
            self._cluster,
            Changes(),
            own.metrics,
            self._clock,
            self._config,
            own.folders,
            own.connector,
            groups=own.groups,
            traces=own.traces,
        )

    def _is_active(self, uid: str) -> bool:
        return uid in self._cluster.active

    def _show(self) -> None:
        cluster = self._cluster
        mine = [worker for worker in cluster.workers.values() if worker.node == self._config.node]
        self._own.metrics.show_cluster(len(cluster.nodes), Counter((worker.role, worker.state) for worker in mine))
        self._own.metrics.show_slots(len(self._config.slots), len(self._own.health.sick))
        if self._shown[0] is not cluster.claims or self._shown[1] is not cluster.shares:
            self._shown = cluster.claims, cluster.shares
            self._own.metrics.show_jobs(*jobs_shown(cluster.claims, cluster.working, cluster.shares))

    def _forget_ended(self, running: dict[str, asyncio.Task[None]]) -> None:
        ended = [uid for uid, task in running.items() if task.done() and not self._is_active(uid)]
        for uid in ended:
            del running[uid]
            self._own.runners.pop(uid, None)
        if ended:
            give_back()

    def _sweep(self, asked: set[str]) -> None:
        """Stop this node's workers of jobs that have ended, once: asked twice, a worker does not drain."""
        workers = self._cluster.workers
        asked &= workers.keys()
        for worker in workers.values():
            good = worker.state in ("starting", "serving") and worker.instance not in asked
            if worker.node == self._config.node and not self._is_active(worker.job_uid) and good:
                asked.add(worker.instance)
                log.info("stop %s: its job has ended", worker.instance)
                send_signal(worker.process, signal.SIGTERM)
