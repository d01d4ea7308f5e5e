"""`python -m gcore.emulated.host --home HOME --launch FILE`: all emulated engines of a job on one node, in one process.

Each has its own port, its own registration in the store, its own pace, and a process that stands for it (`stand_ins`): whoever ends or kills
that one ends one engine. Engines that are placed later, such as judges where the policy's engines are already, come to the process that there
is (`inbox`), for those that share a slot take from one another. As a real worker's supervisor does, the process ends when it is told
to (SIGTERM), when its node has had no controller for the grace period, and when the store was away for very long; and when it has no
engine any more. Logs what it is in its first line.

Ends with 0 after an orderly stop, 2 when the launch document cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

from gcore import logs
from gcore.clock import Clock, SystemClock
from gcore.emulated.doors import Doors, KeysByPort
from gcore.emulated.engine import EmulatedEngine
from gcore.emulated.inbox import Inbox
from gcore.emulated.launch import SAID, HostLaunch, PlacedEngine
from gcore.emulated.law import Law, Timing
from gcore.emulated.law_file import read_law
from gcore.emulated.live_slot import LiveSlot
from gcore.emulated.models import Models
from gcore.emulated.registration import RETRY_S, Registration
from gcore.emulated.routes import app
from gcore.emulated.stand_ins import StandIns
from gcore.errors import GcoreError, StoreUnavailable, UsageError
from gcore.ledger.records import Head
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.connecting import connect
from gcore.store.types import Store
from gcore.tls.material import Watched
from gcore.tls.serving_http import serving_context
from gcore.worker.process import ProcessId, status_of
from gcore.worker.records import WorkerRecord, WorkerState

log = logging.getLogger("gcore.emulated")

LINGER_S = 3.0
"""So long a failure stays readable in the store."""
LOOK_S = 0.1
"""How often it is looked for engines that are placed later."""
HANDED_S = 2.0


class Host:
    """The process's life, in its event loop. `launch`: its first engines; `inbox`: where it looks for more."""

    def __init__(
        self, launch: HostLaunch, law: Law, store: Store, clock: Clock, me: ProcessId, inbox: Inbox | None = None
    ) -> None:
        self._launch = launch
        self._law = law
        self._store = store
        self._clock = clock
        self._me = me
        self._inbox = inbox
        self._registration = Registration(store, clock, launch.lease_ttl_s)
        self._engines: dict[int, EmulatedEngine] = {}
        self._slots: defaultdict[str, LiveSlot] = defaultdict(lambda: LiveSlot(clock, law.speedup))
        self._models = Models()
        self._stand_ins = StandIns()
        self._keys: dict[int, str] = {}
        tls = None if launch.tls is None else serving_context(Watched(launch.tls.material))
        self._doors = Doors(KeysByPort(app(self._engines), self._keys), launch.host, tls)
        self._living = 0
        self._step = 0
        self._stop = asyncio.Event()
        self._why = ""

    def stop(self, why: str) -> None:
        """Ask it to end; in the event loop."""
        self._why = self._why or why
        self._stop.set()

    async def run(self) -> None:
        """Until it is to end."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._doors.serve(), name="serve")
            begun = [
                tasks.create_task(self._registration.run(), name="register"),
                tasks.create_task(self._watch_node(), name="watch node"),
            ]
            if self._law.judges_change:
                begun.append(tasks.create_task(self._follow_head(), name="follow head"))
            self._admit(self._launch, tasks, begun)
            if self._inbox is not None:
                begun.append(tasks.create_task(self._look_for_more(self._inbox, tasks, begun), name="look for more"))
            await self._stop.wait()
            log.info("stopping: %s", self._why)
            for task in begun:
                task.cancel()
            self._doors.close()
            await serving
        self._stand_ins.close()
        await self._registration.leave()

    def _admit(self, launch: HostLaunch, tasks: asyncio.TaskGroup, begun: list[asyncio.Task[None]]) -> None:
        """More engines."""
        log.info("%d engines on %s: %s; %s", len(launch.engines), launch.node, SAID, self._law.model_dump_json())
        for placed in launch.engines:
            self._living += 1
            begun.append(tasks.create_task(self._live(placed, launch), name=placed.instance))

    async def _look_for_more(self, inbox: Inbox, tasks: asyncio.TaskGroup, begun: list[asyncio.Task[None]]) -> None:
        while True:
            for launch in inbox.take():
                self._admit(launch, tasks, begun)
            if not self._living:
                self.stop("it has no engine any more")
            await self._clock.sleep(LOOK_S)

    async def _live(self, placed: PlacedEngine, launch: HostLaunch) -> None:
        """One engine: it comes up, serves, and is gone when the process that stands for it has ended."""
        stand_in = self._stand_ins.start(placed.instance)
        ended = asyncio.ensure_future(stand_in.ended())
        try:
            await self._serve(placed, launch, stand_in.identity, ended)
        finally:
            ended.cancel()
            stand_in.end()
            self._registration.forget(placed.instance)
            self._living -= 1

    async def _serve(
        self, placed: PlacedEngine, launch: HostLaunch, process: ProcessId, ended: asyncio.Future[None]
    ) -> None:
        def show(state: WorkerState, address: str = "", why: str = "") -> None:
            record = self._record(placed, process, state, address)
            self._registration.show(record.model_copy(update={"reason": why}))

        show("starting")
        try:
            model = self._models.of(launch, placed.judge)
        except GcoreError as error:
            log.error("%s: %s", placed.instance, error)
            show("failed", why=str(error))
            await self._clock.sleep(LINGER_S)
            return
        law = self._law.of_judges if placed.judge else self._law.of_policy
        timing = Timing(self._law, placed.instance, law, slots=len(placed.slots))
        timing.step = self._step
        loading = asyncio.ensure_future(self._clock.sleep(timing.load() / self._law.speedup))
        await asyncio.wait({loading, ended}, return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        if ended.done():
            return
        rows = launch.rows if not placed.judge else launch.judge(placed.judge).rows
        slot = self._slots[launch.block(placed.slot)]
        version, spans = launch.weight_version, placed.slots
        engine = EmulatedEngine(
            placed.instance, model, timing, self._clock, rows=rows, version=version, slot=slot, spans=spans
        )
        port = await self._doors.open()
        self._engines[port] = engine
        self._keys[port] = placed.api_key
        try:
            show("serving", f"{launch.host}:{port}")
            await ended
            log.info("%s was ended", placed.instance)
        finally:
            del self._engines[port], self._keys[port]
            self._doors.shut(port)
            engine.gone()

    async def _follow_head(self) -> None:
        """Judges are told the step that the job has come to: their weights do not say it."""
        key = keys.JobKeys(self._launch.job_uid).head
        async for batch in self._store.watch(key):
            for event in batch.events:
                if event.kind == "put" and event.kv.key == key:
                    self._step = Head.decode(event.kv.value, key).step
            for engine in self._engines.values():
                engine.told(self._step)

    async def _watch_node(self) -> None:
        """Ends the process when nobody is there who would use it."""
        launch = self._launch
        absent: float | None = None
        away: float | None = None
        while True:
            now = self._clock.monotonic()
            try:
                there = await self._store.get(keys.node(launch.node)) is not None
            except StoreUnavailable:
                away = now if away is None else away
                if now - away > launch.store_grace_s:
                    self.stop(f"the store has been away for {now - away:.0f} s")
            else:
                away = None
                absent = None if there else now if absent is None else absent
                if absent is not None and now - absent >= launch.orphan_grace_s:
                    self.stop(f"orphaned: node {launch.node} has had no controller for {now - absent:.0f} s")
            await self._clock.sleep(max(RETRY_S, launch.orphan_grace_s / 8))

    def _record(self, placed: PlacedEngine, process: ProcessId, state: WorkerState, address: str) -> WorkerRecord:
        return WorkerRecord(
            instance=placed.instance,
            node=self._launch.node,
            role="reward" if placed.judge else "rollout",
            job_uid=self._launch.job_uid,
            slot=placed.slot,
            pid=process.pid,
            pid_started=process.started,
            child_pid=self._me.pid,
            state=state,
            address=address,
            judge=placed.judge,
            further=placed.further,
        )


@contextlib.asynccontextmanager
async def _signals(host: Host) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop, f"asked to by {number.name}")
    yield


async def _run(launch: HostLaunch, home: Path) -> None:
    me = status_of(os.getpid())
    if me is None:
        raise UsageError("this process cannot see itself under /proc", fix="Mount /proc")
    clock = SystemClock()
    inbox = Inbox.of(launch, home)
    document = inbox.put(launch)
    while not inbox.claim():
        if not document.exists():
            log.info("the engines are with another process")
            await clock.sleep(HANDED_S)  # until then they are registered, and nobody need wonder where they are
            return
        await clock.sleep(LOOK_S)
    launches = inbox.take()
    if not launches:
        return  # whoever had taken it has died since; they are started anew
    law = read_law(os.environ)
    store = await connect(launch.store, clock)
    try:
        host = Host(launches[0], law, store, clock, me.identity, inbox)
        for other in launches[1:]:
            inbox.put(other)
        async with _signals(host):
            await host.run()
    finally:
        await store.close()


def _read(path: Path) -> HostLaunch:
    try:
        return HostLaunch.decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the launch document ({error.strerror})", where=str(path)) from error
    except UnreadableRecord as error:
        raise UsageError(error.what, where=error.where, fix=error.fix) from error


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(prog="gcore.emulated.host", description=f"Emulated engines: {SAID}.")
    parser.add_argument("--home", required=True, type=Path, help="folder of the cluster it belongs to")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    logs.set_up()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        launch = _read(arguments.launch)
        logs.set_up({"controller": launch.node, "job": launch.job_uid})
        asyncio.run(_run(launch, arguments.home))
    except GcoreError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
