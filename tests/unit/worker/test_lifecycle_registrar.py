"""The registration against the store in memory, with a stopped clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gcore.ledger.records.job import RankClaim
from gcore.store import keys
from gcore.store.reference import StoreRef
from gcore.store.types import Put
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore
from gcore.worker.lifecycle import Registered, RegistrationRefused, StatePublished, StoreSeen, WorkerEvent
from gcore.worker.records import LaunchSpec, WorkerRecord
from gcore.worker.supervisor import Registrar

TTL = 9
RANK_KEY = keys.JobKeys("j").world_rank("w", 1)


def spec(instance: str, *, rank: int | None = None) -> LaunchSpec:
    return LaunchSpec(
        instance=instance,
        node="node-1",
        role="rollout" if rank is None else "train",
        job_uid="j",
        slot="cpu:0",
        store=StoreRef(endpoints=("127.0.0.1:1",)),
        log_file="/dev/null",
        command=("true",),
        world=None if rank is None else "w",
        rank=rank,
        lease_ttl_s=TTL,
    )


def record(launch: LaunchSpec, *, pid: int = 7, **fields: object) -> WorkerRecord:
    shared = launch.model_dump(include={"instance", "node", "role", "job_uid", "slot", "world", "rank"})
    return WorkerRecord.model_validate({**shared, "pid": pid, "pid_started": 1, **fields})


@dataclass
class Scene:
    """A registrar at work."""

    cluster: MemoryCluster
    clock: FakeClock
    store: MemoryStore
    registrar: Registrar
    heard: list[WorkerEvent]

    def registered(self, instance: str = "w1") -> WorkerRecord | None:
        kv = self.cluster.get(keys.worker(instance))
        return None if kv is None else WorkerRecord.decode(kv.value)

    def news(self) -> list[WorkerEvent]:
        """What was said since the last look, but for the store's well-being."""
        news = [event for event in self.heard if not isinstance(event, StoreSeen)]
        self.heard.clear()
        return news


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster(FakeClock())


@asynccontextmanager
async def working(cluster: MemoryCluster, launch: LaunchSpec) -> AsyncIterator[Scene]:
    clock = cluster.clock
    assert isinstance(clock, FakeClock)
    store = MemoryStore(cluster, launch.instance)
    heard: list[WorkerEvent] = []
    registrar = Registrar(launch, store, clock, heard.append)
    task = asyncio.create_task(registrar.run())
    yield Scene(cluster, clock, store, registrar, heard)
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.wait({task})


