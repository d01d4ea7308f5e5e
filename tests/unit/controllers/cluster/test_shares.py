"""The daemons' part in sharing slots: inputs, the writer, and changes of a claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.shares import ShareWriter, change_claim
from controllers.rules.world import NODE_GRACE_S
from gcore.errors import StoreUnavailable
from gcore.ledger.records.cluster import Claim, Drained, Quotas, Share, Shares, SickSlots, slots_of_share
from gcore.ledger.records.job import NodeRecord
from gcore.schema import SCHEMA_VERSION
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, TxnResult
from gcore.system.clock import Clock, SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

ONE, TWO = JobKeys("one"), JobKeys("two")


@pytest.fixture
def memory() -> MemoryCluster:
    memory = MemoryCluster(FakeClock())
    for name in ("a", "b"):
        node = NodeRecord(name=name, incarnation=f"{name}.x", address="h:1", slots=("cpu:0", "cpu:1"), pid=1)
        memory.transact(
            (), (Put(keys.node(name), node.encode()), Put(keys.readable_version(name), str(SCHEMA_VERSION).encode()))
        )
    return memory


@asynccontextmanager
async def daemon(
    memory: MemoryCluster, name: str, store: MemoryStore | None = None, clock: Clock | None = None
) -> AsyncIterator[ClusterMirror]:
    store, changes, clock = store or MemoryStore(memory), ChangeSignal(), clock or FakeClock()
    mirror = ClusterMirror(store, changes)
    sharing = ShareWriter(name, store, mirror, changes, clock)
    work = (*(watch() for watch in mirror.watches.values()), sharing.run())
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await changes.until(lambda: mirror.is_complete)
        yield mirror
        assert not [task for task in tasks if task.done()], "none of them has met a defect"
    finally:
        for task in tasks:
            task.cancel()


async def rested() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


def shares(memory: MemoryCluster) -> dict[str, int]:
    known = memory.get(keys.SHARES)
    if known is None:
        return {}
    return {uid: len(slots_of_share(share.granted)) for uid, share in Shares.decode(known.value).jobs.items()}


def granted(memory: MemoryCluster, uid: str) -> set[str]:
    """The nodes on which a job is granted slots."""
    known = memory.get(keys.SHARES)
    assert known is not None
    return {slot.node for slot in slots_of_share(Shares.decode(known.value).jobs[uid].granted)}


async def test_a_node_that_is_back_soon_moves_nothing_and_one_that_stays_away_is_replaced_for_good(
    memory: MemoryCluster,
) -> None:
    """A job that may have one slot has it on `b`, and `a` has one free."""
    clock = FakeClock()
    share = Share(granted={"b": ("cpu:0",)}, held={"b": ("cpu:0",)})
    memory.transact(
        (), (Put(ONE.active, Claim(most=1).encode()), Put(keys.SHARES, Shares(jobs={"one": share}).encode()))
    )
    node = memory.get(keys.node("b"))
    assert node is not None
    async with daemon(memory, "a", clock=clock):
        for away_s in (NODE_GRACE_S - 1, NODE_GRACE_S - 1):
            memory.transact((), (Delete(keys.node("b")),))
            await rested()
            await clock.advance(away_s)
            memory.transact((), (Put(keys.QUOTAS, Quotas().encode()),))  # something changes
            await rested()
            assert granted(memory, "one") == {"b"}
            memory.transact((), (Put(keys.node("b"), node.value),))
            await rested()
            assert granted(memory, "one") == {"b"}
        memory.transact((), (Delete(keys.node("b")),))
        await rested()
        await clock.advance(NODE_GRACE_S + 1)
        memory.transact((), (Put(keys.QUOTAS, Quotas().encode()),))
        await rested()
        assert granted(memory, "one") == {"a"}
        memory.transact((), (Put(keys.node("b"), node.value),))
        await rested()
        assert granted(memory, "one") == {"a"}


async def test_a_daemon_that_is_new_waits_for_an_absent_node_too_and_replaces_it_when_its_time_is_over(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else changes meanwhile."""
    monkeypatch.setattr("controllers.cluster.shares.NODE_GRACE_S", 0.5)
    share = Share(granted={"b": ("cpu:0",)}, held={"b": ("cpu:0",)})
    memory.transact(
        (), (Put(ONE.active, Claim(most=1).encode()), Put(keys.SHARES, Shares(jobs={"one": share}).encode()))
    )
    memory.transact((), (Delete(keys.node("b")),))
    async with daemon(memory, "a", clock=SystemClock()):
        await rested()
        assert granted(memory, "one") == {"b"}
        while granted(memory, "one") == {"b"}:
            await SystemClock().sleep(0.05)
        assert granted(memory, "one") == {"a"}


