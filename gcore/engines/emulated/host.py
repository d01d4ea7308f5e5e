"""`python -m gcore.emulated.host --home HOME --launch FILE`: all emulated engines of a job on one node, in one process.

Each engine has its own port, registration in the store, speed and placeholder process. When the placeholder process
ends, the engine ends. Engines that are placed later, such as judges beside rollout engines, are added to the running
process (`LaunchQueue`), because the simulation of engines on one slot needs all of them. Like a real worker's
supervisor, the process ends on SIGTERM, when its node has had no controller for the grace period
(`orphan_grace_s`), and when the store was unreachable for `store_grace_s`. It also ends when it has no engine left. Its
first log line says that the engines are emulated.

Exit status: 0 after an orderly stop, 2 if the launch document cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gcore.api.tls import Connector, ReloadingFiles, serving_context
from gcore.engines.emulated.engine import EmulatedEngine, EmulatedModels, LiveSlot, ResponseBlobs
from gcore.engines.emulated.launch import SAID, HostLaunch, LaunchQueue, PlacedEngine
from gcore.engines.emulated.law import ReplicaTiming, TimingModel, read_timing_model
from gcore.engines.emulated.routes import EngineListeners, KeysByPort, new_app
from gcore.errors import GcoreError, LeaseLost, StoreUnavailable, UsageError
from gcore.ledger.records.chain import Head
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.reference import connect_store
from gcore.store.session import Session
from gcore.store.types import MAX_OPERATIONS, Compare, Delete, Put, Store
from gcore.system.clock import Clock, SystemClock
from gcore.system.daemon import set_up_logging
from gcore.system.network import join_host_port
from gcore.system.process import CannotStart, ProcessId, process_status, wait_child_ended
from gcore.worker.records import WorkerRecord, WorkerState

if TYPE_CHECKING:
    from gcore.engines.serving.denoising import AnswerWriter

COMMAND = ("sh", "-c", "read never")


class PlaceholderProcess:
    """An idle process that stands for one emulated engine, so that the engine can be killed like a real worker.

    Controllers end a worker through its process ID, but the emulated engines of a node share one process. So each has a
    shell that waits forever. Its process ID is in the engine's registration, and when the shell ends, by any signal,
    only this engine is removed, at once. All shells read from one pipe whose other end the host keeps open: when the
    host dies, they end too.
    """

    def __init__(self, child: subprocess.Popen[bytes], identity: ProcessId) -> None:
        self._child = child
        self.identity = identity

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await wait_child_ended(self._child.pid)
        self._child.wait()

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()


class PlaceholderProcesses:
    """Starts the placeholder processes of a host's engines, and ends them together with the host."""

    def __init__(self) -> None:
        self._end, self._held = os.pipe()

    def start(self, instance: str) -> PlaceholderProcess:
        """Start the placeholder process of engine `instance`; process lists show this name. Raises CannotStart."""
        try:
            child = subprocess.Popen([*COMMAND, instance], stdin=self._end, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise CannotStart(f"cannot start the placeholder process of {instance} ({error.strerror})") from error
        status = process_status(child.pid)
        if status is None:
            raise CannotStart(f"the placeholder process of {instance} is not visible under /proc", fix="Mount /proc")
        return PlaceholderProcess(child, status.identity)

    def close(self) -> None:
        """End all placeholder processes, by closing their pipe."""
        os.close(self._held)
        os.close(self._end)


RETRY_S = 1.0

SETTLE_S = 0.05
"""Seconds to wait after a changed record for further ones, because the engines of a process start almost together."""

log = logging.getLogger("gcore.emulated")


class EngineRegistrations:
    """Keeps the registrations (`WorkerRecord`) of all engines of a process in the store, under one lease.

    Each engine has its own record, as a real one has. They share one lease, because they die together. (A thousand
    leases, each renewed three times in its lifetime, would cost one machine more than everything that is to be
    measured.) Writes of the newest records are repeated until they succeed. Each write compares the keys' revisions, so
    that a late write cannot overwrite a newer record. When a single engine ends, its record is deleted.
    """

    def __init__(self, store: Store, clock: Clock, ttl: int) -> None:
        self._store = store
        self._clock = clock
        self._ttl = ttl
        self._wanted: dict[str, WorkerRecord] = {}
        self._changed = asyncio.Event()
        self._session: Session | None = None

    def show(self, record: WorkerRecord) -> None:
        """Set the record of an engine that the store shall have from now on."""
        if self._wanted.get(record.instance) != record:
            self._wanted[record.instance] = record
            self._changed.set()

    def forget(self, instance: str) -> None:
        """Delete the record of an engine from the store, in the background."""
        if self._wanted.pop(instance, None) is not None:
            self._changed.set()

    async def run(self) -> None:
        """Write changed records until cancelled. Opens a new lease when the old one has ended."""
        while True:
            try:
                self._session = await Session.open(self._store, clock=self._clock, ttl=self._ttl)
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._session.run())
                    tasks.create_task(self._write(self._session.lease))
            except* LeaseLost:
                log.warning("the store ended the lease; registering again")

    async def leave(self) -> None:
        """Revoke the lease, which deletes all registrations."""
        if self._session is not None:
            await self._session.close()

    async def _write(self, lease: int) -> None:
        shown: dict[str, WorkerRecord] = {}
        tried: set[str] = set()
        """Instances whose records the store may have: the result of a write is not always known."""
        self._changed.set()  # a new lease requires all records to be written again
        while True:
            await self._changed.wait()
            await self._clock.sleep(SETTLE_S)
            self._changed.clear()
            due = {name: record for name, record in self._wanted.items() if shown.get(name) != record}
            names = sorted(due)
            try:
                gone = sorted(tried - self._wanted.keys())
                for start in range(0, len(gone), MAX_OPERATIONS):
                    former = gone[start : start + MAX_OPERATIONS]
                    await self._store.transact((), [Delete(keys.worker(name)) for name in former])
                    tried -= set(former)
                    shown = {name: record for name, record in shown.items() if name in tried}
                for start in range(0, len(names), MAX_OPERATIONS):
                    part = {name: due[name] for name in names[start : start + MAX_OPERATIONS]}
                    tried |= part.keys()
                    if await self._put(lease, part):
                        shown |= part
                    else:
                        self._changed.set()
            except StoreUnavailable:
                self._changed.set()
                await self._clock.sleep(RETRY_S)

    async def _put(self, lease: int, records: Mapping[str, WorkerRecord]) -> bool:
        revisions = {}
        for name in records:
            there = await self._store.get(keys.worker(name))
            revisions[name] = there.mod_revision if there else 0
        compares = [Compare(keys.worker(name), revision) for name, revision in revisions.items()]
        puts = [Put(keys.worker(name), record.encode(), lease) for name, record in records.items()]
        return (await self._store.transact(compares, puts)).won


