"""The rollout replicas that this controller is responsible for: bringing them the weights, and seeing how they are. What is asked of
them is `controllers.inference.requests`'s.

Each engine has one controller at a time that routes to it and publishes to it (`controllers.rules.memory`). Two that both believe it do
no harm: samples carry the version they were made with, and the seal checks that. An engine that does not serve head's version is not routed to.

One that the plan puts to sleep gets nothing new from the moment at which that is heard. What it has under way comes back with the
tokens it has, and goes on elsewhere; then it gives its memory back, and what it serves is forgotten, so that after it has woken
it is brought the current weights before anything is asked of it.

One that owes answers and gives none is left by everybody who waits for it (`controllers.inference.rules` says when); it is asked on how it
is, in the background, and is used again once it answers. To end one that hangs is its node's business (`controllers.rules.workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from controllers.changes import ChangeSignal
from controllers.inference.requests import EngineConnection, Requests
from controllers.inference.rules import EngineHealth, HealthLimits, HealthState
from controllers.rules.view import EngineView
from gcore.errors import EngineError, EngineMemoryUnknown, EngineUnreachable
from gcore.observability.metrics import Metrics
from gcore.rollout.client import EngineReach, plain_reach
from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import limit_time
from gcore.types import ServingPool, Version
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)

HEALTH_CHECK_S = 0.25
"""The health of the engines is checked so often."""

LOAD_S = 0.5
"""For an engine to say what it has to do."""

REMEMBERED = 5
"""Of so many that slept, or woke, the median counts: one that took long for once must not make every change dear."""

SHUT_S = 2.0
"""So long has an engine that is put to sleep to give back what it has under way; what it still owes then goes on without."""


class EnginePool(Requests):
    """Engines by instance id, and the requests to them. `aim` says which are mine; `views` is what `decide` sees."""

    def __init__(
        self,
        changes: ChangeSignal,
        timeout_s: float,
        connect: EngineReach = plain_reach,
        *,
        clock: Clock | None = None,
        patience: HealthLimits | None = None,
        metrics: Metrics | None = None,
        told_every: int | None = None,
        pool: ServingPool = "rollout",
        rows: int | None = None,
    ) -> None:
        """`rows`: responses that one runs at once; None: nobody knows, and nothing that waits at one goes to another."""
        limits = patience or HealthLimits(request_s=timeout_s)
        super().__init__(changes, clock or SystemClock(), limits, metrics or Metrics(), told_every, pool)
        self._timeout_s = timeout_s
        self._connect = connect
        self._probes: set[asyncio.Task[None]] = set()
        self.rows = rows
        self._looked = -HEALTH_CHECK_S
        self._shut: frozenset[str] = frozenset()
        self._slept: deque[float] = deque(maxlen=REMEMBERED)
        self._woke: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def views(self) -> dict[str, EngineView]:
        """The state of the pool's engines, as `decide` sees them."""
        return {instance: connection.view for instance, connection in self._connections.items()}

    @property
    def slept_s(self) -> float | None:
        """Median seconds to put an engine to sleep; None: none was."""
        return median(self._slept) if self._slept else None

    @property
    def woke_s(self) -> float | None:
        """Median seconds from the wake to the next request; None: none was woken."""
        return median(self._woke) if self._woke else None

    @property
    def busy(self) -> frozenset[str]:
        """Engines with requests in flight."""
        return frozenset(instance for instance, connection in self._connections.items() if connection.in_flight)

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Set the engines of the pool: open and close connections."""
        for instance in list(self._connections):
            if instance not in workers or workers[instance].address != self._connections[instance].view.address:
                connection = self._connections.pop(instance)
                connection.leave()
                await connection.client.close()
                self._changes.notify()
        for instance, worker in workers.items():
            if instance not in self._connections:
                client = self._connect(f"http://{worker.address}", timeout_s=self._timeout_s, instance=instance)
                now = self._clock.monotonic()
                view = EngineView(instance, worker.address, None)
                self._connections[instance] = EngineConnection(client, view, health=EngineHealth(now))
                self._changes.notify()
        self.shut(self._shut)

    def shut(self, instances: Collection[str]) -> None:
        """Route nothing to these engines, which the plan puts to sleep; route to the others again."""
        self._shut = frozenset(instances)
        now = self._clock.monotonic()
        for instance, connection in self._connections.items():
            if (connection.shut is not None) != (instance in self._shut):
                connection.shut = now if instance in self._shut else None
                self._changes.notify()

    async def sleep(self, instance: str) -> None:
        """Release an engine's memory. Raises EngineError."""
        connection = self._connection_of(instance)
        connection.distrust()
        with self._note_trouble(connection):
            # A peer may have done so, or this controller before it was started again.
            if not (await connection.client.sleeps() and await connection.client.released()):
                began = self._clock.monotonic()
                await connection.client.sleep()
                self._slept.append(self._clock.monotonic() - began)
        connection.view = replace(connection.view, version=None, asleep=True)

    async def wake(self, instance: str, version: Version | None = None) -> None:
        """Restore an engine's memory. `version`: the version of its weights, if they never change; else `publish` follows. Raises
        EngineError."""
        connection = self._connection_of(instance)
        connection.waking = self._clock.monotonic()
        with self._note_trouble(connection):
            await (connection.client.take_memory() if version is None else connection.client.wake(version))
        connection.view = replace(connection.view, version=None, asleep=False)
        connection.woken = True

    @contextmanager
    def _note_trouble(self, connection: EngineConnection) -> Iterator[None]:
        """Keep what goes wrong in the block in the connection's view."""
        try:
            yield
            connection.view = replace(connection.view, trouble="")
            connection.health = replace(connection.health, unknown=None)
        except EngineError as error:
            connection.view = replace(connection.view, trouble=error.what)
            self._note_memory(connection, error)
            raise
        finally:
            self._changes.notify()

    def _note_memory(self, connection: EngineConnection, error: EngineError) -> None:
        """An engine whose memory stays unknown is ended: SGLang's server does not survive a guess."""
        if isinstance(error, EngineMemoryUnknown):
            connection.health = connection.health.loses_memory(self._clock.monotonic())
            self._looked = -HEALTH_CHECK_S

    async def loads(self, instances: Collection[str]) -> dict[str, tuple[int, int]]:
        """Requests that these engines run, and that wait there. An engine that does not say counts as running what this pool asked of it."""

        async def load(connection: EngineConnection) -> tuple[int, int]:
            running: int | None = None
            waiting: int | None = None
            with contextlib.suppress(EngineError, TimeoutError):
                async with limit_time(LOAD_S):
                    running, waiting = await connection.client.load()
            return (connection.in_flight if running is None else running), waiting or 0

        asked = {name: self._connections[name] for name in instances if name in self._connections}
        awake = {name: connection for name, connection in asked.items() if not connection.view.asleep}
        found = dict(zip(awake, await asyncio.gather(*map(load, awake.values())), strict=True))
        return {name: found.get(name, (0, 0)) for name in asked}

    def _connection_of(self, instance: str) -> EngineConnection:
        connection = self._connections.get(instance)
        if connection is None:
            # It may have ended, or become a peer's, between the decision and the deed.
            raise EngineUnreachable(f"{instance} is not connected", fix="Look again")
        return connection

    async def close(self) -> None:
        """Close all connections."""
        await self.aim({})

    async def publish(self, instance: str, version: Version, folder: Path) -> None:
        """Bring one engine to `version`. Raises EngineError.

        Of one that is met, was distrusted or has failed it is found out first what it serves: a peer may have brought it there.
        """
        connection = self._connection_of(instance)
        connection.coming = version
        asked = self._clock.monotonic()
        try:
            served = await connection.client.served() if connection.view.version is None else connection.view.version
            if served is None and await (
                connection.client.released() if connection.woken else connection.client.sleeps()
            ):
                # A controller that is gone put it to sleep, or another since this one woke it: it is woken first.
                connection.view, connection.woken = replace(connection.view, asleep=True), False
                raise EngineError(f"{instance} sleeps", fix="It is woken first")
            if connection.view.version is None and served == version:
                # Whoever brought it there may have died before it let the engine go on; going on twice does no harm.
                await connection.client.resume()
            else:
                await connection.client.update_weights(str(folder), version)
            if connection.woken:
                self._woke.append(self._clock.monotonic() - connection.waking)
            connection.woken = False
            connection.view = replace(connection.view, version=version, trouble="", asleep=False)
            connection.health = connection.health.answers(self._clock.monotonic())
        except EngineError as error:
            # What it serves now is anybody's guess: it is asked, and let go on, when this is tried again.
            connection.view = replace(
                connection.view, version=None, trouble="" if connection.view.asleep else error.what
            )
            self._note_memory(connection, error)
            if isinstance(error, EngineUnreachable):
                connection.health = connection.health.in_vain(asked)
                self._looked = -HEALTH_CHECK_S  # that it is silent is seen before the next try is decided on
            raise
        finally:
            connection.coming = None
            self._changes.notify()

    def look_after(self, controllers: int = 1) -> None:
        """Check each engine's health; leave a silent one, and probe it. The reconciler calls this at each look.

        `controllers`: members of the job, which all ask a judge's engines.
        """
        now = self._clock.monotonic()
        if now < self._looked + HEALTH_CHECK_S:
            return
        self._looked = now
        for instance, connection in self._connections.items():
            if connection.coming is not None:
                continue  # bringing it weights has a limit of its own
            busy = bool(connection.requests)
            connection.health = connection.health.look(self._patience, now, busy=busy)
            verdict = connection.health.verdict(self._patience, now)
            view = replace(
                connection.view,
                version=connection.view.version if verdict is HealthState.WELL else None,
                silent=verdict is not HealthState.WELL,
                hung=verdict is HealthState.HUNG,
                why=connection.health.why(self._patience, now),
            )
            if verdict is not HealthState.WELL or (connection.shut is not None and now >= connection.shut + SHUT_S):
                connection.leave()
            if view != connection.view:
                connection.view = view
                self._changes.notify()
            if connection.health.wants_probe(self._patience, now, connection.probed, busy=busy) and (
                connection.probe is None or connection.probe.done()
            ):
                connection.probed = now
                connection.probe = asyncio.get_running_loop().create_task(
                    self._probe(connection), name=f"probe {instance}"
                )
                self._probes.add(connection.probe)
                connection.probe.add_done_callback(self._probes.discard)
        if self.rows is not None:
            self.rebalance(self.rows)

    async def _probe(self, connection: EngineConnection) -> None:
        try:
            async with limit_time(self._patience.probe_s):
                await connection.client.scheduler_state()
        except (EngineUnreachable, TimeoutError) as error:
            log.debug("%s: %s", connection.client.base_url, error)
            return
        except EngineError as error:  # who refuses has answered
            log.debug("%s: %s", connection.client.base_url, error)
        connection.health = connection.health.answers(self._clock.monotonic())

    def serves(self, version: Version) -> bool:
        """Whether one of my engines serves `version`."""
        return any(connection.view.version == version for connection in self._connections.values())
