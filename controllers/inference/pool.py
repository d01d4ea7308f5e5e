"""The engines of one pool that this controller uses: connections, weight sync, sleep and wake, and health checks.
`controllers.inference.requests` sends requests over the connections.

Each rollout engine has one controller at a time that sends requests and weights to it (`controllers.rules.memory`). If
two controllers both believe to be it, this does no harm: samples carry the weight version that generated them, and the
check of the seal uses it. A controller sends no requests to an engine that does not serve the newest committed weights.

As soon as the controller sees a plan that puts an engine to sleep, it sends the engine no new requests. The engine
returns its running requests with their tokens, and they continue on other engines. Then it releases its memory, and
the controller forgets its weight version, so that after its wake it gets the current weights before any request.

If an engine has outstanding requests and does not respond for too long (`controllers.inference.rules`), all its
requests go to other engines. The controller probes it in the background, and uses it again once it responds. The
controller of its node ends an engine that hangs (`controllers.rules.workers`).
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
"""Seconds between two health checks."""

LOAD_S = 0.5
"""Maximum seconds to wait until an engine reports its load."""

REMEMBERED = 5
"""Number of newest sleeps or wakes whose median is reported, so that a single slow one does not make all look slow."""

SHUT_S = 2.0
"""Maximum seconds that an engine which is put to sleep has to return its running requests. After that they continue
elsewhere from the tokens that it has reported before."""


class EnginePool(Requests):
    """The engines of one pool, by instance, with the requests to them. `aim` sets which engines this controller uses;
    `views` returns their state for the rules."""

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
        """`connect`: creates the client of an engine. `told_every`: tokens between two progress reports; None: default.
        `rows`: concurrent responses per engine; None: not known, so waiting requests are not moved between engines."""
        limits = patience or HealthLimits(request_s=timeout_s)
        super().__init__(changes, clock or SystemClock(), limits, metrics or Metrics(), told_every, pool)
        self._timeout_s = timeout_s
        self._connect = connect
        self._probes: set[asyncio.Task[None]] = set()
        self.rows = rows
        self.beside_policy = False
        """Whether the requests go to the policy's engines, which belong to another pool: those of a judge that is an
        adapter do."""
        self._looked = -HEALTH_CHECK_S
        self._shut: frozenset[str] = frozenset()
        self._slept: deque[float] = deque(maxlen=REMEMBERED)
        self._woke: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def views(self) -> dict[str, EngineView]:
        """The state of each engine, by instance, for the view of the job."""
        return {instance: connection.view for instance, connection in self._connections.items()}

    @property
    def slept_s(self) -> float | None:
        """Median seconds to put an engine to sleep; None: not measured."""
        return median(self._slept) if self._slept else None

    @property
    def woke_s(self) -> float | None:
        """Median seconds from the start of a wake until the engine has its weights; None: not measured."""
        return median(self._woke) if self._woke else None

    @property
    def busy(self) -> frozenset[str]:
        """Engines with requests in flight, by instance."""
        return frozenset(instance for instance, connection in self._connections.items() if connection.in_flight)

    async def aim(self, workers: Mapping[str, WorkerRecord]) -> None:
        """Set the engines of the pool: connect to new ones, and close the connections to others."""
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
                self._connections[instance] = EngineConnection(client, view, worker.node, health=EngineHealth(now))
                self._changes.notify()
        self.shut(self._shut)

    def shut(self, instances: Collection[str]) -> None:
        """Send no more requests to these engines, because they are about to sleep; send requests to the others
        again."""
        self._shut = frozenset(instances)
        now = self._clock.monotonic()
        for instance, connection in self._connections.items():
            if (connection.shut is not None) != (instance in self._shut):
                connection.shut = now if instance in self._shut else None
                self._changes.notify()

    async def sleep(self, instance: str) -> None:
        """Put an engine to sleep, so that it releases its memory. Raises EngineError."""
        connection = self._connection_of(instance)
        connection.distrust()
        with self._note_trouble(connection):
            # Another controller may have done so, or this one before its restart.
            if not (await connection.client.sleeps() and await connection.client.released()):
                began = self._clock.monotonic()
                await connection.client.sleep()
                self._slept.append(self._clock.monotonic() - began)
        connection.view = replace(connection.view, version=None, asleep=True)

    async def wake(self, instance: str, version: Version | None = None) -> None:
        """Wake an engine, so that it allocates its memory. `version`: of its weights, if it restores them itself; None:
        `publish` must follow. Raises EngineError."""
        connection = self._connection_of(instance)
        connection.waking = self._clock.monotonic()
        with self._note_trouble(connection):
            await (connection.client.take_memory() if version is None else connection.client.wake(version))
        connection.view = replace(connection.view, version=None, asleep=False)
        connection.woken = True

    @contextmanager
    def _note_trouble(self, connection: EngineConnection) -> Iterator[None]:
        """Context manager: record an engine error of the block in the engine's view, and clear the last one on
        success."""
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
        """If the error says that it is unknown whether the engine has its memory, record since when. If this persists,
        the engine is ended, because SGLang's server does not survive a sleep or wake request in the wrong state."""
        if isinstance(error, EngineMemoryUnknown):
            connection.health = connection.health.loses_memory(self._clock.monotonic())
            self._looked = -HEALTH_CHECK_S

    async def loads(self, instances: Collection[str]) -> dict[str, tuple[int, int]]:
        """Ask these engines for their numbers of running and waiting requests. If one does not report, all requests
        that this controller has sent to it count as running."""

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
            # The engine may have ended, or belong to another controller now, since the decision.
            raise EngineUnreachable(
                f"engine {instance} is not connected", fix="The controller retries at another engine"
            )
        return connection

    async def close(self) -> None:
        """Close all connections."""
        await self.aim({})

    async def publish(self, instance: str, version: Version, folder: Path) -> None:
        """Weight sync: have one engine load the weights `version` from `folder`. Raises EngineError.

        If it is not known which weights the engine has, it is asked first, because another controller may have updated
        it already.
        """
        connection = self._connection_of(instance)
        connection.coming = version
        asked = self._clock.monotonic()
        try:
            served = await connection.client.served() if connection.view.version is None else connection.view.version
            if served is None and await (
                connection.client.released() if connection.woken else connection.client.sleeps()
            ):
                # A lost controller put it to sleep, or another controller did after this one woke it: wake it first.
                connection.view, connection.woken = replace(connection.view, asleep=True), False
                raise EngineError(f"engine {instance} has released its memory", fix="The controller wakes it first")
            if connection.view.version is None and served == version:
                # The controller that updated it may have died before it resumed the engine; resuming twice does no
                # harm.
                await connection.client.resume()
            else:
                await connection.client.update_weights(str(folder), version)
            if connection.woken:
                self._woke.append(self._clock.monotonic() - connection.waking)
            connection.woken = False
            connection.view = replace(connection.view, version=version, trouble="", asleep=False)
            connection.health = connection.health.answers(self._clock.monotonic())
        except EngineError as error:
            # Its version is now unknown: the next attempt queries it and resumes the engine.
            connection.view = replace(
                connection.view, version=None, trouble="" if connection.view.asleep else error.what
            )
            self._note_memory(connection, error)
            if isinstance(error, EngineUnreachable):
                connection.health = connection.health.in_vain(asked)
                self._looked = -HEALTH_CHECK_S  # check its health before the next attempt
            raise
        finally:
            connection.coming = None
            self._changes.notify()

    def look_after(self, controllers: int = 1) -> None:
        """Check the health of each engine; send the requests of a silent one elsewhere, and probe it. Move waiting
        requests to engines with capacity. The reconciler calls this in each cycle.

        `controllers`: number of controllers that use the engines (only judge pools need it).
        """
        now = self._clock.monotonic()
        if now < self._looked + HEALTH_CHECK_S:
            return
        self._looked = now
        for instance, connection in self._connections.items():
            if connection.coming is not None:
                continue  # the weight sync has its own timeout
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

    def reset_hung(self) -> None:
        """Forget what was observed of engines that count as hung, so that they are used again once their weights are
        known."""
        now = self._clock.monotonic()
        for connection in self._connections.values():
            if connection.view.hung:
                connection.health = EngineHealth(now)
                connection.view = replace(connection.view, silent=False, hung=False, why="")

    async def _probe(self, connection: EngineConnection) -> None:
        """Send a health probe, and record any response as a sign of life."""
        try:
            async with limit_time(self._patience.probe_s):
                await connection.client.scheduler_state()
        except (EngineUnreachable, TimeoutError) as error:
            log.debug("%s: %s", connection.client.base_url, error)
            return
        except EngineError as error:  # a refusal is a response
            log.debug("%s: %s", connection.client.base_url, error)
        connection.health = connection.health.answers(self._clock.monotonic())

    def serves(self, version: Version) -> bool:
        """Whether an engine of this pool serves the weights `version`."""
        return any(connection.view.version == version for connection in self._connections.values())