LINGER_S = 3.0
"""Seconds for which the record of an engine that failed to start stays in the store."""

LOOK_S = 0.1
"""Seconds between two checks of the launch queue."""

HANDED_S = 2.0
"""Seconds for which a process lives on after another one took over its launch document."""


class EngineHost:
    """Runs the emulated engines of a job on one node, in the event loop of their process.

    `launch`: the first engines. `inbox`: queue of launch documents for further engines. `me`: this process.
    """

    def __init__(
        self,
        launch: HostLaunch,
        law: TimingModel,
        store: Store,
        clock: Clock,
        me: ProcessId,
        inbox: LaunchQueue | None = None,
    ) -> None:
        self._launch = launch
        self._law = law
        self._store = store
        self._clock = clock
        self._me = me
        self._inbox = inbox
        self._registration = EngineRegistrations(store, clock, launch.lease_ttl_s)
        self._engines: dict[int, EmulatedEngine] = {}
        self._slots: defaultdict[str, LiveSlot] = defaultdict(lambda: LiveSlot(clock, law.speedup))
        self._models = EmulatedModels()
        self._stand_ins = PlaceholderProcesses()
        self._keys: dict[int, str] = {}
        tls = None if launch.tls is None else serving_context(ReloadingFiles(launch.tls.material))
        self._doors = EngineListeners(KeysByPort(new_app(self._engines), self._keys), launch.host, tls)
        self._living = 0
        self._step = 0
        self._stop = asyncio.Event()
        self._why = ""

    def stop(self, why: str) -> None:
        """Request the end of `run`; call it on the event loop. `why`: logged."""
        self._why = self._why or why
        self._stop.set()

    async def run(self) -> None:
        """Start the engines and serve them until `stop` is called."""
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
        """Start the engines of a launch document as tasks, which are added to `begun`."""
        log.info("%d engines on %s: %s; %s", len(launch.engines), launch.node, SAID, self._law.model_dump_json())
        for placed in launch.engines:
            self._living += 1
            begun.append(tasks.create_task(self._live(placed, launch), name=placed.instance))

    async def _look_for_more(
        self, inbox: LaunchQueue, tasks: asyncio.TaskGroup, begun: list[asyncio.Task[None]]
    ) -> None:
        while True:
            for launch in inbox.take():
                self._admit(launch, tasks, begun)
            if not self._living:
                self.stop("no engine is left")
            await self._clock.sleep(LOOK_S)

    async def _live(self, placed: PlacedEngine, launch: HostLaunch) -> None:
        """Start one engine, serve it, and remove it when its placeholder process has ended."""
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
        if model.pipeline is not None:
            law = model.pipeline.timing(self._law)
        timing = ReplicaTiming(self._law, placed.instance, law, slots=len(placed.slots))
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
            placed.instance,
            model,
            timing,
            self._clock,
            rows=rows,
            version=version,
            slot=slot,
            spans=spans,
            blobs=self._response_blobs(placed, launch),
            writer=None if model.pipeline is None else self._writer(launch),
        )
        port = await self._doors.open()
        self._engines[port] = engine
        self._keys[port] = placed.api_key
        try:
            show("serving", join_host_port(launch.host, port))
            await ended
            log.info("%s has ended", placed.instance)
        finally:
            del self._engines[port], self._keys[port]
            self._doors.shut(port)
            engine.remove()

    def _response_blobs(self, placed: PlacedEngine, launch: HostLaunch) -> ResponseBlobs | None:
        """What stores the blobs of an engine's responses; None if they have none."""
        size = self._law.response_blob_bytes
        if not size or not launch.blob_store or placed.judge:
            return None
        from gcore.media.client import BlobClient, open_blob_http  # slow to import

        http = open_blob_http(Connector(None if launch.tls is None else launch.tls.material))
        return ResponseBlobs(size, BlobClient(launch.blob_store, launch.job_uid, launch.blob_key, http))

    @staticmethod
    def _writer(launch: HostLaunch) -> AnswerWriter:
        """What stores the arrays of generated pictures."""
        from gcore.engines.serving.denoising import AnswerWriter  # slow to import
        from gcore.media.client import BlobClient, open_blob_http

        if not launch.blob_store:
            return AnswerWriter(None)
        http = open_blob_http(Connector(None if launch.tls is None else launch.tls.material))
        return AnswerWriter(BlobClient(launch.blob_store, launch.job_uid, launch.blob_key, http))

    async def _follow_head(self) -> None:
        """Watch the job's head and tell judge engines its step, which the version of their weights does not contain."""
        key = keys.JobKeys(self._launch.job_uid).head
        async for batch in self._store.watch(key):
            for event in batch.events:
                if event.kind == "put" and event.kv.key == key:
                    self._step = Head.decode(event.kv.value, key).step
            for engine in self._engines.values():
                engine.follow_step(self._step)

    async def _watch_node(self) -> None:
        """Request the end if the node has had no controller, or the store was unreachable, for the grace period."""
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
                    self.stop(f"the store has been unreachable for {now - away:.0f} s")
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
async def _signals(host: EngineHost) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop, f"received {number.name}")
    yield


async def _run(launch: HostLaunch, home: Path) -> None:
    me = process_status(os.getpid())
    if me is None:
        raise UsageError("this process cannot see itself under /proc", fix="Mount /proc")
    clock = SystemClock()
    inbox = LaunchQueue.of(launch, home)
    document = inbox.put(launch)
    while not inbox.claim():
        if not document.exists():
            log.info("another process runs the engines")
            await clock.sleep(HANDED_S)  # by then they are registered, and the controller does not miss them
            return
        await clock.sleep(LOOK_S)
    launches = inbox.take()
    if not launches:
        return  # the process that had taken them has died; the controller starts them again
    law = read_timing_model(os.environ)
    store = await connect_store(launch.store, clock)
    try:
        host = EngineHost(launches[0], law, store, clock, me.identity, inbox)
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
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(prog="gcore.emulated.host", description=f"Emulated engines: {SAID}.")
    parser.add_argument("--home", required=True, type=Path, help="folder of the cluster it belongs to")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    set_up_logging()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel may allow less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        launch = _read(arguments.launch)
        set_up_logging({"controller": launch.node, "job": launch.job_uid})
        asyncio.run(_run(launch, arguments.home))
    except GcoreError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)
