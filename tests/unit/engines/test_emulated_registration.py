"""The registrations of a process's emulated engines, against the store in memory with a stopped clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from gcore.engines.emulated.host import EngineRegistrations
from gcore.store import keys
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord

TTL = 9


def record(number: int, state: str = "serving") -> WorkerRecord:
    fields = {"node": "n", "role": "rollout", "job_uid": "j", "slot": f"emulated:{number}", "pid": 1, "pid_started": 1}
    return WorkerRecord.model_validate({"instance": f"e{number}", "state": state} | fields)


@dataclass
class Scene:
    cluster: MemoryCluster
    clock: FakeClock
    store: MemoryStore
    registration: EngineRegistrations

    def shown(self) -> dict[str, str]:
        records = (WorkerRecord.decode(kv.value) for kv in self.cluster.listing(keys.WORKERS).kvs)
        return {one.instance: one.state for one in records}

    def leases(self) -> set[int]:
        return {kv.lease for kv in self.cluster.listing(keys.WORKERS).kvs}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    clock = FakeClock()
    cluster = MemoryCluster(clock)
    store = MemoryStore(cluster, "host")
    registration = EngineRegistrations(store, clock, TTL)
    running = asyncio.create_task(registration.run())
    yield Scene(cluster, clock, store, registration)
    running.cancel()
    await store.close()


async def test_all_engines_stand_under_one_lease_and_more_than_a_transaction_holds_are_written_too(
    scene: Scene,
) -> None:
    for number in range(300):
        scene.registration.show(record(number, "starting"))
    await scene.clock.advance(1)
    assert scene.shown() == {f"e{n}": "starting" for n in range(300)}
    assert len(scene.leases()) == 1
    scene.registration.show(record(7))
    await scene.clock.advance(1)
    assert scene.shown()["e7"] == "serving"
    await scene.clock.advance(5 * TTL)
    assert len(scene.shown()) == 300  # the lease is kept


async def test_a_lease_that_was_lost_is_followed_by_another_with_everything_under_it(scene: Scene) -> None:
    scene.registration.show(record(0))
    await scene.clock.advance(1)
    (old,) = scene.leases()
    scene.cluster.end_lease(old)
    assert scene.shown() == {}
    await scene.clock.advance(TTL)
    assert scene.shown() == {"e0": "serving"}
    assert scene.leases() != {old}


async def test_while_the_store_is_away_nothing_is_lost(scene: Scene) -> None:
    await scene.clock.advance(1)
    scene.store.away = True
    scene.registration.show(record(0))
    await scene.clock.advance(4)
    assert scene.shown() == {}
    scene.store.away = False
    await scene.clock.advance(3 * TTL)
    assert scene.shown() == {"e0": "serving"}


async def test_leaving_takes_all_of_them_out(scene: Scene) -> None:
    for number in range(3):
        scene.registration.show(record(number))
    await scene.clock.advance(1)
    leaving = asyncio.create_task(scene.registration.leave())
    await scene.clock.advance(1)
    await leaving
    assert scene.shown() == {}


async def test_deregistered_engine_leaves_the_store_and_others_stay(scene: Scene) -> None:
    for number in range(3):
        scene.registration.show(record(number))
    await scene.clock.advance(1)
    scene.registration.forget("e1")
    scene.registration.forget("never there")
    await scene.clock.advance(1)
    assert set(scene.shown()) == {"e0", "e2"}


async def test_deregistration_during_an_outage_is_applied_afterwards(scene: Scene) -> None:
    scene.registration.show(record(0))
    await scene.clock.advance(1)
    scene.store.away = True
    scene.registration.forget("e0")
    await scene.clock.advance(1)
    scene.store.away = False
    await scene.clock.advance(7)  # the call's time-out, and the pause behind it
    assert scene.shown() == {}
