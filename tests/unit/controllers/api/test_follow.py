"""Following a job: no event is lost while others are sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from listed_jobs import create

from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from controllers.changes import ChangeSignal
from controllers.telemetry.events import Event
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Shares
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.transactions import Versioned
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


def event(sequence: int) -> Event:
    return Event(sequence, 0.0, "step", "", {})


class Runner:
    """A job that ends while its first event is on its way."""

    def __init__(self) -> None:
        self.changes = ChangeSignal()
        self.closed = False
        self.mirror = JobMirror(JobKeys("u"))
        log = SimpleNamespace(after=lambda after, **_: [e for e in self.known if e.sequence > after])
        self.telemetry = SimpleNamespace(events=log)
        self.known = [event(1)]

    def end(self) -> None:
        self.known.append(event(2))
        self.mirror = replace(self.mirror, status=Versioned(JobStatus(phase=JobPhase.SUCCEEDED), 1))
        self.closed = True
        self.changes.notify()


async def test_the_last_event_of_a_job_that_ends_meanwhile_is_sent() -> None:
    runner = Runner()
    service: Any = JobsService(None, None, None, None)  # type: ignore[arg-type]

    async def settled(uid: str) -> Runner:
        return runner

    service._settled = settled
    got = []
    async for one in service._follow("u", 0):
        got.append(one.sequence)
        if one.sequence == 1:
            runner.end()
    assert got == [1, 2]


async def test_a_job_that_waits_for_slots_is_followed_until_somebody_works_on_it() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    await create(store, "u", "waits")
    await store.transact((), (Put(keys.SHARES, Shares().encode()),))
    runners: dict[str, Any] = {}
    service: Any = JobsService(StoreReader(store), None, runners.get, clock)  # type: ignore[arg-type]
    got: list[str] = []

    async def follow() -> None:
        async for one in service._follow("u", 0):
            got.append(one.kind)

    task = asyncio.create_task(follow())
    for _ in range(10):
        await clock.advance(1.0)
    assert got == ["state"]
    later = Runner()
    later.known = [event(10**9)]
    runners["u"] = later
    for _ in range(10):
        await clock.advance(1.0)
    assert got == ["state", "step"]
    later.end()
    later.known = later.known[:1]
    assert later.mirror.status is not None
    await store.transact((), (Put(JobKeys("u").state, later.mirror.status.record.encode()),))
    await clock.advance(1.0)
    await asyncio.wait_for(task, 5)


async def test_a_job_that_goes_on_after_its_end_is_followed_at_the_runner_that_takes_it_up() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    await create(store, "u", "further")
    over, later = Runner(), Runner()
    over.end()
    later.known = [event(3)]
    runners: dict[str, Any] = {"u": over}
    service: Any = JobsService(StoreReader(store), None, runners.get, clock)  # type: ignore[arg-type]
    got: list[int] = []

    async def follow() -> None:
        async for one in service._follow("u", 0):
            got.append(one.sequence)

    task = asyncio.create_task(follow())
    await clock.advance(0.2)
    runners["u"] = later
    for _ in range(10):
        await clock.advance(0.2)
    assert got == [3]
    task.cancel()