async def test_a_drained_node_is_not_waited_for(memory: MemoryCluster) -> None:
    share = Share(granted={"b": ("cpu:0",)}, held={"b": ("cpu:0",)})
    memory.transact(
        (), (Put(ONE.active, Claim(most=1).encode()), Put(keys.SHARES, Shares(jobs={"one": share}).encode()))
    )
    memory.transact((), (Delete(keys.node("b")), Put(keys.drained_node("b"), Drained().encode())))
    async with daemon(memory, "a"):
        await rested()
        assert granted(memory, "one") == {"a"}


async def test_without_jobs_nothing_is_written(memory: MemoryCluster) -> None:
    async with daemon(memory, "a"), daemon(memory, "b"):
        await rested()
        assert memory.get(keys.SHARES) is None


async def test_one_of_the_daemons_writes_and_all_hear(memory: MemoryCluster) -> None:
    memory.transact((), (Put(ONE.active, Claim().encode()),))
    async with daemon(memory, "a") as one, daemon(memory, "b") as other:
        await rested()
        assert shares(memory) == {"one": 4}
        for mirror in (one, other):
            known = mirror.share_of("one")
            assert known is not None
            assert len(known.granted) == 4
            assert mirror.share_of("one") is known, "what is remembered by it stays"
            assert mirror.share_of("none") is not None


async def test_drains_sick_slots_and_quotas_are_received(memory: MemoryCluster) -> None:
    claims = (Put(ONE.active, Claim(namespace="x").encode()), Put(TWO.active, Claim().encode()))
    memory.transact((), claims)
    async with daemon(memory, "a") as mirror, daemon(memory, "b"):
        memory.transact((), (Put(keys.drained_node("a"), Drained().encode()),))
        memory.transact((), (Put(keys.sick_slots("b"), SickSlots(slots={"cpu:1": "it is gone"}).encode()),))
        await rested()
        assert mirror.drained == {"a"}
        assert mirror.sick["b"].slots == {"cpu:1": "it is gone"}
        assert sum(shares(memory).values()) <= 1
        memory.transact((), (Delete(keys.drained_node("a")), Delete(keys.sick_slots("b"))))
        memory.transact((), (Put(keys.QUOTAS, Quotas(slots={"x": 1}).encode()),))
        await rested()
        assert (mirror.drained, mirror.sick, dict(mirror.quotas)) == (frozenset(), {}, {"x": 1})
        memory.transact((), (Delete(keys.QUOTAS),))
        await rested()
        assert mirror.quotas == {}


async def test_unreadable_records_count_as_empty(memory: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    memory.transact(
        (),
        (
            Put(ONE.active, b"?"),
            Put(keys.QUOTAS, b"?"),
            Put(keys.sick_slots("a"), b"?"),
            Put(keys.drained_node("b"), b"?"),
        ),
    )
    async with daemon(memory, "a") as mirror, daemon(memory, "b"):
        await rested()
        assert shares(memory) == {"one": 2}
        assert mirror.claims == {"one": Claim()}
    assert "ignoring an unreadable record" in caplog.text


async def test_a_job_that_ended_is_forgotten(memory: MemoryCluster) -> None:
    memory.transact((), (Put(ONE.active, Claim().encode()),))
    async with daemon(memory, "a"), daemon(memory, "b"):
        await rested()
        memory.transact((), (Delete(ONE.active),))
        await rested()
        assert shares(memory) == {}


async def test_a_claim_is_changed_whoever_changes_it_meanwhile(memory: MemoryCluster) -> None:
    memory.transact((), (Put(ONE.active, Claim(priority=1).encode()),))

    class Busy(MemoryStore):
        times = 0

        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            self.times += 1
            if self.times == 1:
                memory.transact((), (Put(ONE.active, Claim(priority=2).encode()),))
            return await super().transact(compares, writes)

    store = Busy(memory)
    assert await change_claim(store, "one", lambda claim: claim.model_copy(update={"paused": True})) == Claim(
        priority=2, paused=True
    )
    assert store.times == 2
    assert await change_claim(store, "one", lambda claim: claim) == Claim(priority=2, paused=True)
    assert store.times == 2, "what is so already is not written"
    assert await change_claim(store, "two", lambda claim: claim) is None


async def test_a_change_of_which_nobody_knows_whether_it_was_written_says_so(memory: MemoryCluster) -> None:
    memory.transact((), (Put(ONE.active, Claim().encode()),))

    class Away(MemoryStore):
        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable, match="it is unknown whether the job's claim was changed"):
        await change_claim(Away(memory), "one", lambda claim: claim.model_copy(update={"paused": True}))