async def test_an_engine_registers_under_a_lease_that_lives_as_long_as_it_works(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as scene:
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(0)
        assert scene.news() == [Registered(), StatePublished("starting")]
        await scene.clock.advance(100 * TTL)
        assert scene.registered() == record(spec("w1"))
    await scene.clock.advance(TTL + 1)
    assert scene.registered() is None


async def test_only_what_changed_is_written(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as scene:
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(1)
        before = cluster.revision
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(100)
        assert cluster.revision == before
        scene.registrar.show(record(spec("w1"), state="serving", address="h:1"))
        await scene.clock.advance(1)
        assert cluster.revision == before + 1
        assert scene.news() == [Registered(), StatePublished("starting"), Registered(), StatePublished("serving")]


async def test_a_rank_is_taken_once_and_who_comes_second_only_shows_why(cluster: MemoryCluster) -> None:
    first, second = spec("w1", rank=1), spec("w2", rank=1)
    async with working(cluster, first) as one, working(cluster, second) as other:
        one.registrar.show(record(first))
        await one.clock.advance(1)
        other.registrar.show(record(second, pid=8))
        await one.clock.advance(1)
        refusal = RegistrationRefused("rank 1 of world w is taken by worker w1")
        assert other.news()[0] == refusal
        other.registrar.show(record(second, pid=8, state="failed", reason=refusal.reason))
        await one.clock.advance(1)
        assert other.news() == [StatePublished("failed")]
        shown = other.registered("w2")
        assert shown is not None
        assert (shown.state, shown.reason) == ("failed", refusal.reason)
        rank = cluster.get(RANK_KEY)
        assert rank is not None
        assert (RankClaim.decode(rank.value), rank.lease) == (RankClaim(instance="w1"), 0)


@pytest.mark.parametrize("fate", [Fate.LOSE_REQUEST, Fate.LOSE_REPLY, Fate.DELIVER_LATE])
async def test_a_registration_whose_answer_never_came_is_finished(cluster: MemoryCluster, fate: Fate) -> None:
    launch = spec("w1", rank=1)
    async with working(cluster, launch) as scene:
        scene.store.network = Bad(fate, times=1)
        scene.registrar.show(record(launch))
        await scene.clock.advance(0.5)
        assert StoreSeen(answers=False) in scene.heard
        await scene.clock.advance(3)
        assert scene.news() == [Registered(), StatePublished("starting")]
        assert scene.registered() == record(launch)


async def test_a_late_write_does_not_undo_a_newer_one(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as scene:
        scene.store.network = Bad(Fate.DELIVER_LATE, times=1)
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(0.5)
        scene.registrar.show(record(spec("w1"), state="serving", address="h:1"))
        await scene.clock.advance(3)
        assert cluster.deliver_late() == 1
        assert scene.registered() == record(spec("w1"), state="serving", address="h:1")


async def test_worker_that_lost_its_lease_registers_again_under_a_new_one(cluster: MemoryCluster) -> None:
    launch = spec("w1", rank=1)
    async with working(cluster, launch) as scene:
        scene.registrar.show(record(launch, state="serving", address="h:1"))
        await scene.clock.advance(1)
        scene.store.away = True
        await scene.clock.advance(10 * TTL)
        assert scene.registered() is None
        assert scene.heard[-1] == StoreSeen(answers=False)
        scene.store.away = False
        await scene.clock.advance(TTL)
        assert scene.registered() == record(launch, state="serving", address="h:1")
        await scene.clock.advance(10 * TTL)
        assert scene.registered() is not None, "the new lease is kept alive too"
        assert scene.heard[-1] == StoreSeen(answers=True)


async def test_a_rank_does_not_register_again_in_a_world_that_is_gone(cluster: MemoryCluster) -> None:
    launch = spec("w1", rank=1)
    async with working(cluster, launch) as scene:
        scene.registrar.show(record(launch))
        await scene.clock.advance(1)
        scene.news()
        held = cluster.get(keys.worker("w1"))
        assert held is not None
        await scene.store.transact((), (Put(RANK_KEY, RankClaim(instance="w9").encode()),))
        cluster.end_lease(held.lease)
        await scene.clock.advance(TTL)
        assert scene.news()[0] == RegistrationRefused("rank 1 of world w is taken by worker w9")


async def test_registration_of_another_process_is_never_changed(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as one, working(cluster, spec("w1")) as twin:
        one.registrar.show(record(spec("w1")))
        await one.clock.advance(1)
        twin.registrar.show(record(spec("w1"), pid=8))
        await one.clock.advance(1)
        assert twin.news()[0] == RegistrationRefused("another process is registered as worker w1")
        twin.registrar.show(record(spec("w1"), pid=8, state="failed"))
        await one.clock.advance(1)
        assert twin.news() == [StatePublished("failed")], "it is not kept waiting"
        assert one.registered() == record(spec("w1"))


async def test_leaving_ends_the_registration_at_once(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as scene:
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(1)
    await scene.clock.run(scene.registrar.leave())
    assert scene.registered() is None


async def test_leaving_while_the_store_is_away_is_no_error(cluster: MemoryCluster) -> None:
    async with working(cluster, spec("w1")) as scene:
        scene.registrar.show(record(spec("w1")))
        await scene.clock.advance(1)
        scene.store.away = True
    await scene.clock.run(scene.registrar.leave())


class Bad:
    """A network that treats the first `times` transactions badly."""

    def __init__(self, fate: Fate, times: int) -> None:
        self.fate = fate
        self.left = times

    async def request(self, call: Call) -> Fate:
        if call.kind != "transact" or self.left == 0:
            return Fate.DELIVER
        self.left -= 1
        return self.fate

    async def reply(self, call: Call) -> None:
        pass
