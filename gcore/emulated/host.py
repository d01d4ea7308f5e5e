"""`python -m gcore.emulated.host --home HOME --launch FILE`: all emulated engines of a job on one node, in one process.

Each has its own port, its own registration in the store and its own pace; no other process stands over them, since they
compute nothing that could hang. As a real worker's supervisor does, the process ends when it is told to (SIGTERM, which is
meant for one engine and ends all of the node: what the plan still wants is started anew), when its node has had no
controller for the grace period, and when the store was away for very long. Logs what it is in its first line.

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
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn

from gcore.clock import Clock, SystemClock
from gcore.emulated.engine import EmulatedEngine, Model
from gcore.emulated.launch import SAID, HostLaunch, PlacedEngine
from gcore.emulated.law import Law, Timing
from gcore.emulated.law_file import read_law
from gcore.emulated.registration import RETRY_S, Registration
from gcore.emulated.responses import Vocabulary
from gcore.emulated.routes import app
from gcore.errors import GcoreError, StoreUnavailable, UsageError
from gcore.rollout.engine.text import Text
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Store
from gcore.worker.main import connect
from gcore.worker.process import ProcessId, status_of
from gcore.worker.records import WorkerRecord, WorkerState

log = logging.getLogger("gcore.emulated")

BACKLOG = 128
GRACE_S = 1
KEPT_S = 60
"""Seconds that an idle connection is kept."""


class Host:
    """The process's life, in its event loop."""

    def __init__(self, launch: HostLaunch, law: Law, store: Store, clock: Clock, me: ProcessId) -> None:
        self._launch = launch
        self._law = law
        self._store = store
        self._clock = clock
        self._me = me
        self._registration = Registration(store, clock, launch.lease_ttl_s)
        self._engines: dict[int, EmulatedEngine] = {}
        self._stop = asyncio.Event()
        self._why = ""

    def stop(self, why: str) -> None:
        """Ask it to end; in the event loop."""
        self._why = self._why or why
        self._stop.set()

    async def run(self) -> None:
        """Until it is to end. Raises DataError for a model's folder that cannot be used."""
        model_path = Path(self._launch.model)
        text = Text.load(model_path)
        model = Model(str(model_path), Vocabulary.load(model_path, text), text)
        listeners = {placed: _listen(self._launch.host) for placed in self._launch.engines}
        server = _Server(
            uvicorn.Config(
                app(self._engines),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEPT_S,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            begun = [
                tasks.create_task(self._registration.run(), name="register"),
                tasks.create_task(self._watch_node(), name="watch node"),
            ]
            serving = tasks.create_task(server.serve(sockets=list(listeners.values())), name="serve")
            begun += [tasks.create_task(self._load(placed, model, one)) for placed, one in listeners.items()]
            await self._stop.wait()
            log.info("stopping: %s", self._why)
            for task in begun:
                task.cancel()
            server.should_exit = True
            await serving
        await self._registration.leave()

    async def _load(self, placed: PlacedEngine, model: Model, listener: socket.socket) -> None:
        """One engine comes up: its registration, its time of loading, its routes, its registration again."""
        self._registration.show(self._record(placed, "starting", ""))
        timing = Timing(self._law, placed.instance)
        launch = self._launch
        engine = EmulatedEngine(
            placed.instance, model, timing, self._clock, rows=launch.rows, version=launch.weight_version
        )
        await engine.take(timing.load())
        port = int(listener.getsockname()[1])
        self._engines[port] = engine
        self._registration.show(self._record(placed, "serving", f"{launch.host}:{port}"))

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

    def _record(self, placed: PlacedEngine, state: WorkerState, address: str) -> WorkerRecord:
        return WorkerRecord(
            instance=placed.instance,
            node=self._launch.node,
            role="rollout",
            job_uid=self._launch.job_uid,
            slot=placed.slot,
            pid=self._me.pid,
            pid_started=self._me.started,
            child_pid=self._me.pid,
            state=state,
            address=address,
        )


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str) -> socket.socket:
    listener = socket.create_server((host, 0), backlog=BACKLOG)
    # Inherited by each connection; asyncio does not set it on sockets that it has not made.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.asynccontextmanager
async def _signals(host: Host) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop, f"asked to by {number.name}")
    yield


async def _run(launch: HostLaunch) -> None:
    me = status_of(os.getpid())
    if me is None:
        raise UsageError("this process cannot see itself under /proc", fix="Mount /proc")
    clock = SystemClock()
    law = read_law(os.environ)
    log.info("%d engines on %s: %s; %s", len(launch.engines), launch.node, SAID, law.model_dump_json())
    store = await connect(launch.store, clock)
    try:
        host = Host(launch, law, store, clock, me.identity)
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
    parser.add_argument("--home", required=True, help="folder of the cluster it belongs to; shown, not used")
    parser.add_argument("--launch", required=True, type=Path, help="launch document, a JSON file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(_run(_read(arguments.launch)))
    except GcoreError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
