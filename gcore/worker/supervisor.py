"""Runs one worker's state machine (`gcore.worker.lifecycle`), and keeps its registration in the store.

All events (of the child, the store, signals, time) arrive through one queue and are handled in order; the registration
follows the state. Between events the supervisor sleeps until the next deadline, so an idle worker costs almost nothing.
Safety does not depend on it: a supervisor may be paused or die at any moment (the child dies with it).

The registration is stored under a session's lease (`gcore.store.session`). The supervisor retries until the store has
the newest record. Each write compares the key's revision, because a write without a response may take effect later and
must not overwrite a newer one.

A train rank's first registration also claims the key `world/{world}/rank/{rank}`, in the same transaction and only if
no worker has it (the world is the job's current set of training processes). That key is not deleted while the world
matters, so a rank that lost its lease registers again only while the key still names it. A worker whose claim was
refused still stores its failure, but claims no rank. A registration of another process under this instance's name is
not changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, assert_never

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.ledger.records.job import RankClaim
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.session import Session
from gcore.store.types import Compare, KeyValue, Put, Store
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.system.process import CannotStart, ProcessId
from gcore.worker import lifecycle
from gcore.worker.control import ChildProcess
from gcore.worker.lifecycle import (
    ChildFailed,
    ChildStarted,
    EndSupervisor,
    Instruction,
    KillChild,
    NodeRead,
    NodeWatched,
    PublishRendezvous,
    ReadNode,
    Registered,
    RegistrationRefused,
    RendezvousKnown,
    SendRendezvous,
    SendStop,
    StartChild,
    StatePublished,
    StopRequested,
    StoreSeen,
    SupervisorState,
    Tick,
    WorkerEvent,
)
from gcore.worker.records import LaunchSpec, WorkerRecord

RETRY_S = 1.0
"""Seconds between two attempts while the store does not respond."""

log = logging.getLogger("gcore.worker")


@dataclass(frozen=True, slots=True)
class _Claim:
    """The conditions and writes that the registration of a train rank adds to its transaction, to claim the rank."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...]


class Registrar:
    """Keeps one worker's registration in the store equal to the newest record.

    `emit` receives the results as events.
    """

    def __init__(self, spec: LaunchSpec, store: Store, clock: Clock, emit: Callable[[WorkerEvent], None]) -> None:
        self._spec = spec
        self._store = store
        self._clock = clock
        self._emit = emit
        self._key = keys.worker(spec.instance)
        self._wanted: WorkerRecord | None = None
        self._changed = asyncio.Event()
        self._session: Session | None = None
        self._registered = False
        self._refused = False
        self._mute = False

    def show(self, record: WorkerRecord) -> None:
        """Set the record that the store must contain from now on."""
        if record != self._wanted:
            self._wanted = record
            self._changed.set()

    async def run(self) -> None:
        """Write the record whenever it changes, and again after a lost lease, until cancelled."""
        while True:
            self._session = await self._open()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._session.run())
                    tasks.create_task(self._report(self._session))
                    tasks.create_task(self._write(self._session.lease))
            except* LeaseLost:
                log.warning("the store ended the lease; registering again")

    async def leave(self) -> None:
        """Revoke the lease, which deletes the registration. If the store is unreachable, the lease expires later."""
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        while True:
            try:
                return await Session.open(self._store, clock=self._clock, ttl=self._spec.lease_ttl_s)
            except StoreUnavailable:
                await self._away()

    async def _report(self, session: Session) -> None:
        """Emit whether the store responds, as shown by the lease renewals, once every `lease_ttl_s`."""
        while True:
            self._emit(StoreSeen(session.alive(self._clock.monotonic())))
            await self._clock.sleep(self._spec.lease_ttl_s)

    async def _write(self, lease: int) -> None:
        self._changed.set()  # a new lease requires all records to be written again
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._wanted is None:
                continue
            try:
                settled = await self._put(lease, self._wanted)
            except StoreUnavailable:
                settled = False
                await self._away()
            if not settled:
                self._changed.set()

    async def _put(self, lease: int, record: WorkerRecord) -> bool:
        """Write the record once. Return whether the store now has it, or never will; False: try again."""
        there = None if self._mute else await self._store.get(self._key)
        if there is not None and not _is_of(there, record):
            self._mute = True
            self._emit(RegistrationRefused(f"another process is registered as worker {self._spec.instance}"))
        if self._mute:
            self._emit(StatePublished(record.state))  # it is never stored, but the state machine waits for it
            return True
        claim = _Claim((), ()) if self._refused else await self._claim()
        if isinstance(claim, RegistrationRefused):
            self._refused = True
            self._emit(claim)
            return False
        compares = (Compare(self._key, there.mod_revision if there else 0), *claim.compares)
        fault_point(FaultPoint.WORKER, "before")
        result = await self._store.transact(compares, (Put(self._key, record.encode(), lease), *claim.puts))
        fault_point(FaultPoint.WORKER, "after")
        if not result.won:
            return False
        if not self._refused:
            self._registered = True
            self._emit(Registered())
        self._emit(StatePublished(record.state))
        return True

    async def _claim(self) -> _Claim | RegistrationRefused:
        """Return what the registration of a train rank must compare and write in addition, to claim its rank.

        Returns a refusal if another worker has the rank, or if the world was deleted.
        """
        spec = self._spec
        if spec.world is None or spec.rank is None:
            return _Claim((), ())
        key = keys.JobKeys(spec.job_uid).world_rank(spec.world, spec.rank)
        there = await self._store.get(key)
        if there is None:
            if self._registered:
                return RegistrationRefused(f"world {spec.world} is gone from the store")
            return _Claim((Compare(key, 0),), (Put(key, RankClaim(instance=spec.instance).encode()),))
        holder = RankClaim.decode(there.value, key).instance
        if holder != spec.instance:
            return RegistrationRefused(f"rank {spec.rank} of world {spec.world} is taken by worker {holder}")
        return _Claim((Compare(key, there.mod_revision),), ())

    async def _away(self) -> None:
        self._emit(StoreSeen(answers=False))
        await self._clock.sleep(RETRY_S)


