"""Carries out what `gcore.worker.lifecycle` decides, for one worker.

Everything that happens (the child, the store, signals, time) comes as an event through one queue and is decided in
order; the registration in the store follows the life by itself. Between events the supervisor sleeps until the next
moment at which something would be due, so that an idle worker costs next to nothing.

Safety does not rest on it: a supervisor may be paused, or die, at any moment (the child dies with it).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, assert_never

from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.fault_points import At, point
from gcore.store import keys
from gcore.store.types import Compare, Put, Store
from gcore.worker import lifecycle
from gcore.worker.events import (
    ChildFailed,
    ChildStarted,
    Event,
    Instruction,
    KillChild,
    Leave,
    Looked,
    NodeRead,
    NodeWatched,
    PublishRendezvous,
    ReadNode,
    RendezvousKnown,
    StartChild,
    StopAsked,
    TellRendezvous,
    TellStop,
)
from gcore.worker.lifecycle import Life
from gcore.worker.parent import ChildProcess
from gcore.worker.process import CannotStart, ProcessId
from gcore.worker.records import LaunchSpec, WorkerRecord
from gcore.worker.registrar import RETRY_S, Registrar

log = logging.getLogger("gcore.worker")


class Supervisor:
    """One worker's supervisor. `me` is its own process."""

    def __init__(self, spec: LaunchSpec, store: Store, clock: Clock, me: ProcessId) -> None:
        self._spec = spec
        self._store = store
        self._clock = clock
        self._me = me
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._registrar = Registrar(spec, store, clock, self._events.put_nowait)
        self._tasks = asyncio.TaskGroup()
        self._begun: list[asyncio.Task[None]] = []
        self._child: ChildProcess | None = None

    def stop(self, why: str) -> None:
        """Ask it to end; in the event loop, e.g. from a signal handler. The second time the child is killed at once."""
        self._events.put_nowait(StopAsked(why))

    async def run(self) -> int:
        """Until the worker has ended. Returns the exit code."""
        async with self._tasks:
            self._begin(self._registrar.run())
            self._begin(self._watch_node())
            code = await self._live()
            for task in self._begun:
                task.cancel()
        await self._registrar.leave()
        return code

    async def _live(self) -> int:
        life = Life.begin(self._spec, self._clock.monotonic())
        while True:
            self._registrar.show(self._record(life))
            event = await self._next(lifecycle.wake_at(life))
            before = life
            decision = lifecycle.decide(life, event, self._clock.monotonic())
            life = decision.life
            if (life.state, life.reason) != (before.state, before.reason):
                log.info("%s%s", life.state, f": {life.reason}" if life.reason else f" at {life.address}")
            for instruction in decision.instructions:
                if isinstance(instruction, Leave):
                    return instruction.code
                await self._carry_out(instruction)

    async def _next(self, wake_at: float | None) -> Event:
        """The next event; at `wake_at` at the latest, and now and then to see whether the child was stopped."""
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
        self._events.put_nowait(Looked(stopped=self._child is not None and self._child.is_stopped()))

    async def _carry_out(self, instruction: Instruction) -> None:
        child = self._child
        match instruction:
            case StartChild():
                await self._start_child()
            case TellStop():
                if child is not None:
                    child.tell("stop")
            case TellRendezvous(address):
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
            case Leave():
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
        """Reports whether the node has a controller: at first, and whenever it changes."""
        key = keys.node(self._spec.node)
        present = None
        async for batch in self._store.watch(key):
            seen = False if batch.reset else present
            for event in batch.events:
                if event.kv.key == key:  # the watch is on a prefix, and "node-1" is one of "node-10"
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
        """Written once: an answer that never came is followed by a read, and another's address is a failure."""
        key = keys.JobKeys(self._spec.job_uid).rendezvous(world)
        while True:
            try:
                there = await self._store.get(key)
                if there is None:
                    point(At.RENDEZVOUS, "before")
                    await self._store.transact((Compare(key, 0),), (Put(key, address.encode()),))
                    point(At.RENDEZVOUS, "after")
                    continue  # whoever won, read it
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
                continue
            if there.value.decode() != address:
                self._events.put_nowait(
                    ChildFailed(f"another rank 0 of world {world} listens at {there.value.decode()}")
                )
            return

    def _record(self, life: Life) -> WorkerRecord:
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