def _is_of(there: KeyValue, record: WorkerRecord) -> bool:
    try:
        found = WorkerRecord.decode(there.value, there.key)
    except UnreadableRecord:
        return False
    return (found.node, found.process) == (record.node, record.process)


class Supervisor:
    """Runs one worker: its state machine, its registration and its child. `me`: identity of the supervisor's own
    process.
    """

    def __init__(self, spec: LaunchSpec, store: Store, clock: Clock, me: ProcessId) -> None:
        self._spec = spec
        self._store = store
        self._clock = clock
        self._me = me
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._registrar = Registrar(spec, store, clock, self._events.put_nowait)
        self._tasks = asyncio.TaskGroup()
        self._begun: list[asyncio.Task[None]] = []
        self._child: ChildProcess | None = None

    def stop(self, why: str) -> None:
        """Request the worker's end, on the event loop, e.g. from a signal handler. `why` becomes the reason in the
        registration.

        A second request kills the child at once.
        """
        self._events.put_nowait(StopRequested(why))

    async def run(self) -> int:
        """Register the worker, run its child, and return the supervisor's exit code when the worker has ended."""
        async with self._tasks:
            self._begin(self._registrar.run())
            self._begin(self._watch_node())
            code = await self._live()
            for task in self._begun:
                task.cancel()
        await self._registrar.leave()
        return code

    async def _live(self) -> int:
        life = SupervisorState.begin(self._spec, self._clock.monotonic())
        while True:
            self._registrar.show(self._record(life))
            event = await self._next(lifecycle.wake_at(life))
            before = life
            decision = lifecycle.decide(life, event, self._clock.monotonic())
            life = decision.life
            if (life.state, life.reason) != (before.state, before.reason):
                log.info("%s%s", life.state, f": {life.reason}" if life.reason else f" at {life.address}")
            for instruction in decision.instructions:
                if isinstance(instruction, EndSupervisor):
                    return instruction.code
                await self._carry_out(instruction)

    async def _next(self, wake_at: float | None) -> WorkerEvent:
        """Return the next event: a `Tick` at `wake_at` at the latest.

        A `Tick` also comes every half `watchdog_s`, to check whether the child was stopped by a signal.
        """
        pause = self._spec.watchdog_s / 2
        if wake_at is not None:
            pause = min(pause, max(0.0, wake_at - self._clock.monotonic()))
        alarm = asyncio.create_task(self._alarm(pause))
        try:
            return await self._events.get()
        finally:
            alarm.cancel()

    async def _alarm(self, pause: float) -> None:
        await self._clock.sleep(pause)
        self._events.put_nowait(Tick(stopped=self._child is not None and self._child.is_stopped()))

    async def _carry_out(self, instruction: Instruction) -> None:
        child = self._child
        match instruction:
            case StartChild():
                await self._start_child()
            case SendStop():
                if child is not None:
                    child.tell("stop")
            case SendRendezvous(address):
                if child is not None:
                    child.tell("rendezvous", address=address)
            case KillChild():
                if child is not None:
                    child.kill()
            case PublishRendezvous(address):
                if self._spec.world is not None:
                    self._begin(self._publish_rendezvous(self._spec.world, address))
            case ReadNode():
                self._begin(self._read_node())
            case EndSupervisor():
                pass
            case _:
                assert_never(instruction)

    async def _start_child(self) -> None:
        try:
            self._child = await ChildProcess.start(self._spec)
        except CannotStart as error:
            self._events.put_nowait(ChildFailed(str(error)))
            return
        self._events.put_nowait(ChildStarted(self._child.pid))
        self._begin(self._child.run(self._events.put_nowait))
        if self._spec.world is not None and self._spec.rank:
            self._begin(self._watch_rendezvous(self._spec.world))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._begun.append(self._tasks.create_task(work))

    async def _watch_node(self) -> None:
        """Emit whether the node has a controller: at first, and whenever the watch on the node's key shows a change."""
        key = keys.node(self._spec.node)
        present = None
        async for batch in self._store.watch(key):
            seen = False if batch.reset else present
            for event in batch.events:
                if event.kv.key == key:  # the watch is on a prefix, and "node-1" is a prefix of "node-10"
                    seen = event.kind == "put"
            if seen is not None and seen != present:
                present = seen
                self._events.put_nowait(NodeWatched(seen))

    async def _read_node(self) -> None:
        while True:
            try:
                there = await self._store.get(keys.node(self._spec.node))
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
            else:
                self._events.put_nowait(NodeRead(there is not None))
                return

    async def _watch_rendezvous(self, world: str) -> None:
        key = keys.JobKeys(self._spec.job_uid).rendezvous(world)
        async for batch in self._store.watch(key):
            for event in batch.events:
                if event.kv.key == key and event.kind == "put":
                    self._events.put_nowait(RendezvousKnown(event.kv.value.decode()))
                    return

    async def _publish_rendezvous(self, world: str, address: str) -> None:
        """Store the address of this world's rank 0, unless the key exists.

        After a write without a response the key is read again. If it has the address of another process, the worker
        fails.
        """
        key = keys.JobKeys(self._spec.job_uid).rendezvous(world)
        while True:
            try:
                there = await self._store.get(key)
                if there is None:
                    fault_point(FaultPoint.RENDEZVOUS, "before")
                    await self._store.transact((Compare(key, 0),), (Put(key, address.encode()),))
                    fault_point(FaultPoint.RENDEZVOUS, "after")
                    continue  # read which write won
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
                continue
            if there.value.decode() != address:
                self._events.put_nowait(
                    ChildFailed(f"another rank 0 of world {world} listens at {there.value.decode()}")
                )
            return

    def _record(self, life: SupervisorState) -> WorkerRecord:
        spec = self._spec
        return WorkerRecord(
            instance=spec.instance,
            node=spec.node,
            role=spec.role,
            job_uid=spec.job_uid,
            slot=spec.slot,
            pid=self._me.pid,
            pid_started=self._me.started,
            child_pid=life.child_pid,
            state=life.state,
            address=life.address,
            reason=life.reason,
            world=spec.world,
            rank=spec.rank,
            judge=spec.judge,
            further=spec.further,
        )
